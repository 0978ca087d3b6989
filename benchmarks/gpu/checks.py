"""The checks in their order: cheap ones first, so that a short budget still tells most. Imports nothing that they need.

The first check and the first run of a fresh machine also wait for its disk.
"""

from benchmarks.gpu.supervise import Check

CHECKS = (
    Check(name="devices", function="benchmarks.gpu.devices:devices", most_s=90),
    Check(name="clocks", function="benchmarks.gpu.clocks:clocks", most_s=60),
    Check(name="copies", function="benchmarks.gpu.copies:copies", most_s=60),
    Check(name="fork", function="benchmarks.gpu.fork:fork", least_s=25, most_s=120),
    Check(name="precision", function="benchmarks.gpu.precision:precision", least_s=40, most_s=150),
    Check(name="memory", function="benchmarks.gpu.memory:memory", least_s=60, most_s=150),
    Check(name="nccl", function="benchmarks.gpu.workers:nccl", least_s=30, most_s=90),
    Check(name="sync_batch_norm", function="benchmarks.gpu.workers:sync_batch_norm", least_s=30, most_s=90),
    Check(name="loader", function="benchmarks.gpu.loader:loader", least_s=30, most_s=90),
    Check(name="decode", function="benchmarks.gpu.decode:decode", least_s=20, most_s=60),
    Check(name="busy", function="benchmarks.gpu.busy:busy", least_s=330, most_s=400),
)
NAMES = tuple(check.name for check in CHECKS)
