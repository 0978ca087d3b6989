"""The order of samples and their division among tasks and ranks: permutations, ranges, chunks. Pure."""
