"""Launch training as a job on any Ray cluster that serves Ray's job API."""
