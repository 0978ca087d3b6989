"""A simulated cluster that trains: what is true of a workload, what policies rent for it, and what that takes and costs.

A map: :mod:`job` (what is true), :mod:`flow` (samples/s of cores, links and the hub), :mod:`steps` (steps that wait for batches),
:mod:`steady` (the rate and dollars of many shapes at once), :mod:`run` (one run with interruptions, event by event),
:mod:`workloads` (random and typical jobs and price tables), :mod:`probing` (the profile that a probe would write), :mod:`policies`,
:mod:`regret`, :mod:`scaling`, :mod:`hub` and :mod:`validation` (the tables). Pure but for :mod:`validation`, which reads records.
"""
