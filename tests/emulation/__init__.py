"""What tests and benchmarks run on instead of a cluster or a cloud: emulated hosts, ranks in threads, and AWS services on loopback."""

from tests.emulation.cpu_accounting import CpuSeconds
from tests.emulation.hosts import Hosts
from tests.emulation.netns import Host, HostProcess, HostsError, HostSpec, unavailable

__all__ = ["CpuSeconds", "Host", "HostProcess", "HostSpec", "Hosts", "HostsError", "unavailable"]
