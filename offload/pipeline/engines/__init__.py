"""What makes the blocks of a pass: the pool, or Ray Data."""
