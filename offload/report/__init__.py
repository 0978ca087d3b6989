"""The output of a run for people: the live line, the summary, the run directory and its report.

It works on plain data from the layers above, and knows neither torch nor ray.
"""
