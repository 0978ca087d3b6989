"""A worker's training state, and when and how it goes into checkpoints."""
