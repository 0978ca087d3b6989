"""Passes over data sets as tasks of the right size, which an engine runs, and whose blocks the ranks share."""
