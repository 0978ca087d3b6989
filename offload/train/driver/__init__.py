"""The process that calls ``fit()``, which checks arguments, places and starts workers, decides, and writes the run directory."""
