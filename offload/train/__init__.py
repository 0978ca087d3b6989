"""Training: the driver's Trainer, the worker's Context, and the messages between them."""
