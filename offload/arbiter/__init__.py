"""The arbiter: it follows the runs of one cluster, and hands workers and cores from one to another as the allocation decides.

Where it stops: :mod:`offload.model.allocation` decides who is to have what. Nothing here talks to a cluster, reads a clock or starts a
thread: these modules are values and pure functions.
"""
