"""The preprocessing pool: one process per core, with two tasks in flight."""
