"""A node's cache of files that its preprocessing processes have read."""
