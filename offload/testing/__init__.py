"""Tools for tests and benchmarks, public so that users can test with them too. Not imported by the rest of offload."""

from offload.paced import PacedAccelerator
from offload.testing._accounting import CpuSeconds
from offload.testing.hosts import Hosts
from offload.testing.netns import Host, HostProcess, HostsError, HostSpec, unavailable

__all__ = [
    "CpuSeconds",
    "Host",
    "HostProcess",
    "HostSpec",
    "Hosts",
    "HostsError",
    "PacedAccelerator",
    "unavailable",
]
