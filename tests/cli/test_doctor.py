"""`offload doctor`: every check with made-up machines, the command with this one."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offload import machine
from offload.cli import doctor, doctor_checks
from offload.cli.doctor_checks import GIB, Check, TorchFacts
from offload.cli.main import main
from offload.ray_private import data, draining
from offload.ray_private.part import ABSENT, FoundPart
from offload.versions import INSTALL_RAY, TESTED_RAY, ray_version_warning

GOOD_TORCH = TorchFacts(torch="2.15.0", torchvision="0.29.2", cuda="13.2")

FIND_PARTS = doctor.ray_parts
NO_PARTS: list[FoundPart] = []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the imports of torch and Ray in child processes, and without what this machine's environment says."""
    monkeypatch.setattr(doctor, "torch_facts", lambda: GOOD_TORCH)
    monkeypatch.setattr(doctor, "regions", lambda: doctor_checks.check_regions(None))
    monkeypatch.setattr(doctor, "ray_parts", lambda: list(NO_PARTS))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as bound:  # bound but not listening: refused, and nobody else can take it
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def by_name(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in document["checks"]}


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_json_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ray_parts", FIND_PARTS)
    result = CliRunner().invoke(doctor.doctor, ["--json"])
    document = json.loads(result.stdout)
    assert document["schema"] == "offload.doctor/1"
    assert document["ok"] is (result.exit_code == 0)
    assert all(set(check) == {"name", "status", "found", "remedy"} for check in document["checks"])
    assert all(check["status"] == "ok" or check["remedy"] for check in document["checks"])
    assert by_name(document)["cluster"]["found"] == "no address given: a run uses this machine, without Ray"
    assert by_name(document)["ray-parts"]["status"] == "ok"
    assert {part["active"] for part in document["ray_parts"]} == {True}
    fields = {"name", "purpose", "active", "lacking", "without", "cost"}
    assert all(set(part) == fields for part in document["ray_parts"])


@pytest.mark.usefixtures("quick")
def test_a_ray_without_some_parts_is_no_failure_and_names_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ABSENT, "draining nodes,plans of Datasets")
    found = FIND_PARTS()
    monkeypatch.setattr(doctor, "ray_parts", lambda: found)
    result = CliRunner().invoke(doctor.doctor, [])
    assert "ray-parts" in result.stdout
    assert "preloaded processes" in result.stdout
    for part in (draining.PART, data.PLANS):
        assert f"{part.name} (this Ray lacks" in result.stdout
        assert f"{part.without}. Its cost: {part.cost}." in result.stdout
    document = json.loads(CliRunner().invoke(doctor.doctor, ["--json"]).stdout)
    assert [part["name"] for part in document["ray_parts"] if not part["active"]] == [
        "plans of Datasets",
        "draining nodes",
    ]
    assert by_name(document)["ray-parts"]["status"] == "warn"


@pytest.mark.usefixtures("quick")
def test_parts_that_nobody_could_look_for_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ray_parts", lambda: "no answer within 120 s")
    document = json.loads(CliRunner().invoke(doctor.doctor, ["--json"]).stdout)
    assert document["ray_parts"] == []
    assert by_name(document)["ray-parts"]["found"] == "no answer within 120 s"


def test_an_interruption_is_a_document_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(address: str | None) -> list[Check]:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run_checks", interrupted)
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 130
    assert json.loads(result.stdout) == {"schema": "offload.error/1", "error": "interrupted", "exit_code": 130}


@pytest.mark.usefixtures("quick")
def test_a_cache_is_tried(tmp_path: Path) -> None:
    def tried(cache: str) -> Any:
        return CliRunner().invoke(doctor.doctor, ["--json", "--cache", cache])

    found = by_name(json.loads(tried(f"ssd:{tmp_path / 'cache'}:1MB").stdout))["cache"]
    assert found == {"name": "cache", "status": "ok", "found": str(tmp_path / "cache"), "remedy": ""}
    result = tried(f"ssd:{tmp_path / 'absent' / 'cache'}:1MB")
    assert result.exit_code == 2
    found = by_name(json.loads(result.stdout))["cache"]
    assert (found["status"], found["found"]) == ("fail", f"{tmp_path / 'absent'} does not exist")
    assert found["remedy"] == "make it, mount its disk, or name another path"


