"""Launch a script as a heterogeneous SageMaker training job."""
