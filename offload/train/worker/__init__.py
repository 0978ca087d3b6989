"""The worker process, which trains: batches, steps, agreement between ranks, gradient noise, checkpoints."""
