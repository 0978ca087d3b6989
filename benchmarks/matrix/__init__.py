"""The rows and programs of benchmarks/compatibility.py: which versions are installed, and what must work with them."""
