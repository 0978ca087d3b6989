"""Ways to start an offloaded training on machines that are not this one.

Each launcher renders a request that can be printed, tested and compared, then submits it (:mod:`offload.launch.launcher`).
Where it stops: once the machines are up, the rest of ``offload`` takes over.
"""
