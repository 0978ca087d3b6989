"""The address of a cluster's dashboard, where Ray takes jobs: pure.

Where it stops: :mod:`offload.launch.ray.job_api` finds out whether anything listens there.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from offload.errors import ConfigError, argument

DASHBOARD_PORT = 8265
GCS_PORT, CLIENT_PORT = 6379, 10001
"""The ports of Ray's own processes, and of drivers of Ray Client."""


def dashboard_url(address: str) -> str:
    """The address as ``http://head:8265``, without a path. Raises ConfigError for any other kind of address, with the one that the
    user probably means: Ray has several ports."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ConfigError(
            f"{argument('address')} must be the address of a Ray dashboard, such as http://head:{DASHBOARD_PORT}, found {address!r}."
        )
    name = f"[{host}]" if ":" in host else host
    if parts.scheme in ("http", "https"):
        return f"{parts.scheme}://{name}" + (f":{port}" if port else "") + parts.path.rstrip("/")
    if host == "auto":
        name = "127.0.0.1"
    known = port not in (None, GCS_PORT, CLIENT_PORT)  # any other port may be a dashboard's
    raise ConfigError(
        f"{argument('address')} {address} is not the address of a dashboard, where a Ray cluster takes jobs: pass "
        f"{argument('address')} http://{name}:{port if known else DASHBOARD_PORT}."
    )
