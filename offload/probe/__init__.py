"""Measures a script in a minute: what its input side and its accelerator can do, each with the other taken away."""
