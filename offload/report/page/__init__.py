"""The page of one or several runs, as values: read a run directory, and work out what the page shows.

The way of the data: ``records`` reads the files, ``story`` works out what follows from them, ``view`` holds everything that the page
shows, and ``html`` renders it. ``charts`` draws the same values.
"""
