"""The page of one or several runs, as values: read a run directory, and work out what the page shows.

Where it stops: :mod:`offload.report.html` renders these values, and :mod:`offload.report.pictures` draws them.
"""
