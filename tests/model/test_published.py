"""What others measured on the cloud, predicted from what was known before they added nodes."""

from __future__ import annotations

import pytest

from offload.model import InputRate, JointGoodput, NodeType, Shape, StepTime
from offload.prices import built_in


def test_aws_p4d_with_two_c5_from_the_single_instance_log() -> None:
    """AWS's tf.data example for heterogeneous clusters: an ml.p4d.24xlarge alone takes 192 ms a step (its log: 184–210) with
    GPUs 45 % busy; with two ml.c5.18xlarge beside it, 86 ms."""
    catalog = built_in()
    alone, helped = (catalog.shape({"ml.p4d.24xlarge": 1, "ml.c5.18xlarge": n}) for n in (0, 2))
    batch = 8 * 64
    gpu_s = 0.45 * 0.192  # busy while a step lasts
    # The rate at which a host that waits for its own 96 vCPUs, less one per worker, must have delivered.
    overlap = 8.0
    waiting_s = (0.192**overlap - gpu_s**overlap) ** (1 / overlap)
    core_seconds = (96 - 8) * waiting_s / batch
    rate = InputRate(core_seconds_per_sample=core_seconds, wire_bytes_per_sample=150_528)
    joint = {
        shape: JointGoodput(StepTime(gpu_s, 0.0), None, lambda k, shape=shape: rate.samples_per_s(shape, k), overlap)
        for shape in (alone, helped)
    }
    assert joint[alone].step_time_s(1, 8, 64, 0) == pytest.approx(0.192, rel=0.01)
    assert joint[helped].step_time_s(1, 8, 64, 0) == pytest.approx(0.086, rel=0.15)


def test_ray_42318_from_no_and_one_added_node() -> None:
    """Ray issue 42318: 0, 1, 5 and 10 added CPU nodes gave 753, 1233, 1711 and 1764 images/s; the last is the GPU's cap."""
    cap, overlap = 1764.0, 8.0

    def input_alone(delivered: float) -> float:
        """The input rate behind a delivered one, given the cap."""
        return float((delivered**-overlap - cap**-overlap) ** (-1 / overlap))

    here, with_one = input_alone(753), input_alone(1233)
    gpu = NodeType(name="gpu", vcpus=9, memory_gib=32, gpus=1, gpu_model="G", network_gbps=100, usd_per_hour=1)
    seconds = 8 / here
    # An added node delivers the difference, whatever its cores.
    cpu = NodeType(
        name="cpu", vcpus=8, memory_gib=32, network_gbps=100, usd_per_hour=1, core_speed=(with_one - here) * seconds / 8
    )
    rate = InputRate(core_seconds_per_sample=seconds, wire_bytes_per_sample=150_528)
    predicted = {}
    for added in (0, 1, 5, 10):
        joint = JointGoodput(StepTime(0.0, 1 / cap), None, rate.samples_per_s(Shape({gpu: 1, cpu: added}), 1), overlap)
        predicted[added] = joint.throughput(1, 1, 32, 0)
    assert predicted[0] == pytest.approx(753, rel=1e-3)
    assert predicted[1] == pytest.approx(1233, rel=1e-3)
    assert predicted[5] == pytest.approx(1711, rel=0.05)
    assert predicted[10] == pytest.approx(1764, rel=0.05)
