"""How a run on a Ray cluster shows itself to others, and how they steer it."""
