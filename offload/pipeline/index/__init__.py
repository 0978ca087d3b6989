"""Which samples there are: the rows of a source, in memory or on disk."""
