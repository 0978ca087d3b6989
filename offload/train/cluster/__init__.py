"""The Ray cluster: connections to it, its nodes and processes, notices of leaving nodes, requests for more nodes."""
