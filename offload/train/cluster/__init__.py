"""The Ray cluster: connecting to it, its nodes and processes, notices that nodes leave, requests for more."""
