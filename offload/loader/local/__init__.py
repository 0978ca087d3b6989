"""The DataLoader without a cluster: processes of this machine make the batches."""
