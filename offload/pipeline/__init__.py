"""TODO: the room's one sentence."""
