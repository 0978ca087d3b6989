"""Starts Ray's node agent, on a Ray of this machine alone, as an installation without ``ray[default]`` would.

    python minimal_agent.py AGENT [ARGUMENT…]

AGENT is Ray's own script. With ``ray[default]`` installed it imports the dashboard's modules and samples every process of the node each
2.5 s, for a dashboard that such a Ray does not have: a second of CPU time at the start, then some 5 % of a core.
"""

import runpy
import sys

DASHBOARD_ONLY = "aiohttp_cors"  # the one package that ray[default] adds and only Ray's dashboard imports


def main(argv: list[str]) -> None:
    """Become the agent."""
    sys.modules[DASHBOARD_ONLY] = None  # type: ignore[assignment]  # an import of it fails, as where it is not installed
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
