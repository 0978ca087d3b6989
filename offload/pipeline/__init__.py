"""Preprocess a data set on many cores: from what the user describes to blocks on their way to the processes that train.

The rooms from the top, each of which imports only those below it:

* ``describe``: the user's words, such as sources by name, mixtures, caches.
* ``feed``: passes, tasks and their size, and who makes and gets which block.
* ``raydata``: Datasets of Ray Data.
* ``sources``: files, tables, shards, torch data sets.
* ``pool``: one process per core.
* ``preprocessing``: one core's task.
* ``images``: decoding, on the CPU and on the device.
* ``index``: which samples there are.
* ``blocks``: the wire format and its transport.
* ``program``: what of the user's program reaches other processes.
* ``cache``: a node's cache of files.
* ``order``: permutations and ranges, pure.
"""
