"""What a person sees of a run: the live line, the summary, the run directory and its report.

Works on plain data that the layers above hand down; knows neither torch nor ray.
"""
