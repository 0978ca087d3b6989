"""Preprocessing cores that are asked for and given back: by Ray's own autoscaler, which starts and ends real raylets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.adapt.demand import wanted_cores
from offload.model.placement import Placement, on_fewest_nodes
from tests.helpers import require_hosts

SCRIPT = Path(__file__).with_name("cores_come_and_go.py")
# Ray's stand-in for a provider ends every Ray process that it can see.
ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--net", "--kill-child"]


@given(device=st.floats(1, 1e6), each=st.floats(0.1, 1e4), before=st.none() | st.integers(1, 1000))
def test_wanted_cores_keep_up_with_the_accelerators_and_settle(device: float, each: float, before: int | None) -> None:
    bounds = (2, 500)
    cores = wanted_cores(device, each, bounds=bounds, before=before)
    assert bounds[0] <= cores <= bounds[1]
    assert cores == bounds[1] or cores * each >= device
    assert wanted_cores(device, each, bounds=bounds, before=cores) == cores


def test_a_small_surplus_is_kept_and_a_large_one_given_back() -> None:
    assert wanted_cores(95.0, 10.0, bounds=(1, 99), before=None) == 11
    assert wanted_cores(95.0, 10.0, bounds=(1, 99), before=13) == 13
    assert wanted_cores(95.0, 10.0, bounds=(1, 99), before=20) == 11


def test_cores_lie_on_few_nodes_and_stay_where_they_are() -> None:
    placement = Placement(workers=1, held=(0, 1, 0, 0), free_cpus=(4.0, 2.0, 8.0, 4.0))
    assert on_fewest_nodes(placement, 100) == (4, 2, 8, 4)
    assert on_fewest_nodes(placement, 9) == (0, 2, 7, 0)
    assert on_fewest_nodes(placement, 5, (0, 2, 0, 4)) == (0, 2, 0, 3)
    assert on_fewest_nodes(placement, 1) == (0, 1, 0, 0)


def test_bounds_of_cores_that_contradict_are_refused() -> None:
    for bounds in ((0, 4), (5, 4)):
        with pytest.raises(offload.ConfigError, match=r"preprocessing_cores must be \(least, most\)"):
            offload.Adaptation(preprocessing_cores=bounds)


@pytest.mark.ray
@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nodes_come_when_the_input_binds_and_are_left_when_it_does_not(tmp_path: Path) -> None:
    require_hosts()
    command = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run([*ALONE, *command], capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == "finished"
    assert told["right"]
    wanted = [event["cores"] for event in told["events"] if event["event"] == "cores_wanted"]
    assert max(wanted) > 2  # 145 samples/s of 50 a core, and a tenth more
    assert wanted[-1] <= 2
    changed = [event for event in told["events"] if event["event"] == "cluster_changed"]
    assert any(event["joined"] for event in changed)
    assert max(event["preprocessing_cores"] for event in changed) > 2
