"""The state of a DataLoader, which a checkpoint can hold: its place in an epoch, and what its samplers drew."""
