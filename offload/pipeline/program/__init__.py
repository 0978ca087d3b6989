"""What of the user's program reaches other processes, and what these print for it."""
