"""Measures a script in a minute: what its input and its accelerator can do, each without the other."""
