"""An emulation of SageMaker's training service: it takes requests over HTTP, and runs them on emulated hosts.

    with Hosts({"algo-1": HostSpec(core=0), "algo-2": HostSpec(core=1)}) as hosts:
        with TrainingService(hosts, environment) as service:
            os.environ["AWS_ENDPOINT_URL_SAGEMAKER"] = service.url  # and S3 and CloudWatch elsewhere, such as on a moto server

It runs one job at a time, with the training toolkit's real ``train`` command on every host (:mod:`tests.emulation.training_job`). As
with the service, the hosts' output goes to CloudWatch Logs. A job's checkpoints come from S3 at its start, and changed ones go there at
its end. Where it stops: it has the limits of the emulated job, refuses nothing, and copies nothing while a job runs.
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.emulation.aws_json import aws_json_server
from tests.emulation.hosts import Hosts
from tests.emulation.training_job import TrainingJob

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
LOG_EVERY_S = 1.0
JOB_DEADLINE_S = 1800.0
STOPPING_S = 120.0  # time between SIGTERM and SIGKILL


class TrainingService:
    """The training service of one account. A context manager: it listens on loopback inside the ``with`` block.

    Args:
        hosts: hosts with the service's names: ``algo-1``, ``algo-2``, … The groups get them from the last group on, so that a CPU host
            comes first, as it may on SageMaker.
        environment: the environment of the containers: access to S3, and credentials. Its ``AWS_ENDPOINT_URL`` takes the logs, too.
    """

    def __init__(self, hosts: Hosts, environment: Mapping[str, str]) -> None:
        self._hosts, self._environment = hosts, environment
        self.requests: list[dict[str, Any]] = []
        """The documents of all CreateTrainingJob calls."""
        self.jobs: dict[str, TrainingJob] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._running: list[threading.Thread] = []
        self._known: dict[str, dict[Path, float]] = {}
        self._server = contextlib.ExitStack()
        self.url = ""
        """The value for AWS_ENDPOINT_URL_SAGEMAKER."""

    def __enter__(self) -> "TrainingService":
        self.url = self._server.enter_context(aws_json_server(self._answer_to))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    def _answer_to(self, action: str, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = document.get("TrainingJobName", "")
        if action == "CreateTrainingJob":
            self._create(document)
            return 200, {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}"}
        if action == "DescribeTrainingJob" and name in self._states:
            return 200, self._states[name]
        if action == "StopTrainingJob" and name in self._states:
            self._stop(name)
            return 200, {}
        return 400, {"__type": "ValidationException", "message": "Requested resource not found."}

    def _create(self, document: dict[str, Any]) -> None:
        self.requests.append(document)
        groups: dict[str, list[str]] = {}
        numbers = iter(range(1, len(self._hosts) + 1))
        for group in reversed(document["ResourceConfig"]["InstanceGroups"]):
            groups[group["InstanceGroupName"]] = [f"algo-{next(numbers)}" for _ in range(group["InstanceCount"])]
        name = document["TrainingJobName"]
        self.jobs[name] = job = TrainingJob(self._hosts, document, groups, self._environment)
        self._copy_checkpoints_in(document, job)
        self._states[name] = {**document, "TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
        thread = threading.Thread(target=self._run, args=(name, job), daemon=True)
        self._running.append(thread)
        thread.start()

    def _stop(self, name: str) -> None:
        state = self._states[name]
        if state["TrainingJobStatus"] == "InProgress":
            self._states[name] = {**state, "TrainingJobStatus": "Stopping", "SecondaryStatus": "Stopping"}
            self.jobs[name].stop()
            killing = threading.Timer(STOPPING_S, self.jobs[name].kill)
            killing.daemon = True
            killing.start()

    def _run(self, name: str, job: TrainingJob) -> None:
        began = time.time()
        ended = threading.Event()
        logging = threading.Thread(target=self._keep_logs, args=(name, job, ended), daemon=True)
        job.start()
        logging.start()
        try:
            failed = any(job.wait(JOB_DEADLINE_S).values())
        except TimeoutError:
            failed = True
        ended.set()
        logging.join()
        reasons = [reason for host in job.names if (reason := job.failure(host))]
        self._copy_checkpoints_out(job)
        stopped = self._states[name]["TrainingJobStatus"] == "Stopping"
        status = "Stopped" if stopped else "Failed" if failed else "Completed"
        self._states[name] = {
            **self._states[name],
            "TrainingJobStatus": status,
            "SecondaryStatus": status,
            "TrainingStartTime": began,
            "TrainingEndTime": time.time(),
            "TrainingTimeInSeconds": round(time.time() - began),
            "BillableTimeInSeconds": 0,  # as observed for heterogeneous jobs
            **({"FailureReason": f"AlgorithmError: {reasons[0][:1024]}"} if failed and reasons and not stopped else {}),
        }

    def _copy_checkpoints_in(self, document: Mapping[str, Any], job: TrainingJob) -> None:
        if (uri := document.get("CheckpointConfig", {}).get("S3Uri")) is None:
            return
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        s3 = self._client("s3")
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
            for entry in page.get("Contents", []):
                for host in job.names:
                    path = job.folder(host) / "checkpoints" / entry["Key"][len(prefix) + 1 :]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    s3.download_file(bucket, entry["Key"], str(path))
        s3.close()
        self._known = {host: _files(job.folder(host) / "checkpoints") for host in job.names}

    def _copy_checkpoints_out(self, job: TrainingJob) -> None:
        if (uri := self.requests[-1].get("CheckpointConfig", {}).get("S3Uri")) is None:
            return
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        s3 = self._client("s3")
        for host in job.names:
            folder = job.folder(host) / "checkpoints"
            for path, changed_at in _files(folder).items():
                if self._known[host].get(path) != changed_at:
                    s3.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(folder)}")
        s3.close()

    def _client(self, service: str) -> Any:
        import boto3

        client_of: Any = boto3.client
        return client_of(
            service,
            endpoint_url=self._environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id=self._environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self._environment["AWS_SECRET_ACCESS_KEY"],
        )

    def _keep_logs(self, name: str, job: TrainingJob, ended: threading.Event) -> None:
        logs = self._client("logs")
        with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_group(logGroupName=LOG_GROUP)
        sent = dict.fromkeys(job.names, 0)
        for host in job.names:
            logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=f"{name}/{host}-1700000000")
        while True:
            last = ended.wait(LOG_EVERY_S)
            for host in job.names:
                text = job.log(host)[sent[host] :]
                whole = text if last else text[: text.rfind("\n") + 1]
                sent[host] += len(whole)
                events = [
                    {"timestamp": round(time.time() * 1000), "message": line} for line in whole.splitlines() if line
                ]
                if events:
                    logs.put_log_events(
                        logGroupName=LOG_GROUP, logStreamName=f"{name}/{host}-1700000000", logEvents=events
                    )
            if last:
                logs.close()
                return


def _files(folder: Path) -> dict[Path, float]:
    """All files below a folder, with their times of change."""
    return {path: path.stat().st_mtime for path in folder.rglob("*") if path.is_file()}
