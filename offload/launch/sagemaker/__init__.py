"""From a script to a heterogeneous SageMaker training job."""
