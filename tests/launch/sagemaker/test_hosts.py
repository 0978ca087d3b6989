"""A SageMaker job's hosts, and its head: the same answer on every host, from its own files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.launch.sagemaker.container.hosts import natural, read_hosts


def config(
    current: str = "algo-1", gpu: tuple[str, ...] = ("algo-2",), cpu: tuple[str, ...] = ("algo-1", "algo-3")
) -> Any:
    return {
        "current_group_name": "gpu" if current in gpu else "cpu",
        "current_host": current,
        "current_instance_type": "ml.c5.xlarge",
        "hosts": [*cpu, *gpu],
        "instance_groups": [
            {"instance_group_name": "cpu", "instance_type": "ml.c5.xlarge", "hosts": [*cpu]},
            {"instance_group_name": "gpu", "instance_type": "ml.g5.xlarge", "hosts": [*gpu]},
        ],
        "network_interface_name": "eth0",
    }


def written(base: Path, document: Any) -> Path:
    path = base / "input" / "config" / "resourceconfig.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return base


def test_the_head_is_the_first_gpu_host_and_not_the_first_of_all(tmp_path: Path) -> None:
    hosts = read_hosts(written(tmp_path, config()), {})
    assert (hosts.current, hosts.head, hosts.is_head, hosts.group.name) == ("algo-1", "algo-2", False, "cpu")
    assert hosts.all == ("algo-1", "algo-2", "algo-3")


@given(gpus=st.integers(1, 12), cpus=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_host_names_the_same_head(
    tmp_path_factory: pytest.TempPathFactory, gpus: int, cpus: int, seed: int
) -> None:
    """Hosts are numbered at random across groups, and listed in any order."""
    dice = random.Random(seed)
    names = [f"algo-{number}" for number in range(1, gpus + cpus + 1)]
    dice.shuffle(names)
    gpu, cpu = names[:gpus], names[gpus:]
    heads = set()
    for name in names:
        dice.shuffle(gpu)
        document = config(name, tuple(gpu), tuple(cpu))
        heads.add(read_hosts(written(tmp_path_factory.getbasetemp() / "hosts", document), {}).head)
    assert heads == {min(gpu, key=natural)}


def test_numbers_within_names_are_numbers() -> None:
    assert sorted(["algo-10", "algo-9", "algo-2"], key=natural) == ["algo-2", "algo-9", "algo-10"]


def test_the_toolkit_must_agree_where_it_says_something(tmp_path: Path) -> None:
    base = written(tmp_path, config())
    read_hosts(base, {"SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-3", "algo-2", "algo-1"]'})
    for name, value in (
        ("SM_CURRENT_HOST", "algo-9"),
        ("SM_CURRENT_INSTANCE_GROUP", "gpu"),
        ("SM_HOSTS", '["algo-1"]'),
    ):
        with pytest.raises(ConfigError, match=f"{name} is .* resourceconfig.json says"):
            read_hosts(base, {name: value})


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "does not describe a heterogeneous job"),
        ("[]", "does not describe a heterogeneous job"),
        ({"hosts": ["algo-1"], "current_host": "algo-1"}, "launch it with instance groups"),
        (config(gpu=()), "none empty"),
        ({**config(), "current_host": "algo-7"}, "'algo-7', which is in none of its groups"),
        ({**config(), "instance_groups": config()["instance_groups"][:1]}, "one must be 'gpu'"),
    ],
)
def test_a_container_that_is_not_as_it_should_be(tmp_path: Path, document: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_hosts(written(tmp_path, document), {})


def test_outside_a_container(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is missing: this must run in a SageMaker training container"):
        read_hosts(tmp_path, {})
