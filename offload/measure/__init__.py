"""Measurement of steps: what a worker waits for, computes and synchronises."""
