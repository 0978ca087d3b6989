"""SageMaker jobs on emulated hosts: the training toolkit's own `train`, a bundle fetched from S3, real Ray.

What a job must do when all is well, and when one of its parts is not: end everywhere, soon, with the reason.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from offload.cli.main import main
from offload.launch.sagemaker import running_job
from offload.launch.sagemaker.bundle import pack
from offload.launch.sagemaker.groups import groups_of
from offload.launch.sagemaker.job import ENTRY, SageMakerJob
from offload.launch.sagemaker.settings import TO_INSTALL, Settings
from offload.train.checkpoints.storage import CHECKSUMS_FILE, MODEL_FILE
from tests.emulation import Hosts, HostSpec
from tests.emulation.netns import Host
from tests.emulation.training_job import TrainingJob
from tests.emulation.training_service import TrainingService
from tests.helpers import eventually, moto_server, require_hosts
from tests.programs.sagemaker_scripts import COUNTS

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

CORES = tuple(sorted(os.sched_getaffinity(0)))
TOKEN = secrets.token_hex(32)
SECRET = "hunter2-" + secrets.token_hex(8)


@pytest.fixture(autouse=True, scope="module")
def _hosts_can_be_emulated() -> None:
    require_hosts()


@dataclass
class Launched:
    """A job that was set up, and what a test looks at."""

    hosts: Hosts
    job: TrainingJob
    shared: Path
    s3: Any

    def logs(self) -> str:
        return "\n".join(self.job.log(name) for name in self.job.names)

    def summary(self, head: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.job.folder(head) / "output" / "data" / "summary.json").read_text())
        return found

    def until(self, true: Callable[[], bool], timeout_s: float = 800.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, self.logs()[-6000:]
            time.sleep(0.05)


@contextmanager
def launched(
    tmp_path: Path,
    groups: Mapping[str, Sequence[str]],
    *,
    script: str = COUNTS,
    what: str = "",
    workers: int = 1,
    preprocessing_hosts: int | None = None,
    deadline_s: float = 60.0,
    storage: str | None = None,
    checkpoints: Path | None = None,
    image_entrypoint: bool = False,
    **more: Any,
) -> Iterator[Launched]:
    """A job, not started yet, whose service is this machine."""
    names = [name for members in groups.values() for name in members]
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    for folder in (mine, shared):
        folder.mkdir(exist_ok=True)
    (mine / "counts.py").write_text(script)
    given = {
        "shared": str(shared),
        "hosts": preprocessing_hosts or len(names),
        "workers": workers,
        "what": what,
        **more,
    }
    job = SageMakerJob(
        name="counts-1",
        groups=groups_of(
            f"ml.g5.xlarge:{len(groups['gpu'])}",
            [f"ml.c5.4xlarge:{len(members)}" for name, members in groups.items() if name != "gpu"],
        ),
        role="arn:aws:iam::123456789012:role/training",
        image="account.dkr.ecr.us-east-1.amazonaws.com/training:1",
        region="us-east-1",
        source="s3://bucket/counts-1/source.tar.gz",
        output="s3://bucket/counts-1/output",
        checkpoints="s3://bucket/counts-1/checkpoints",
        settings=Settings(script="counts.py", hosts_deadline_s=deadline_s, storage=storage),
        hyperparameters=given,
        image_entrypoint=image_entrypoint,
    )
    with (
        Hosts({name: HostSpec(core=CORES, shm_bytes=256 << 20) for name in sorted(names)}) as hosts,
        moto_server(hosts.gateway) as (environment, s3),
    ):
        s3.create_bucket(Bucket="bucket")
        s3.put_object(Bucket="bucket", Key="counts-1/source.tar.gz", Body=pack(mine / "counts.py", ENTRY, TOKEN))
        environment = {
            **environment, "AWS_SECRET_ACCESS_KEY": SECRET, "MY_OWN_SETTING": SECRET,
            "PIP_NO_DEPS": "1",  # all is installed here: looking through it takes pip a second for each host
        }  # fmt: skip
        running = TrainingJob(hosts, job.request(), groups, environment, checkpoints=checkpoints)
        yield Launched(hosts=hosts, job=running, shared=shared, s3=s3)


@pytest.mark.soak
def test_a_host_that_never_starts_is_named_and_no_other_waits_longer(tmp_path: Path) -> None:
    with launched(tmp_path, {"gpu": ["algo-1"], "cpu": ["algo-2", "algo-3"]}, deadline_s=12) as run:
        run.job.start("algo-1", "algo-2")
        assert run.job.wait(800) == {"algo-1": 1, "algo-2": 1}
        assert "algo-3 did not come within 12 s" in str(run.job.failure("algo-1"))
        assert "algo-3 did not come within 12 s" in str(run.job.failure("algo-2"))


@pytest.mark.soak
def test_from_the_command_line_to_what_a_script_raised(tmp_path: Path) -> None:
    """`offload launch sagemaker --wait`, by the estimator: all hosts end with what the script raised, and the user is told."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    for folder in (mine, shared):
        folder.mkdir()
    (mine / "counts.py").write_text(COUNTS)
    with (
        Hosts({name: HostSpec(core=CORES, shm_bytes=256 << 20) for name in ("algo-1", "algo-2")}) as hosts,
        moto_server(hosts.gateway) as (environment, s3),
        TrainingService(hosts, environment) as service,
    ):
        s3.create_bucket(Bucket="my-bucket")
        done = CliRunner().invoke(
            main,
            [
                "launch", "sagemaker", str(mine / "counts.py"), "--gpu", "ml.g5.xlarge:1", "--cpu", "ml.c5.4xlarge:1",
                "--role", "arn:aws:iam::123456789012:role/training", "--bucket", "my-bucket", "--image-uri", "x/y:1",
                "--hyperparameter", f"shared={shared}", "--hyperparameter", "hosts=2",
                "--hyperparameter", 'note=1.10 "x"', "--name", "counts", "--wait",
                "--", "--what", "raise",
            ],
            env={**environment, "AWS_ENDPOINT_URL_SAGEMAKER": service.url},
        )  # fmt: skip
        job = service.jobs["counts"]
        assert job.wait(800) == {"algo-1": 1, "algo-2": 1}
        for name in job.names:
            assert "ValueError: the third step is cursed" in str(job.failure(name))[:1024]
        assert re.search(r'File ".*", line \d+, in act\n', job.log("algo-2"))
    assert done.exit_code == 1, done.output
    assert "[cpu algo-1] offload: this is algo-1 of group cpu (ml.c5.4xlarge); the head is algo-2" in done.output
    assert '[gpu algo-2] here are the parameters: 600 1.10 "x"' in done.output
    assert re.search(r"reason +AlgorithmError: .*ValueError: the third step is cursed", done.output)


