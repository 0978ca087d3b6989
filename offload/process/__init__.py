"""This process: forks, signals, and what Ray changes in it."""
