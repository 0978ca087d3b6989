"""Training on Ray Train: the driver's Trainer, the worker's Context, and what passes between them."""
