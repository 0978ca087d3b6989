"""The programs of the matrix. Each checks its outcome, prints one line of JSON and ends with 0, or fails.

    python -m benchmarks.matrix.programs.NAME

They run in an environment that holds offload's requirements alone, on two cores, with tiny models and data sets.
"""
