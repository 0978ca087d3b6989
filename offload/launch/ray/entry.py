"""The entry point on the cluster's head: check this Python, then become ``offload run``.

    python3 -m offload.launch.ray.entry LAUNCHED_WITH COMMAND [ARGUMENT…]

LAUNCHED_WITH is the version of the Python that launched the job; COMMAND and its arguments are ``offload``'s. Before the checks, this
module imports only the standard library and what offload says of versions, in the syntax of Python 3.8: the Python here may be any version.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys

from offload.versions import PYTHONS, installed_ray, python_range, ray_refusal

RAY = "ray[data]"
NEEDED = (
    # (module, package): the imports of every run, whatever its script does
    ("ray", RAY),
    ("torch", "torch"),
    ("numpy", "numpy"),
    ("scipy", "scipy"),
    ("pandas", "pandas"),
    ("pyarrow", "pyarrow"),
    ("fsspec", "fsspec"),
    ("psutil", "psutil"),
    ("platformdirs", "platformdirs"),
    ("click", "click"),
    ("rich", "rich"),
    ("jinja2", "jinja2"),
    ("matplotlib", "matplotlib"),
)


def main(argv: list[str]) -> None:
    """Check this Python, then become ``offload``."""
    launched_with, *command = argv
    reason = unfit(launched_with)
    if reason:
        print("offload: " + reason, file=sys.stderr)
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, "-m", "offload", *at_home(command)])


def unfit(launched_with: str) -> str:
    """The reason why this Python cannot run a training, or an empty text."""
    version = sys.version_info[:2]
    here = "%s is Python %s" % (sys.executable, platform.python_version())  # noqa: UP031  # plain for the oldest
    if not PYTHONS[0] <= version < PYTHONS[1]:
        return (
            here
            + ", and offload needs "
            + python_range()
            + " (the job was launched with "
            + launched_with
            + "): the cluster's nodes "
            "need an image, or an environment, with such a Python, and the same on all of them."
        )
    missing = [pip for module, pip in NEEDED if importlib.util.find_spec(module) is None]
    if RAY in missing:
        return (
            here + ", the first python3 on the PATH of the cluster's head, and has no Ray: start Ray there with its "
            "environment activated, so that this PATH finds the Python that Ray runs with."
        )
    refusal = ray_refusal(installed_ray())
    if refusal is not None:
        return here + " on the cluster. " + refusal
    if missing:
        return (
            here
            + " on the cluster, and lacks "
            + ", ".join(missing)
            + ": name it in a file that you pass with --requirements, or "
            "install it in the image of the cluster's nodes."
        )
    return ""


def at_home(command: list[str]) -> list[str]:
    """The command with the ``~`` of its run directory expanded on this host, whose home it means."""
    place = command.index("--run-dir") + 1
    return [os.path.expanduser(text) if number == place else text for number, text in enumerate(command)]


if __name__ == "__main__":
    main(sys.argv[1:])
