"""Where a run runs: on a Ray cluster, or on this machine by processes of its own."""
