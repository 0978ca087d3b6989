"""The rows of `peers`: one module per library, run with the Python of an environment that has this library, and without offload."""
