"""One core's task: read, transform and pack samples, with reproducible random numbers."""
