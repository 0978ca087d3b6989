"""Blocks of samples: their wire format, their memory, and their way between nodes."""
