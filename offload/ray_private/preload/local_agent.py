"""Starts Ray's node agent so that it listens on the loopback address alone: on a Ray of one machine, others need not reach it.

    python local_agent.py AGENT [ARGUMENT…]

AGENT is Ray's own script. It serves the node's metrics, without authentication. Ray itself binds them to all addresses, unless the
node's address is the loopback one, which it does not let a node have.
"""

import runpy
import sys

ADDRESS, LOOPBACK = "--node-ip-address=", "127.0.0.1"


def main(argv: list[str]) -> None:
    """Become the agent."""
    sys.argv = [ADDRESS + LOOPBACK if word.startswith(ADDRESS) else word for word in argv]
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
