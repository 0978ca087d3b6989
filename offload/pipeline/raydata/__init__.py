"""A ``ray.data.Dataset`` as units of work for the pool, or executed by Ray Data."""
