"""The user's program in other processes: how its objects get there, and how its output comes back."""
