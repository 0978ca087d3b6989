"""Processes of one machine: their messages and the memory that they share, forks, signals, and what Ray changes in a process.

How processes start is no part of it, since the two that start some need opposite things. Those of a DataLoader are children of the program,
by the method that the user chooses, and its own thread waits for them, as in torch (:mod:`offload.loader.local`). Those of a Trainer are
forks of a process with a single thread, which a run can start while the program has many threads (:mod:`offload.actors`).
"""
