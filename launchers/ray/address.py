"""The address of a cluster's dashboard, where Ray takes jobs: pure.

Where it stops: whether anything listens there is found out by :mod:`launchers.ray.client`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from offload.errors import ConfigError

DASHBOARD_PORT = 8265
GCS_PORT, CLIENT_PORT = 6379, 10001
"""Where Ray's own processes join, and drivers of Ray Client."""


def dashboard_url(address: str) -> str:
    """``http://head:8265`` without what may follow it. Raises ConfigError for any other kind of address, naming the one that
    is likely meant: Ray has a port for each of its ways in."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ConfigError(
            f"--address is that of a Ray dashboard, such as http://head:{DASHBOARD_PORT}, found {address!r}."
        )
    name = f"[{host}]" if ":" in host else host
    if parts.scheme in ("http", "https"):
        return f"{parts.scheme}://{name}" + (f":{port}" if port else "") + parts.path.rstrip("/")
    if host == "auto":
        name = "127.0.0.1"
    known = port not in (None, GCS_PORT, CLIENT_PORT)  # a port that is neither may well be a dashboard's
    raise ConfigError(
        f"--address {address} is not that of a dashboard, which is where a Ray cluster takes jobs: pass "
        f"--address http://{name}:{port if known else DASHBOARD_PORT}."
    )
