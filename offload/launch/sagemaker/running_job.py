"""A job's state, its hosts' output and its cost, while it runs and afterwards.

Where it stops: only :func:`stop` changes anything.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import botocore.exceptions

from offload.errors import ConfigError
from offload.launch.launcher import NoCapacity, Say
from offload.launch.sagemaker.container.progress_lines import over_all, read_progress
from offload.launch.sagemaker.groups import InstanceGroup, usd_per_hour
from offload.launch.sagemaker.service import AccessDenied, NoAnswer, Service, asking
from offload.model import Catalog

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
SCHEMA = "offload.sagemaker-job/1"
POLL_S = 5.0
SILENCE_S = 600.0  # time without an answer after which the service counts as lost
ENDED = ("Completed", "Failed", "Stopped")
_IS_OF = re.compile(r"offload: this is (?P<host>\S+) of group (?P<group>\S+) ")


def describe(service: Service, name: str) -> dict[str, Any]:
    """The service's description of a job. Raises ConfigError if there is no job of that name."""
    with asking(f"describe the job {name}"):
        try:
            description: dict[str, Any] = service.sagemaker.describe_training_job(TrainingJobName=name)
        except botocore.exceptions.ClientError as error:
            if "not found" in error.response["Error"].get("Message", "") or "could not find" in str(error).lower():
                raise ConfigError(f"there is no training job {name!r} in {service.region}.") from None
            raise
    return description


def stop(service: Service, name: str) -> None:
    """Ask the service to stop a job. Raises ConfigError if it cannot."""
    describe(service, name)
    with asking(f"stop the job {name}"):
        service.sagemaker.stop_training_job(TrainingJobName=name)


def state(
    job: Mapping[str, Any],
    catalog: Catalog,
    rates: Mapping[str, float] | None = None,
    now: datetime | None = None,
) -> dict[str, Any]:
    """A job's state as a document: its status, cost and rates.

    ``rates``: its metrics from its log, if known, else the service's last values. ``now``: the current time, for the duration of a
    running job. The cost covers the time since training began, at on-demand prices: the service itself may report 0 for such jobs.
    """
    resources = job["ResourceConfig"]
    groups = [
        InstanceGroup(name=g["InstanceGroupName"], instance_type=g["InstanceType"], count=g["InstanceCount"])
        for g in resources.get("InstanceGroups") or _one_group(resources)
    ]
    metrics = rates or {m["MetricName"]: m["Value"] for m in job.get("FinalMetricDataList", [])}
    seconds = _seconds(job, now or datetime.now(UTC))
    try:
        hourly: float | None = usd_per_hour(groups, catalog)
    except ConfigError:
        hourly = None
    usd = None if seconds is None or hourly is None else seconds * hourly / 3600
    samples_per_s = metrics.get("samples_per_s")
    return {
        "schema": SCHEMA,
        "name": job["TrainingJobName"],
        "status": job["TrainingJobStatus"],
        "secondary_status": job.get("SecondaryStatus"),
        "failure_reason": job.get("FailureReason"),
        "groups": {f"{g.name}": {"type": g.instance_type, "count": g.count} for g in groups},
        "spot": bool(job.get("EnableManagedSpotTraining")),
        "seconds": seconds,
        "usd_per_hour": hourly,
        "usd": usd,
        "metrics": dict(metrics),
        "usd_per_million_samples": hourly / 3600 / samples_per_s * 1e6 if hourly and samples_per_s else None,
        "model": (job.get("ModelArtifacts") or {}).get("S3ModelArtifacts"),
        "checkpoints": (job.get("CheckpointConfig") or {}).get("S3Uri"),
    }


def _one_group(resources: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "InstanceGroupName": "all",
            "InstanceType": resources.get("InstanceType", "unknown"),
            "InstanceCount": resources.get("InstanceCount", 1),
        }
    ]


def _seconds(job: Mapping[str, Any], now: datetime) -> float | None:
    if job.get("TrainingTimeInSeconds"):
        return float(job["TrainingTimeInSeconds"])
    began = job.get("TrainingStartTime")
    return ((job.get("TrainingEndTime") or now) - began).total_seconds() if began else None


def follow(
    service: Service, name: str, show: Say, say: Say, poll_s: float = POLL_S
) -> tuple[dict[str, Any], dict[str, float]]:
    """Show the output of a job's hosts, line by line, and report its events, until it has ended.

    Return the service's description, and the averages of its progress lines. Raises NoCapacity if the job ended because AWS had no
    instances for it, NoAnswer if AWS does not answer for ten minutes.
    """
    logs, said, ended = _Logs(service, name), "", False
    answered_at, lost = time.monotonic(), False
    while True:
        try:
            job = describe(service, name)
        except NoAnswer as error:
            if time.monotonic() - answered_at >= SILENCE_S:
                raise
            if not lost:
                say(f"{error} The job goes on; trying again")
            lost = True
            time.sleep(poll_s)
            continue
        answered_at, lost = time.monotonic(), False
        now = f"{job['TrainingJobStatus']}: {_newest(job)}"
        if now != said:
            say(now)
            said = now
        for line in logs.read():
            show(line)
        if ended:
            break
        # Look once more: the last lines arrive late, and are the ones that users need.
        ended = job["TrainingJobStatus"] in ENDED
        time.sleep(poll_s)
    if "CapacityError" in (job.get("FailureReason") or ""):
        raise NoCapacity(f"{name}: {job['FailureReason']}")
    return job, over_all(logs.progress)


def _newest(job: Mapping[str, Any]) -> str:
    transitions = job.get("SecondaryStatusTransitions") or []
    last = transitions[-1] if transitions else {"Status": job.get("SecondaryStatus", "")}
    return " ".join(filter(None, (last.get("Status"), last.get("StatusMessage"))))


@dataclass
class _Logs:
    """The output of a job's hosts in the order of reading, each line with its group and host."""

    service: Service
    job: str
    tokens: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    progress: list[dict[str, float]] = field(default_factory=list)
    unreadable: bool = False

    def read(self) -> Iterator[str]:
        """The new lines."""
        if self.unreadable:
            return
        try:
            with asking("read the job's log (the job goes on)"):
                for stream in self._streams():
                    yield from self._new_of(stream)
        except AccessDenied as error:
            self.unreadable = True
            yield str(error)
        except ConfigError as error:  # the next look may succeed
            yield str(error)

    def _streams(self) -> list[str]:
        pages = self.service.logs.get_paginator("describe_log_streams")
        try:
            listing = pages.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self.job}/")
            return sorted(stream["logStreamName"] for page in listing for stream in page["logStreams"])
        except self.service.logs.exceptions.ResourceNotFoundException:
            return []  # no job has ever printed anything in this account

    def _new_of(self, stream: str) -> Iterator[str]:
        host = re.sub(r"-\d{6,}$", "", stream.split("/", 1)[1])
        while True:
            more = {"nextToken": self.tokens[stream]} if stream in self.tokens else {}
            page = self.service.logs.get_log_events(
                logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **more
            )
            for event in page["events"]:
                yield self._line(host, event["message"])
            before, self.tokens[stream] = self.tokens.get(stream), page["nextForwardToken"]
            if page["nextForwardToken"] == before:  # this is the end; an empty page is not
                return

    def _line(self, host: str, text: str) -> str:
        if match := _IS_OF.search(text):
            self.groups[match["host"]] = match["group"]
        if progress := read_progress(text):
            self.progress.append(progress)
        return f"[{' '.join(filter(None, (self.groups.get(host), host)))}] {text.rstrip()}"