@pytest.mark.soak
def test_a_head_that_dies_ends_the_others_within_thirty_seconds(tmp_path: Path) -> None:
    with launched(tmp_path, {"gpu": ["algo-1"], "cpu": ["algo-2"]}, what="wait") as run:
        run.job.start()
        run.until((run.shared / "waits").exists)
        run.hosts["algo-1"].kill()
        killed_at = time.monotonic()
        codes = run.job.wait(800)
        assert codes["algo-2"] == 1
        assert run.job.ended_at["algo-2"] - killed_at < 30
        assert "the head" in str(run.job.failure("algo-2"))


def failures(run: Launched) -> dict[str, str]:
    return {name: str(run.job.failure(name)) for name in run.job.names}


HIDES_RAY = """
import importlib.metadata as metadata
real = metadata.version
def version(name):
    if name == "ray":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
"""


def unpacked(run: Launched, host: str) -> Path:
    """The bundle, where the toolkit would unpack it. It leaves a folder that is there as it is."""
    code = run.job.folder(host) / "code"
    bundle = run.s3.get_object(Bucket="bucket", Key="counts-1/source.tar.gz")["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(bundle)) as archive:
        archive.extractall(code, filter="data")
    return code


@pytest.mark.soak
@pytest.mark.parametrize(("version", "found"), [("2.59.0", "Ray 2.59.0"), (None, "Ray none")])
def test_another_version_on_one_host_is_refused_with_both(tmp_path: Path, version: str | None, found: str) -> None:
    """An image that installed nothing, and has another Ray, or none."""
    with launched(tmp_path, {"gpu": ["algo-1"], "cpu": ["algo-2"]}) as run:
        code = unpacked(run, "algo-2")
        (code / TO_INSTALL).unlink()
        if version:
            (code / f"ray-{version}.dist-info").mkdir()
            (code / f"ray-{version}.dist-info" / "METADATA").write_text(f"Name: ray\nVersion: {version}\n")
        else:
            (code / "sitecustomize.py").write_text(HIDES_RAY)
        run.job.start()
        assert run.job.wait(800) == {"algo-1": 1, "algo-2": 1}, run.logs()[-6000:]
        for name in run.job.names:
            assert f"algo-2 has {found} and the head 2." in str(run.job.failure(name))


def test_what_fails_on_one_host_before_the_meeting_ends_all_at_once_with_its_reason(tmp_path: Path) -> None:
    """pip on one host, while another has not even started: nobody waits for the deadline, not the latecomer either."""
    with launched(tmp_path, {"gpu": ["algo-1"], "cpu": ["algo-2", "algo-3"]}, deadline_s=250) as run:
        (unpacked(run, "algo-2") / TO_INSTALL).write_text("no-such-package==1\n")
        run.job.start("algo-1", "algo-2", environment={"PIP_NO_INDEX": "1"})
        reason = "algo-2: pip could not install the requirements: Could not find a version that satisfies the requirement no-such-"
        run.until(lambda: reason in str(run.job.failure("algo-2")) or "pip could not" in str(run.job.failure("algo-2")))
        run.job.start("algo-3")
        assert run.job.wait(800) == dict.fromkeys(run.job.names, 1), run.logs()[-6000:]
        found = failures(run)
        assert found["algo-1"].startswith(reason)
        assert found["algo-3"].startswith(reason)
        assert found["algo-2"].startswith(reason.removeprefix("algo-2: "))


@pytest.mark.soak
@pytest.mark.parametrize("without", ["algo-1", "algo-2"])
def test_a_gpu_host_that_sees_none_ends_all_with_its_name(tmp_path: Path, without: str) -> None:
    """The head, or another."""
    with launched(tmp_path, {"gpu": ["algo-1", "algo-2"], "cpu": ["algo-3"]}, deadline_s=250) as run:
        run.job.start(without, environment={"OFFLOAD_WITHOUT_GPUS": ""})
        run.job.start()
        assert run.job.wait(800) == dict.fromkeys(run.job.names, 1), run.logs()[-6000:]
        for found in failures(run).values():
            assert f"{without} (ml.g5.xlarge) sees no GPU: use an image with CUDA" in found


STRANGER = """
import sys
from offload.launch.sagemaker.container.rendezvous import Follower
from offload.errors import ConfigError
try:
    Follower((sys.argv[1], 6378), "f" * 64, "algo-2", 10)
except ConfigError as error:
    print(error)
"""


@pytest.mark.soak
def test_strangers_are_refused_cpu_hosts_may_die_and_a_script_that_is_killed_ends_all(tmp_path: Path) -> None:
    """The hosts' meeting and Ray refuse strangers. A CPU host dies and training goes on; then the script is killed. The logs tell nothing
    of the environment, nor the token. The service lists a CPU host first, and yet the GPU host leads.

    It repeats on a whole job what shorter tests show: who is refused and who is lost (test_rendezvous.py, and launch/ray/test_cli.py for
    Ray's token), what ends all hosts (the tests above), and what the logs hold (the test below).
    """
    groups = {"cpu": ["algo-1", "algo-3"], "gpu": ["algo-2"]}
    with launched(tmp_path, groups, what="wait", name="counts-1") as run:
        run.job.start()
        run.until((run.shared / "waits").exists)
        head, other = run.hosts["algo-2"], run.hosts["algo-1"]
        met = other.run(
            [sys.executable, "-c", STRANGER, head.address], timeout=800, env={"PYTHONPATH": str(Path.cwd())}, check=True
        )
        assert "has another token" in met.stdout
        joined = other.run(
            [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head.address}:6379", "--num-cpus=1"],
            timeout=800,
            env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64},
        )
        assert joined.returncode != 0
        assert "InvalidAuthToken" in joined.stdout + joined.stderr
        run.hosts["algo-3"].kill()
        run.until(lambda: "host algo-3 is lost" in run.job.log("algo-2"))
        before = len(trained(run.shared, "counts-1"))
        (run.shared / "one-more").touch()
        run.until(lambda: len(trained(run.shared, "counts-1")) > before)
        assert kill(head, "offload run counts.py", signal.SIGKILL) == 1
        codes = run.job.wait(800)
        assert (codes["algo-1"], codes["algo-2"]) == (1, 1), run.logs()[-6000:]
        for name in ("algo-1", "algo-2"):
            assert "the process of counts.py was killed by SIGKILL" in str(run.job.failure(name))
        assert SECRET not in run.logs()
        assert TOKEN not in run.logs()


