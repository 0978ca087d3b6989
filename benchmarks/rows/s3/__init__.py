"""The rows of other libraries in the benchmark `storage_latency`: each reads a pass of JPEGs from S3."""
