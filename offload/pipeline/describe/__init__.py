"""What users write: sources by name, and their combinations, mixtures and caches."""
