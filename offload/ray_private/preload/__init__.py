"""What makes forks of a process that has imported Ray as good as new processes, and stand-ins for the scripts that Ray starts.

These modules run before anything else is imported, some as scripts. :mod:`offload.preload` decides when.
"""

from pathlib import Path

from offload.ray_private.part import Part

SERVER = Path(__file__).with_name("server.py")

PART = Part(
    name="preloaded processes",
    purpose="fork workers and preprocessing processes from a process that has imported torch and Ray already",
    without="Ray starts them as Python processes, which import for themselves",
    cost="each new process and each resize takes 5 to 10 s longer, and each process has its own copy of the modules in memory",
    needs=(
        "ray.actor:ActorClassID.from_random",
        "ray.actor:ActorClassID.size",
        "ray:NodeID.from_random",
        "ray._private.workers",
    ),
)
