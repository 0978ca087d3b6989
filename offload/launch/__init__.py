"""Launch an offloaded training on other machines.

Each launcher renders a request that can be printed, tested and compared, then submits it (:mod:`offload.launch.launcher`).
Where it stops: once the machines are up, the rest of ``offload`` takes over.
"""
