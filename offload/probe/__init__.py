"""Measure a script in a minute: the rates of its input and of its accelerator, each without the other."""
