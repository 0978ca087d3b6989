"""The process that calls ``fit()``: checks arguments, places and starts workers, decides, and writes the run directory."""