@pytest.mark.soak
def test_a_restarted_job_goes_on_where_the_checkpoint_is(tmp_path: Path) -> None:
    """As after an interruption without notice: the periodic checkpoints are what is left."""
    groups = {"gpu": ["algo-1"], "cpu": ["algo-2"]}
    kept = tmp_path / "kept"
    with launched(tmp_path, groups, what="slow", samples=5000) as run:
        run.job.start()
        folder = run.job.folder("algo-1") / "checkpoints"
        run.until(lambda: len(written(folder)) > 1)
        for name in run.job.names:
            run.hosts[name].kill()
        folder.rename(kept)
    # Copied while the run wrote to it: the newest checkpoint lacks its model.
    newest = written(kept)[-1]
    for path in kept.rglob("checkpoint_*/"):
        if path.name >= newest:
            (path / MODEL_FILE).unlink(missing_ok=True)
    with launched(tmp_path, groups, what="slow", samples=5000, checkpoints=kept) as run:
        run.job.start()
        assert run.job.wait(800) == {"algo-1": 0, "algo-2": 0}, run.logs()[-6000:]
        assert "resuming the run in" in run.job.log("algo-1")
        summary = run.summary("algo-1")
        assert summary["samples"] == 5000
        # What this attempt saw is what the first had not committed.
        assert 0 < summary["metrics"]["host_1"] + summary["metrics"]["host_2"] < 5000