@pytest.mark.usefixtures("quick")
def test_a_text_that_describes_no_cache_is_refused() -> None:
    result = CliRunner().invoke(main, ["doctor", "--cache", "ssd:cache:1MB"])
    assert result.exit_code == 2
    assert "offload: --cache must name an absolute path" in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    document = json.loads(CliRunner().invoke(main, ["doctor", "--cache", "ssd:cache:1MB", "--json"]).stdout)
    assert (document["schema"], document["exit_code"]) == ("offload.error/1", 2)
    assert "--cache must name an absolute path" in document["error"]


@pytest.mark.usefixtures("quick")
def test_unreachable_address_fails_with_a_remedy(closed_port: int) -> None:
    result = CliRunner().invoke(doctor.doctor, ["--json", "--address", f"127.0.0.1:{closed_port}"])
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert document["ok"] is False
    cluster = by_name(document)["cluster"]
    assert cluster["status"] == "fail"
    assert f"127.0.0.1:{closed_port} cannot be reached" in cluster["found"]
    assert "ray start --head" in cluster["remedy"]


@pytest.mark.usefixtures("quick")
def test_table_shows_remedies_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "2.99.1" if name == "ray" else "2.0")
    result = CliRunner().invoke(doctor.doctor, [])
    assert result.exit_code == 0  # a warning, not a failure
    assert "ray: Ray 2.99.1 is outside the range" in result.stdout
    assert result.stdout.endswith("ready\n")


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.50.0", "2.60.0", "2.60.7", "2.60.0rc1"])
def test_tested_ray_has_no_warning(version: str) -> None:
    assert ray_version_warning(version) is None
    assert doctor_checks.check_ray(version).status == "ok"


@pytest.mark.parametrize("version", ["2.61.0", "3.0.0.dev0", "nonsense"])
def test_other_ray_warns_with_the_range(version: str) -> None:
    warning = ray_version_warning(version)
    assert warning is not None
    assert version in warning
    assert f">={TESTED_RAY[0]},<{TESTED_RAY[1]}" in warning
    assert "\n" not in warning
    assert doctor_checks.check_ray(version).status == "warn"


@pytest.mark.parametrize("version", [None, "2.49.2", "2.6.0"])
def test_a_ray_that_is_missing_or_too_old_fails(version: str | None) -> None:
    check = doctor_checks.check_ray(version)
    assert check.status == "fail"
    assert INSTALL_RAY in check.remedy


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10, 9), "fail"), ((3, 11, 0), "ok"), ((3, 14, 4), "ok"), ((3, 15, 0), "fail")]
)
def test_python_range(version: tuple[int, int, int], status: str) -> None:
    assert doctor_checks.check_python(version).status == status


# --- authentication ---------------------------------------------------------------------------------------------------


def test_auth_unset_is_fine_for_a_local_ray_and_a_warning_for_a_cluster(tmp_path: Path) -> None:
    assert doctor_checks.check_auth({}, tmp_path, None).status == "ok"
    check = doctor_checks.check_auth({}, tmp_path, "head:6379")
    assert check.status == "warn"
    assert "RAY_AUTH_MODE" in check.remedy


def test_auth_names_where_the_token_is_but_not_the_token(tmp_path: Path) -> None:
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("abc123")
    check = doctor_checks.check_auth({}, tmp_path, "head:6379")
    assert check.status == "warn"
    assert str(file) in check.found
    check = doctor_checks.check_auth({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "abc123"}, tmp_path, "head:6379")
    assert check.status == "ok"
    assert "abc123" not in str(check)


@pytest.mark.parametrize(
    ("env", "status"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "ok"),
        ({"RAY_AUTH_MODE": "token"}, "fail"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/nonexistent/token"}, "fail"),
        ({"RAY_AUTH_MODE": "tokens"}, "fail"),
    ],
)
def test_auth_explicit(env: dict[str, str], status: str, tmp_path: Path) -> None:
    check = doctor_checks.check_auth(env, tmp_path, "head:6379")
    assert check.status == status
    assert bool(check.remedy) is (status != "ok")


# --- torch, GPUs ------------------------------------------------------------------------------------------------------


