"""Random but possible workloads and shapes, for tests of laws."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from offload.model import GradientNoise, InputRate, NodeType, StepTime


def seconds(least: float = 1e-4, most: float = 1.0) -> Any:
    return st.floats(least, most, allow_nan=False)


step_times = st.builds(
    StepTime,
    alpha_compute=seconds(1e-3, 1.0),
    beta_compute=seconds(1e-5, 0.1),
    alpha_intra=seconds(0.0, 0.5),
    beta_intra=seconds(0.0, 0.05),
    alpha_inter=seconds(0.0, 1.0),
    beta_inter=seconds(0.0, 0.1),
    gamma=st.floats(1.0, 10.0),
)
noises = st.builds(
    GradientNoise,
    sqr=st.floats(1e-6, 10.0),
    var=st.floats(1e-6, 10.0),
    batch_size=st.integers(8, 256),
)
input_rates = st.builds(
    InputRate,
    core_seconds_per_sample=st.floats(1e-4, 0.2),
    wire_bytes_per_sample=st.floats(1e3, 1e6),
    contention=st.floats(0.0, 1.0),
    ingest_samples_per_s_per_worker=st.one_of(st.just(float("inf")), st.floats(10.0, 1e5)),
    raw_bytes_per_sample=st.floats(0.0, 1e6),
    storage_bytes_per_s=st.one_of(st.just(float("inf")), st.floats(1e7, 1e10)),
    host_cpus_per_worker=st.sampled_from([0.0, 1.0, 2.0]),
)
gpu_types = st.builds(
    NodeType,
    name=st.just("gpu"),
    vcpus=st.integers(4, 96),
    memory_gib=st.just(64.0),
    gpus=st.sampled_from([1, 2, 4, 8]),
    gpu_model=st.just("G"),
    network_gbps=st.floats(1.0, 100.0),
    usd_per_hour=st.floats(0.5, 40.0),
)
cpu_types = st.builds(
    NodeType,
    name=st.just("cpu"),
    vcpus=st.integers(1, 96),
    memory_gib=st.just(64.0),
    network_gbps=st.floats(1.0, 100.0),
    usd_per_hour=st.floats(0.05, 5.0),
    core_speed=st.floats(0.5, 2.0),
)
