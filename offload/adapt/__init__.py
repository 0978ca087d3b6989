"""Decides what to change while training runs, from measurements. Pure: no clock, no I/O, no torch."""
