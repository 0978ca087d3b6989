"""The plan of a run: which machines to rent, searched and explained from a profile and a catalog."""
