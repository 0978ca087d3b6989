"""Ways to start an offloaded training on machines that are not this one.

Where it stops: each launcher renders a request that can be printed, tested and diffed, then submits it. What runs
once the machines are up is the ``offload`` package's.
"""
