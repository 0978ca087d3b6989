"""A drop-in DataLoader, whose batches come from every CPU of the cluster."""
