"""A process that trains: batches, steps, agreement between ranks, gradient noise, checkpoints."""