@pytest.mark.parametrize("hosts", [(2,), pytest.param((1, 2, 1), marks=pytest.mark.soak)], ids=str)
def test_jobs_of_any_number_of_gpu_hosts_train_each_sample_once_though_all_but_the_last_are_stopped(
    tmp_path: Path, hosts: tuple[int, ...]
) -> None:
    """A job of two GPU hosts; or three with the same --checkpoints, of one, of two, and of one again.

    Each stop is announced to process 1 of every container, and what was trained by then is committed. Workers meet over the groups'
    interface. No host sees another's disk: checkpoints are in S3.
    """
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    for folder in (mine, shared):
        folder.mkdir()
    (mine / "counts.py").write_text(COUNTS)
    samples = 2000
    with (
        Hosts({f"algo-{n}": HostSpec(core=CORES, shm_bytes=256 << 20) for n in (1, 2)}) as machines,
        moto_server(machines.gateway) as (environment, s3),
        TrainingService(machines, {**environment, "MY_OWN_SETTING": SECRET}) as service,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(running_job, "POLL_S", 0.2)  # of whoever waits for the job
        s3.create_bucket(Bucket="my-bucket")
        env = {**environment, "AWS_ENDPOINT_URL_SAGEMAKER": service.url}

        def offload(*args: str) -> str:
            done = CliRunner().invoke(main, ["launch", "sagemaker", *args], env=env)
            assert done.exit_code == 0, done.output
            return done.output

        def launch(name: str, gpus: int, what: str, *more: str, preprocess: int = 1) -> str:
            for old in shared.glob("preprocesses-*"):
                old.unlink()
            return offload(
                str(mine / "counts.py"), "--gpu", f"ml.g5.xlarge:{gpus}", "--name", name,
                "--role", "arn:aws:iam::123456789012:role/training", "--bucket", "my-bucket", "--image-uri", "x/y:1",
                "--checkpoints", "s3://my-bucket/offload/mine", "--submitter", "boto3",
                "--hyperparameter", f"shared={shared}", "--hyperparameter", f"hosts={preprocess}", "--hyperparameter", f"name={name}",
                "--hyperparameter", f"samples={samples}", "--hyperparameter", 'note=1.10 "x"', *more,
                "--", "--workers", str(gpus), "--what", what,
            )  # fmt: skip

        def ends(name: str) -> str:
            """Its status, once its containers have ended and the service has copied what they left."""
            job = service.jobs[name]
            eventually(lambda: len(job.ended_at) == len(job.names))
            running = ("InProgress", "Stopping")
            eventually(lambda: re.findall(r"status +(\w+)", offload("--status", name))[0] not in running)
            return str(re.findall(r"status +(\w+)", offload("--status", name))[0])

        names = [f"job-{number}" for number in range(len(hosts))]
        for name, gpus in zip(names[:-1], hosts, strict=False):
            launch(name, gpus, "slower")
            job = service.jobs[name]
            eventually(lambda name=name: len(trained(shared, name)) >= 200)  # type: ignore[misc]
            offload("--stop", name)
            assert ends(name) == "Stopped"
            reasons = {str(job.failure(host)) for host in job.names}
            assert all("the job was stopped; a checkpoint was committed." in reason for reason in reasons), reasons
        gpus = [f"algo-{1 + number}" for number in range(hosts[-1])]
        said = launch(names[-1], len(gpus), "", "--wait", preprocess=len(gpus))
        assert re.search(r"status +Completed", said), said
        assert "offload: this is algo-1 of group gpu (ml.g5.xlarge)" in said
        assert f'here are the parameters: {samples} 1.10 "x"' in said
        progress = rf"offload: epoch=0 step=\d+ samples/s=\S+ stall=\S+ .*workers={len(gpus)} batch=\d+$"
        assert re.search(progress, said, re.MULTILINE), said
        job = service.jobs[names[-1]]
        assert not [host for host in job.names if SECRET in job.log(host)]
        assert [job.failure(host) for host in job.names] == [None] * len(gpus)
        summary = json.loads((job.folder("algo-1") / "output" / "data" / "summary.json").read_text())
        metrics = summary["metrics"]
        assert (summary["status"], metrics["workers"], metrics["over_eth0"]) == ("finished", len(gpus), len(gpus))
        assert metrics["worker_hosts"] == sum(10 ** int(host[-1]) for host in gpus)  # one each
        assert sum(metrics[f"host_{n}"] for n in (1, 2)) == len(trained(shared, names[-1]))
        assert all(metrics[f"host_{host[-1]}"] > 0 for host in job.names)
        assert (job.folder("algo-1") / "model" / "model.pt").stat().st_size > 0
        for host in job.names:  # torn down: nothing of Ray is left
            left = [text for pid in machines[host].pids() if (text := command_line(pid))]
            assert not [command for command in left if re.search("ray::|raylet|gcs_server", command)], left
    ids = {name: trained(shared, name) for name in names}
    assert all(ids.values()), {name: len(each) for name, each in ids.items()}
    assert sorted(each for several in ids.values() for each in several) == [*range(samples)]


def trained(shared: Path, name: str) -> list[int]:
    """The ids that the workers of a job trained on."""
    lines = [line for path in shared.glob(f"trained-{name}-*") for line in path.read_text().split()]
    return [int(line) for line in lines]


def test_a_stop_is_not_heard_where_the_image_starts_its_containers(tmp_path: Path) -> None:
    """As AWS's images do: their process 1 has no handler. The service kills after two minutes."""
    with launched(tmp_path, {"gpu": ["algo-1"], "cpu": ["algo-2"]}, image_entrypoint=True) as run:
        run.job.start("algo-1")  # which waits for the other
        run.until(lambda: "offload: this is algo-1" in run.job.log("algo-1"))
        run.job.stop()
        with pytest.raises(TimeoutError):
            run.job.wait(2)
        run.job.kill()
        assert all(run.job.wait(800).values())


def written(folder: Path) -> list[str]:
    """The names of the complete checkpoints, oldest first."""
    return sorted(path.parent.name for path in folder.rglob(CHECKSUMS_FILE))


def command_line(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def kill(host: Host, command: str, sig: signal.Signals) -> int:
    """Signal the host's processes whose command line holds this. Returns how many there were."""
    found = 0
    for pid in host.pids():
        try:
            process = psutil.Process(pid)
            argv = process.cmdline()
            if command in " ".join(argv) and argv[0].endswith(("python", "python3")):
                process.send_signal(sig)
                found += 1
        except psutil.NoSuchProcess:  # others come and go
            continue
    return found
