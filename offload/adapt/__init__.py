"""Adaptation, decided: what to change while training runs, from what was measured. Pure: no clock, no I/O, no torch."""
