"""Decide from measurements what to change while training runs. Pure: no clock, no I/O, no torch."""
