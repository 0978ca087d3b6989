"""The format of checkpoints, their storage, and Ray Train's list of them."""
