"""The sources of samples. Each source lists its samples once (an index) and reads any of them in any task."""