def test_broken_pair_names_versions_and_remedy() -> None:
    facts = TorchFacts(torch="2.15.0+cpu", torchvision="0.29.2", ops_error="RuntimeError: nms does not exist")
    check = doctor_checks.check_torch(facts)
    assert check.status == "fail"
    assert "2.15.0+cpu" in check.found
    assert "0.29.2" in check.found
    assert "nms does not exist" in check.found
    assert "same place" in check.remedy


@pytest.mark.parametrize(
    ("facts", "device_present", "status", "word"),
    [
        (GOOD_TORCH, False, "ok", "gloo"),
        (TorchFacts(torch="2.15.0", cuda="13.2", gpus=("A10G", "A10G")), True, "ok", "2 × A10G"),
        (TorchFacts(torch="2.15.0", cuda="13.2", warnings="driver too old"), True, "fail", "driver too old"),
        (TorchFacts(torch="2.15.0+cpu"), True, "fail", "CPU only"),
        (TorchFacts(torch="2.15.0", error="boom"), True, "warn", "could not be asked"),
    ],
)
def test_gpus(facts: TorchFacts, device_present: bool, status: str, word: str) -> None:
    check = doctor_checks.check_gpus(facts, device_present)
    assert check.status == status
    assert word in check.found


def test_child_that_hangs_dies_or_prints_nonsense_is_a_sentence() -> None:
    assert doctor._run_child("import time; time.sleep(60)", [], 0.2) == "no answer within 0.2 s"
    assert doctor._run_child("import os; os.abort()", [], 20) == "the process died from signal 6"
    assert doctor._run_child("raise ImportError('no such pair')", [], 20) == "ImportError: no such pair"
    assert doctor._run_child("print('{')", [], 20) == "the answer could not be read"
    assert doctor._run_child("import sys; print('noise'); print('{\"a\": ' + sys.argv[1] + '}')", ["1"], 20) == {"a": 1}


@pytest.mark.slow
def test_this_environment_has_a_pair_that_fits() -> None:
    check = doctor_checks.check_torch(doctor.torch_facts())
    assert check.status == "ok", check


# --- memory, cores ----------------------------------------------------------------------------------------------------


def test_small_shm_warns_with_all_three_remedies() -> None:
    check = doctor_checks.check_shm(64 * 2**20, 32 * GIB)
    assert check.status == "warn"
    assert "0.1 GiB free; Ray wants 9.6 GiB" in check.found
    for word in ("--shm-size", "remount", "--object-store-memory"):
        assert word in check.remedy
    assert doctor_checks.check_shm(10 * GIB, 32 * GIB).status == "ok"
    assert doctor_checks.check_shm(None, 32 * GIB).status == "warn"
    assert doctor_checks.check_shm(190 * GIB, 2000 * GIB).status == "ok"  # Ray's own cap


def test_memory() -> None:
    assert doctor_checks.check_memory(16 * GIB, 2 * GIB).status == "warn"
    assert doctor_checks.check_memory(16 * GIB, 12 * GIB).status == "ok"


@pytest.mark.parametrize(
    ("affinity", "quota", "status"),
    [(8, None, "ok"), (1, None, "warn"), (8, 1.5, "warn"), (8, 4.0, "warn"), (4, 8.0, "ok")],
)
def test_cores(affinity: int, quota: float | None, status: str) -> None:
    assert doctor_checks.check_cores(affinity, quota, 8).status == status


def test_quota_remedy_names_the_number_for_ray() -> None:
    assert "--num-cpus 4" in doctor_checks.check_cores(8, 4.0, 8).remedy


def test_cgroup_files(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path) is None
    assert machine.memory_limit(100, tmp_path) == 100
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    assert machine.cpu_quota(tmp_path) == 2.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine.cpu_quota(tmp_path) == 1.5
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_limit(100, tmp_path) == 100
    (tmp_path / "memory.max").write_text("60\n")
    assert machine.memory_limit(100, tmp_path) == 60


# --- the cluster ------------------------------------------------------------------------------------------------------


