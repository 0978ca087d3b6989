"""Everything private to Ray that offload uses, and what it does where a Ray lacks it.

Ray documents none of this, and any release may change it. Each part (:mod:`offload.ray_private.part`) says what it is for, which public
way its functions take without it, and what its absence costs. So callers need not know whether a part is there.
:mod:`offload.ray_private.parts` lists all of them. The rooms:

* ``preload``: what makes forks of a process with Ray's modules as good as new processes, and stand-ins for Ray's start scripts.
* ``data``: the plans and blocks of ``ray.data.Dataset``.
"""
