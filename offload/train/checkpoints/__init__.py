"""Checkpoints: their format, their storage, and Ray Train's list of them."""