def test_addresses(tmp_path: Path) -> None:
    env = {"RAY_ADDRESS": "head:6379"}
    assert doctor_checks.resolve_address(None, {}, tmp_path) is None
    assert doctor_checks.resolve_address("local", env, tmp_path) is None
    assert doctor_checks.resolve_address(None, env, tmp_path) == "head:6379"
    assert doctor_checks.resolve_address("auto", env, tmp_path) == "head:6379"
    assert doctor_checks.resolve_address("other:1", env, tmp_path) == "other:1"
    assert doctor_checks.resolve_address("auto", {}, tmp_path) == "auto"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert doctor_checks.resolve_address("auto", {}, tmp_path) == "10.0.0.1:6379"


def check_cluster(address: str | None, *, refused: str | None = None, answer: dict[str, Any] | str = "") -> Check:
    return doctor_checks.check_cluster(address, connect=lambda host, port: refused, call=lambda address: answer)


def test_reachable_cluster() -> None:
    check = check_cluster("[::1]:6379", answer={"ray": "2.60.0", "nodes": 3, "cpus": 24.0, "gpus": 2.0})
    assert check.status == "ok"
    assert check.found == "[::1]:6379: 3 nodes, 24 CPUs, 2 GPUs, Ray 2.60.0"


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:x", "head:70000", "auto"])
def test_bad_address(address: str) -> None:
    assert check_cluster(address).status == "fail"


@pytest.mark.parametrize("address", ["ray://head:10001", "ray://head", "http://head:8265"])
def test_an_address_that_no_run_takes_is_refused(address: str) -> None:
    check = check_cluster(address, answer={"ray": "2.60.0", "nodes": 3, "cpus": 24.0, "gpus": 2.0})
    assert check.status == "fail"
    assert "--address head:6379" in check.remedy
    assert "offload launch ray" in check.remedy


def test_cluster_that_accepts_and_then_says_nothing() -> None:
    check = check_cluster("head:6379", answer="no answer within 60 s")
    assert check.status == "fail"
    assert "no answer within 60 s" in check.found
    assert "RAY_AUTH_MODE" in check.remedy


def test_connect_says_why(closed_port: int) -> None:
    assert doctor.connect("127.0.0.1", closed_port, 2) == "Connection refused"
    assert doctor.connect("no-such-host.invalid", 1, 2) is not None
    assert doctor.connect("a" * 80 + ".x", 1, 2) is not None


# --- packages ---------------------------------------------------------------------------------------------------------


def test_packages() -> None:
    assert {check.status for check in doctor_checks.check_packages(lambda name: None)} == {"warn"}
    assert {check.status for check in doctor_checks.check_packages(lambda name: "2.257.7")} == {"ok"}
    by_package = {check.name: check for check in doctor_checks.check_packages(lambda name: "3.27.0")}
    assert by_package["sagemaker"].status == "warn"
    assert "submits with boto3" in by_package["sagemaker"].found
    with_boto3 = {check.name: check for check in doctor_checks.check_packages({"boto3": "1.40.0"}.get)}
    assert with_boto3["boto3"].status == "ok"
    assert "not available" not in with_boto3["sagemaker"].found  # boto3 alone submits
    without = {check.name: check for check in doctor_checks.check_packages({"sagemaker": "2.257.7"}.get)}
    assert "offload launch sagemaker is not available" in without["boto3"].found


def test_the_decoder_of_regions_is_named_or_how_to_get_one() -> None:
    from offload.pipeline.images import turbojpeg

    found = turbojpeg.library()
    assert doctor.regions() == doctor_checks.check_regions(None if found is None else found.path)
    without = doctor_checks.check_regions(None)
    assert (without.status, without.remedy) == ("warn", "pip install 'offload[regions]', on every node")


def test_running_python_is_supported() -> None:
    assert doctor_checks.check_python(sys.version_info[:3]).status == "ok"


def test_the_memory_of_a_process_leaves_out_files_and_what_others_share(tmp_path: Path) -> None:
    rollup = tmp_path / "smaps_rollup"
    assert machine.process_bytes(rollup) == 0  # no such file: not Linux
    rollup.write_text("55d0-7ffc ---p 00000000 00:00 0   [rollup]\nRss:   900 kB\nPss:  700 kB\nPss_Anon:   300 kB\n")
    assert machine.process_bytes(rollup) == 300 << 10
    rollup.write_text("Rss:   900 kB\n")
    assert machine.process_bytes(rollup) == 0
