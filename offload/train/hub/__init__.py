"""The actor that feeds the workers, receives their reports, and passes on the driver's orders. Imports no torch."""
