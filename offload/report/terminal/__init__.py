"""What a terminal shows: the live line and the full-screen view of a run, and summaries, profiles, plans and jobs as text."""
