"""What must hold of the joint model whatever its parameters are."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.model import GradientNoise, InputRate, JointGoodput, NodeType, Shape, StepTime
from offload.model.blocks import BLOCK_BYTES, HUB_BLOCK_S, HUB_ROOM, hub_slowdown
from offload.model.feeds import MOST_FEEDS
from offload.model.input_rate import BOTTLENECKS
from offload.model.overlap import overlap_of_queue, overlapped
from tests.strategies import cpu_types, gpu_types, input_rates, noises, step_times

NODES, WORKERS = st.integers(1, 16), st.integers(1, 8)


# --- accelerators -----------------------------------------------------------------------------------------------------


@given(step_times, NODES, WORKERS, st.integers(1, 512), st.integers(0, 8))
def test_a_step_lies_between_perfect_overlap_and_none(
    model: StepTime, nodes: int, per_node: int, local: int, accum: int
) -> None:
    workers = nodes * per_node
    compute, sync = model.compute_time_s(local), model.sync_time_s(nodes, workers)
    step = model.predict(nodes, workers, local, accum)
    assert accum * compute + max(compute, sync) <= step * (1 + 1e-9)
    assert step <= (accum + 1) * compute + sync + 1e-9


@given(step_times, NODES, st.integers(1, 512))
def test_one_worker_has_nobody_to_wait_for(model: StepTime, accum: int, local: int) -> None:
    assert model.predict(1, 1, local, accum) == pytest.approx((accum + 1) * model.compute_time_s(local))


@given(step_times, NODES, WORKERS, st.integers(1, 512), st.integers(0, 8))
def test_a_step_takes_longer_with_more_samples_workers_and_micro_batches(
    model: StepTime, nodes: int, per_node: int, local: int, accum: int
) -> None:
    at = model.predict(nodes, nodes * per_node, local, accum)
    assert model.predict(nodes, nodes * per_node, local + 1, accum) >= at
    assert model.predict(nodes, nodes * per_node, local, accum + 1) >= at
    if nodes * per_node > 1:
        assert model.predict(nodes, nodes * per_node + 1, local, accum) >= at * (1 - 1e-12)


@given(step_times, st.floats(0.1, 100))
def test_a_faster_device_computes_faster_and_synchronises_as_before(model: StepTime, speed: float) -> None:
    faster = model.on_faster_device(speed)
    assert faster.compute_time_s(64) == pytest.approx(model.compute_time_s(64) / speed)
    assert faster.sync_time_s(2, 4) == model.sync_time_s(2, 4)


@given(step_times)
def test_predictions_broadcast(model: StepTime) -> None:
    nodes, workers, local = np.array([1, 1, 4]), np.array([1, 4, 16]), np.array([[8], [64]])
    many = model.predict(nodes, workers, local, 1)
    assert many.shape == (2, 3)
    one = [[model.predict(int(n), int(k), int(m), 1) for n, k in zip(nodes, workers, strict=True)] for m in local[:, 0]]
    np.testing.assert_allclose(many, one)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(1, 1e6))
def test_overlap_never_hides_more_than_the_shorter_of_two(a: float, b: float, power: float) -> None:
    together = float(overlapped(a, b, power))
    assert max(a, b) <= together * (1 + 1e-12) + 1e-300
    assert together <= (a + b) * (1 + 1e-12)
    assert together >= float(overlapped(a, b, power + 1)) * (1 - 1e-12)


def simulated_rate(buffer: int, variation: float, slower: float, items: int = 20_000) -> float:
    """Items per second through a station of 1 s each, a buffer, and one of ``slower`` seconds, by simulation."""
    rng = np.random.default_rng(0)
    first, second = (rng.gamma(variation**-2, mean * variation**2, items) for mean in (1.0, slower))
    made = done = 0.0
    taken: list[float] = []
    for i in range(items):
        # The first station goes on only when there is room behind it.
        made = max(made, taken[i - buffer - 1] if i > buffer else 0.0) + first[i]
        taken.append(max(made, done))
        done = taken[-1] + second[i]
    return items / done


@pytest.mark.parametrize("buffer", [1, 2, 8])
@pytest.mark.parametrize("variation", [0.1, 0.3, 1.0])
def test_a_queue_overlaps_as_it_does_in_simulation(buffer: int, variation: float) -> None:
    power = overlap_of_queue(buffer, variation)
    for slower in (0.7, 0.9, 1.0, 1.1, 1.4):
        predicted = 1 / float(overlapped(1.0, slower, power))
        assert predicted == pytest.approx(simulated_rate(buffer, variation, slower), rel=0.035)


def test_the_overlap_of_a_queue_has_its_limits() -> None:
    assert overlap_of_queue(2, 0.0) == 64.0
    assert overlap_of_queue(0, 10.0) == 1.0
    assert overlap_of_queue(8, 0.5) > overlap_of_queue(2, 0.5)


# --- statistical efficiency -------------------------------------------------------------------------------------------


@given(noises, st.floats(1, 1e4), st.floats(1, 10))
def test_efficiency_falls_with_the_batch_and_gain_rises(noise: GradientNoise, scale: float, more: float) -> None:
    small, large = noise.batch_size * scale, noise.batch_size * scale * more
    assert 0 < noise.efficiency(large) <= noise.efficiency(small) * (1 + 1e-12)
    assert noise.efficiency(small) <= 1 + 1e-12
    assert 1 - 1e-12 <= noise.gain(small) <= noise.gain(large) * (1 + 1e-12)
    assert noise.gain(large) <= scale * more * (1 + 1e-9)


def test_efficiency_at_the_initial_batch_is_one_and_below_it_undefined() -> None:
    noise = GradientNoise(sqr=0.00136, var=0.000502, batch_size=64)
    assert noise.efficiency(64) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"at least the initial 64, found 63"):
        noise.gain(np.array([128, 63]))


# --- input side -------------------------------------------------------------------------------------------------------


@given(input_rates, gpu_types, cpu_types, st.integers(1, 4), st.integers(0, 32))
def test_a_cpu_more_never_slows_the_input(
    rate: InputRate, gpu: NodeType, cpu: NodeType, gpu_nodes: int, cpu_nodes: int
) -> None:
    workers = gpu_nodes * gpu.gpus
    at = rate.samples_per_s(Shape({gpu: gpu_nodes, cpu: cpu_nodes}), workers)
    assert rate.samples_per_s(Shape({gpu: gpu_nodes, cpu: cpu_nodes + 1}), workers) >= at * (1 - 1e-12)
    wider = dataclasses.replace(gpu, vcpus=gpu.vcpus + 1)
    assert rate.samples_per_s(Shape({wider: gpu_nodes, cpu: cpu_nodes}), workers) >= at * (1 - 1e-12)


@given(input_rates, gpu_types, cpu_types, st.integers(1, 4), st.integers(0, 32))
def test_the_bottleneck_is_what_lifts_the_rate_when_it_is_lifted(
    rate: InputRate, gpu: NodeType, cpu: NodeType, gpu_nodes: int, cpu_nodes: int
) -> None:
    workers = gpu_nodes * gpu.gpus
    shape = Shape({gpu: gpu_nodes, cpu: cpu_nodes})
    rate = dataclasses.replace(rate, hub_block_s=0.1)  # a slow one, so that it binds at this size, too
    at = rate.samples_per_s(shape, workers)
    lift = {
        "cpu": dataclasses.replace(rate, core_seconds_per_sample=rate.core_seconds_per_sample / 2),
        "network": dataclasses.replace(rate, wire_bytes_per_sample=rate.wire_bytes_per_sample / 2),
        "ingest": dataclasses.replace(rate, ingest_samples_per_s_per_worker=rate.ingest_samples_per_s_per_worker * 2),
        "storage": dataclasses.replace(rate, storage_bytes_per_s=rate.storage_bytes_per_s * 2),
        "hub": dataclasses.replace(rate, hub_block_s=rate.hub_block_s / 2),
    }
    limits = dict(zip(BOTTLENECKS, rate._limits(shape, workers).tolist(), strict=True))
    bound = rate.bottleneck(shape, workers)
    if at > 0 and sum(limit <= at * (1 + 1e-9) for limit in limits.values()) == 1:
        assert lift[bound].samples_per_s(shape, workers) > at


@given(input_rates, gpu_types, cpu_types, st.integers(1, 4), st.integers(0, 2000), st.floats(1e-4, 0.1))
def test_feeds_hand_out_no_more_blocks_than_they_can(
    rate: InputRate, gpu: NodeType, cpu: NodeType, gpu_nodes: int, cpu_nodes: int, block_s: float
) -> None:
    shape, workers = Shape({gpu: gpu_nodes, cpu: cpu_nodes}), gpu_nodes * gpu.gpus
    limited = dataclasses.replace(rate, hub_block_s=block_s)
    at = limited.samples_per_s(shape, workers)
    assert at <= rate.samples_per_s(shape, workers)
    # A block holds twice 128 MiB at most, or one sample.
    largest = max(HUB_ROOM * BLOCK_BYTES / max(rate.wire_bytes_per_sample, 1.0), 1.0)
    feeds = min(workers, MOST_FEEDS)  # at most
    assert at <= feeds * largest / (block_s * float(hub_slowdown(workers / feeds))) * (1 + 1e-9)
    faster = dataclasses.replace(rate, hub_block_s=block_s / 2)
    assert at <= faster.samples_per_s(shape, workers) <= 2 * at * (1 + 1e-9)


def test_a_block_costs_the_hub_what_was_measured_with_8_and_with_64_workers() -> None:
    assert [HUB_BLOCK_S * float(hub_slowdown(workers)) for workers in (8, 64)] == pytest.approx(
        [0.004283, 0.005343], rel=0.01
    )


def test_the_input_rate_by_hand() -> None:
    gpu = NodeType(name="g", vcpus=4, memory_gib=16, gpus=1, gpu_model="G", network_gbps=10, usd_per_hour=1)
    cpu = NodeType(name="c", vcpus=16, memory_gib=32, network_gbps=10, usd_per_hour=1, core_speed=1.5)
    rate = InputRate(core_seconds_per_sample=0.01, wire_bytes_per_sample=602_112, contention=0.01)
    here = 3 / (0.01 * 1.02)
    there = 1.5 * 16 / (0.01 * 1.15)
    assert rate.samples_per_s(Shape({gpu: 1}), 1) == pytest.approx(here)
    # 0.8 × 10 Gb/s carry 1,661 samples of 602 kB, less than two nodes make.
    assert rate.samples_per_s(Shape({gpu: 1, cpu: 2}), 1) == pytest.approx(here + 1e9 / 602_112)
    assert rate.bottleneck(Shape({gpu: 1, cpu: 2}), 1) == "network"
    small = dataclasses.replace(rate, wire_bytes_per_sample=150_528)
    assert small.samples_per_s(Shape({gpu: 1, cpu: 2}), 1) == pytest.approx(here + 2 * there)
    assert small.bottleneck(Shape({gpu: 1, cpu: 2}), 1) == "cpu"
    many = small.samples_per_s(Shape({gpu: 1, cpu: np.array([0, 2])}), 1)
    np.testing.assert_allclose(many, [here, here + 2 * there])


def test_what_travels_costs_both_its_hosts() -> None:
    gpu = NodeType(name="g", vcpus=4, memory_gib=16, gpus=1, gpu_model="G", network_gbps=1000, usd_per_hour=1)
    cpu = NodeType(name="c", vcpus=16, memory_gib=32, network_gbps=1000, usd_per_hour=1)
    rate = InputRate(0.001, 150_000, remote_core_seconds_per_byte=2e-9)  # 0.15 ms at each end
    remote = 16 / 0.00115
    assert rate.samples_per_s(Shape({gpu: 1}), 1) == pytest.approx(3 / 0.001)  # nothing travels
    assert rate.samples_per_s(Shape({gpu: 1, cpu: 1}), 1) == pytest.approx(remote + (3 - remote * 0.00015) / 0.001)
    assert rate.samples_per_s(Shape({gpu: 2}), 2) == pytest.approx(
        2 * 3 / 0.001
    )  # each worker takes what its node makes
    # The second node has no worker: 4 of 7 samples travel, at two ends.
    assert rate.samples_per_s(Shape({gpu: 2}), 1) == pytest.approx((3 + 4) / (0.001 + 0.0003 * 4 / 7))
    # More than the GPU node's cores can receive: it makes nothing itself.
    assert rate.samples_per_s(Shape({gpu: 1, cpu: 8}), 1) == pytest.approx(8 * remote)


@given(input_rates, gpu_types, cpu_types, st.integers(1, 4), st.integers(0, 32), st.floats(0, 1e-8))
def test_travel_never_speeds_the_input_up(
    rate: InputRate, gpu: NodeType, cpu: NodeType, gpu_nodes: int, cpu_nodes: int, seconds_per_byte: float
) -> None:
    shape, workers = Shape({gpu: gpu_nodes, cpu: cpu_nodes}), gpu_nodes * gpu.gpus
    dearer = dataclasses.replace(rate, remote_core_seconds_per_byte=seconds_per_byte)
    assert dearer.samples_per_s(shape, workers) <= rate.samples_per_s(shape, workers) * (1 + 1e-12)


@given(input_rates, gpu_types, cpu_types, st.integers(1, 4), st.integers(0, 32), st.integers(1, 32), st.floats(0, 1e-8))
def test_more_cpu_nodes_never_lower_the_rate(
    rate: InputRate, gpu: NodeType, cpu: NodeType, gpu_nodes: int, cpu_nodes: int, more: int, seconds_per_byte: float
) -> None:
    rate = dataclasses.replace(rate, remote_core_seconds_per_byte=seconds_per_byte)
    few, many = (Shape({gpu: gpu_nodes, cpu: count}) for count in (cpu_nodes, cpu_nodes + more))
    workers = gpu_nodes * gpu.gpus
    assert rate.samples_per_s(many, workers) >= rate.samples_per_s(few, workers) * (1 - 1e-12)


@given(input_rates, gpu_types, cpu_types, st.integers(1, 4), st.integers(0, 32), st.floats(0, 1e-8), st.data())
def test_the_rate_is_that_of_a_linear_programme(
    rate: InputRate,
    gpu: NodeType,
    cpu: NodeType,
    gpu_nodes: int,
    cpu_nodes: int,
    seconds_per_byte: float,
    data: st.DataObject,
) -> None:
    """Samples of GPU nodes and of CPU nodes share the cores and network cards of the GPU nodes."""
    rate = dataclasses.replace(
        rate, contention=0.0, remote_core_seconds_per_byte=seconds_per_byte, storage_bytes_per_s=math.inf,
        ingest_samples_per_s_per_worker=math.inf,
    )  # fmt: skip
    workers = data.draw(st.integers(1, gpu_nodes * gpu.gpus))
    w, size = rate.core_seconds_per_sample, rate.wire_bytes_per_sample
    held = [workers // gpu_nodes + (node < workers % gpu_nodes) for node in range(gpu_nodes)]
    free = [max(gpu.vcpus - each * rate.host_cpus_per_worker, 0.0) for each in held]
    beyond = [mine / (sum(free) or 1.0) - each / workers for mine, each in zip(free, held, strict=True)]
    end, between = seconds_per_byte * size / 2, sum(max(each, 0.0) for each in beyond)
    cores = gpu.core_speed * sum(free)
    cards = [0.8 * 1e9 / 8 * kind.network_gbps * count for kind, count in ((gpu, gpu_nodes), (cpu, cpu_nodes))]
    # Of (local, remote): cores of GPU nodes, of CPU nodes; bytes in and out of both kinds' cards.
    used = [[w + 2 * between * end, end], [0.0, w + end], [between * size, size], [between * size, 0.0], [0.0, size]]
    there = [cores, cpu_nodes * cpu.core_speed * cpu.vcpus, cards[0], cards[0], cards[1]]
    scaled = [[each / (most or 1.0) for each in row] for row, most in zip(used, there, strict=True)]
    rows = [float(most > 0) for most in there]
    best = -scipy.optimize.linprog([-1.0, -1.0], A_ub=scaled, b_ub=rows, bounds=[(0, None)] * 2).fun
    # Beyond the programme: a GPU node receives even if its workers take all of its cores.
    best = max(best, min(there[1] / (w + end), min(cards) / size))
    assert rate.samples_per_s(Shape({gpu: gpu_nodes, cpu: cpu_nodes}), workers) == pytest.approx(
        best, rel=1e-5, abs=1e-9
    )


def test_cpu_nodes_beyond_the_network_cost_the_gpu_node_nothing() -> None:
    gpu = NodeType(name="g", vcpus=32, memory_gib=244, gpus=4, gpu_model="V", network_gbps=10, usd_per_hour=1)
    cpu = NodeType(name="c", vcpus=16, memory_gib=32, network_gbps=10, usd_per_hour=1)
    rate = InputRate(0.010, 602_112, remote_core_seconds_per_byte=1.4e-9)
    found = rate.samples_per_s(Shape({gpu: 1, cpu: np.array([2, 4, 8, 32])}), 4)
    np.testing.assert_allclose(found, found[0], rtol=0.01)


def test_traffic_between_gpu_nodes_is_limited_by_their_network_cards() -> None:
    gpu = NodeType(name="g", vcpus=32, memory_gib=244, gpus=4, gpu_model="V", network_gbps=10, usd_per_hour=1)
    rate = InputRate(0.0012, 150_000)
    for nodes in (2, 4):
        # Each worker takes what its own node makes.
        assert rate.samples_per_s(Shape({gpu: nodes}), 4 * nodes) == pytest.approx(nodes * 28 / 0.0012)
        # Half of the nodes have no worker: all that these make travels.
        cores = nodes / 2 * (31 + 32)
        carried = 0.8 * nodes * 10e9 / 8 / 150_000 / (nodes / 2 * 32 / cores)
        assert carried < cores / 0.0012
        assert rate.samples_per_s(Shape({gpu: nodes}), nodes // 2) == pytest.approx(carried)


def test_workers_that_do_not_divide_evenly_take_cores_where_they_are() -> None:
    gpu = NodeType(name="g", vcpus=4, memory_gib=16, gpus=4, gpu_model="G", network_gbps=10, usd_per_hour=1)
    rate = InputRate(core_seconds_per_sample=0.01, wire_bytes_per_sample=1)
    assert rate.samples_per_s(Shape({gpu: 2}), 3) == pytest.approx((3 + 2) / 0.01)  # 1 and 2 workers
    assert rate.samples_per_s(Shape({gpu: 2}), 8) == 0.0  # no core left: nothing is delivered


def test_a_shape_without_gpus_is_refused() -> None:
    cpu = NodeType(name="c5", vcpus=16, memory_gib=32, network_gbps=10, usd_per_hour=1)
    with pytest.raises(ConfigError, match="needs nodes with GPUs for its workers, found c5"):
        Shape({cpu: 2})


# --- both sides -------------------------------------------------------------------------------------------------------


@given(step_times, noises, st.floats(1, 1e5), st.floats(1, 64), NODES, WORKERS, st.integers(1, 64))
def test_throughput_is_below_both_ceilings_and_rises_with_either(
    step: StepTime, noise: GradientNoise, rate: float, overlap: float, nodes: int, per_node: int, more: int
) -> None:
    workers, local = nodes * per_node, math.ceil(noise.batch_size) * more
    joint = JointGoodput(step, noise, rate, overlap=overlap)
    at = joint.throughput(nodes, workers, local, 0)
    alone = JointGoodput(step, noise).throughput(nodes, workers, local, 0)
    assert at <= min(alone, rate) * (1 + 1e-9)
    assert JointGoodput(step, noise, rate * 1.5, overlap=overlap).throughput(nodes, workers, local, 0) >= at * (
        1 - 1e-12
    )
    assert 0 < joint.goodput(nodes, workers, local, 0) <= at * (1 + 1e-12)


@given(step_times, noises, st.integers(2, 64))
def test_an_infinitely_fast_input_changes_nothing(step: StepTime, noise: GradientNoise, more: int) -> None:
    local = math.ceil(noise.batch_size) * more
    alone = JointGoodput(step, noise)
    for rate in (float("inf"), 1e15, lambda workers: 1e15):
        fed = JointGoodput(step, noise, rate)
        assert fed.goodput(2, 4, local, 1) == pytest.approx(alone.goodput(2, 4, local, 1), rel=1e-9)
        assert fed.optimize(2, 4, 16 * local, (1, 512), True) == pytest.approx(
            alone.optimize(2, 4, 16 * local, (1, 512), True)
        )


@given(step_times, noises)
def test_where_the_input_binds_larger_batches_and_more_workers_only_cost(step: StepTime, noise: GradientNoise) -> None:
    # A hundredth of what the accelerators could take.
    size = math.ceil(noise.batch_size)
    alone = JointGoodput(step, noise)
    rate = min(alone.throughput(1, k, size, 0) for k in (1, 2)) / 100
    starved = JointGoodput(step, noise, rate)
    flat = [starved.throughput(1, k, size * more, 0) for k in (1, 2) for more in (1, 4, 16)]
    assert max(flat) <= min(flat) * 1.02  # up to the p-norm
    _, local, accum = starved.optimize(1, 2, 64 * size, None, True)
    _, freely, freely_accum = alone.optimize(1, 2, 64 * size, None, True)
    assert 2 * local * (accum + 1) <= max(2 * freely * (freely_accum + 1), 2 * math.ceil(size / 2))


@given(step_times, noises, st.floats(10, 1e4))
def test_optimize_returns_what_it_says(step: StepTime, noise: GradientNoise, rate: float) -> None:
    size = math.ceil(noise.batch_size)
    joint = JointGoodput(step, noise, lambda workers: rate * workers)
    goodput, local, accum = joint.optimize(np.array([1, 2, 4]), np.array([1, 4, 16]), 64 * size, (1, 4 * size), True)
    assert goodput.shape == local.shape == accum.shape == (3,)
    for n, k, g, m, s in zip((1, 2, 4), (1, 4, 16), goodput, local, accum, strict=True):
        if g > 0:
            assert joint.goodput(n, k, int(m), int(s)) == pytest.approx(g)
        one = joint.optimize(n, k, 64 * size, (1, 4 * size), True)
        assert one == pytest.approx((g, m, s))
        assert isinstance(one[0], float)


@given(step_times, noises, st.integers(1, 8), st.integers(1, 4), st.integers(1, 64), st.booleans())
def test_no_batch_exceeds_the_largest(
    step: StepTime, noise: GradientNoise, per_node: int, nodes: int, growth: int, accumulate: bool
) -> None:
    workers, initial = nodes * per_node, math.ceil(noise.batch_size)
    largest = initial * growth
    _, local, accum = JointGoodput(step, noise).optimize(nodes, workers, largest, (1, 4 * largest), accumulate)
    whole = workers * local * (accum + 1)
    # Whole local batches may not fill the initial batch alone: there, the next larger one.
    assert whole <= largest or whole - workers * (accum + 1) < initial


def test_optimize_needs_noise_and_a_range_that_is_not_empty() -> None:
    step = StepTime(0.01, 0.001)
    with pytest.raises(ConfigError, match="without gradient noise"):
        JointGoodput(step, None).optimize(1, 1)
    noise = GradientNoise(1.0, 1.0, 64)
    with pytest.raises(ConfigError, match="at least the initial batch 64, found 32"):
        JointGoodput(step, noise).optimize(1, 1, 32)
    with pytest.raises(ConfigError, match=r"1 ≤ least ≤ most, found \(16, 8\)"):
        JointGoodput(step, noise).optimize(1, 1, 128, (16, 8))
    with pytest.raises(ConfigError, match="each node needs a worker"):
        JointGoodput(step, noise).optimize(2, 1, 128)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StepTime(-0.1, 0.1), "alpha_compute must be at least 0, found -0.1"),
        (lambda: StepTime(0.1, float("nan")), "beta_compute must be a number, found NaN"),
        (lambda: StepTime(0.1, 0.1, gamma=11), "gamma must be at most 10, found 11"),
        (lambda: StepTime(0.0, 0.0), "a step that takes no time"),
        (lambda: GradientNoise(1.0, -1.0, 64), "noise.var must be at least 0"),
        (lambda: InputRate(0.0, 1), "core_seconds_per_sample must be greater than 0"),
        (lambda: InputRate(0.1, 1, contention=1.5), "contention must be at most 1"),
        (lambda: JointGoodput(StepTime(0.1, 0.1), None, -3.0), "input_samples_per_s must be greater than 0"),
        (lambda: JointGoodput(StepTime(0.1, 0.1), None, overlap=0.5), "overlap must be at least 1"),
        (lambda: JointGoodput(StepTime(0.1, 0.1), None, "fast"), "input_samples_per_s must be a number, found 'fast'"),
    ],
)
def test_parameters_out_of_their_range_are_named(make: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()  # type: ignore[operator]
