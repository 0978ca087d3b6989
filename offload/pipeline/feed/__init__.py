"""Passes over data sets as tasks of the right size, which an engine runs, and whose blocks the ranks share.

The way of one sample, from the index to the step, with the method that takes each stretch:

1. ``PassTasks.next_task`` cuts index rows into a ``Task``, inside a ``PassTask`` that knows the pass.
2. ``Pool`` sends the task to a core, where ``Preprocessor.process`` makes a ``Block`` of it and leaves it in the object store.
3. ``PassTask.finished`` gets the block's reference and cost, and ``Pass.put`` brings it into order and shares it out in ``Slice`` s.
4. ``Feed.next_slices`` hands the slices to a rank, whose ``HubFeed`` asks for them.
5. ``fetch_block`` brings the block to the rank's process, and a ``Cutter`` joins pieces of blocks to local batches.
6. ``Delivery`` makes tensors, which ``DevicePlacement`` copies to the GPU.

If a block is lost on the way, ``Feed.again`` makes it again: a ``RepeatedTask`` repays the rank's slice.
"""
