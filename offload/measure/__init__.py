"""Measurement of steps: a worker's times of waiting, computing and synchronising."""
