"""The training processes of a run: start, join, watch and end them, on Ray or on this machine."""
