"""What a run leaves behind and what people see of it: the run directory, its events, the terminal and the page.

It works on plain data from the layers above, and knows neither torch nor ray.
"""
