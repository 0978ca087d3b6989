"""Actors on this machine: processes that answer calls, and values that they share, without a cluster."""
