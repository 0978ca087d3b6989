"""The DataLoader without a cluster: processes of this machine make the batches.

Why not torch's own worker processes, over a data set of orders: torch hands each batch to the next worker in turn, so that a slow one
holds up those behind it, where here the first free process takes it. Its iteration ends with the first worker that dies, where here the
batches are made again. Its batches need room in ``/dev/shm`` and an open file for each tensor. Why not a ``ProcessPoolExecutor``: it sends
results through one pipe as pickles, cannot replace a process, and waits for the tasks of an iteration that the program has left.
"""
