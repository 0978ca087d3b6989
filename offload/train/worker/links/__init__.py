"""A worker's links: to the other ranks (their messages and agreements) and to the driver (reports, output, signs of life)."""
