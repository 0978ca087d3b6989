"""The goals of a run for its workers, cores and nodes: one pure state machine, ``step(state, event) -> (state, actions)``.

:mod:`messages` has the events and actions, :mod:`state` the states and the orders that follow from one, :mod:`state_machine` the
transitions. :mod:`room` finds where workers and cores fit, and their price; :mod:`known_nodes` selects the cluster's nodes that a run may
use. Nothing here waits, reads a clock or does I/O: :mod:`offload.train.driver.conductor` does.
"""
