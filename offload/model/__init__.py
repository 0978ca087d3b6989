"""Pure decisions: no clock, no I/O, no torch, no ray.

This layer holds what the others decide with. Today that is where workers and preprocessing fit on a cluster
(:mod:`offload.model.placement`).
"""
