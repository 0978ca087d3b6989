"""Benchmarks: each makes one claim, with ratios taken side by side in one run. See README.md."""
