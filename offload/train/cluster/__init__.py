"""Connections to the Ray cluster, its nodes and processes, notices of leaving nodes, and requests for more nodes."""
