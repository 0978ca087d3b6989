"""What a run wants of its workers, cores and nodes: one pure state machine, ``step(state, event) -> (state, actions)``.

:mod:`messages` has the events and actions, :mod:`state` the states and the orders that follow from one, :mod:`machine` the transitions,
:mod:`room` where workers and cores fit and what they cost, :mod:`nodes` which of the cluster's nodes a run may use. Nothing here waits,
reads a clock or talks to anybody: :mod:`offload.train.driver.conductor` does.
"""
