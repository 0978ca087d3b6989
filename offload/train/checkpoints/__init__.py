"""The format of checkpoints, their storage, the folder of a run, and which of its checkpoints stay."""
