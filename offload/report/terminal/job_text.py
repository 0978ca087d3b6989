"""Text for a cloud job: the request before it is sent, and its state afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def format_sagemaker_request(
    request: Mapping[str, Any], *, usd_per_hour: float | None, bundle_bytes: int, others: int
) -> str:
    """A CreateTrainingJob document below a summary of its main points. ``others``: the number of jobs to try after it."""
    seconds = request["StoppingCondition"]["MaxRuntimeInSeconds"]
    groups = request["ResourceConfig"]["InstanceGroups"]
    cost = (
        "not known: an instance type is not in the catalog (--catalog)"
        if usd_per_hour is None
        else f"${usd_per_hour:,.2f} an hour on demand; at most ${usd_per_hour * seconds / 3600:,.2f}"
    )
    rows = [
        ("job", request["TrainingJobName"]),
        (
            "instances",
            " + ".join(f"{g['InstanceCount']} × {g['InstanceType']} ({g['InstanceGroupName']})" for g in groups),
        ),
        ("cost", cost),
        ("time", f"at most {seconds / 3600:,.1f} h"),
        ("image", request["AlgorithmSpecification"]["TrainingImage"]),
        ("upload", f"{bundle_bytes / 2**20:,.1f} MiB: the script's folder, offload and its requirements"),
        *([("volumes", _VOLUMES)] if _output_key_alone(request) else []),
        *([("if there is none", _next_ones(others))] if others else []),
    ]
    return f"{_table(rows)}\n\n{json.dumps(request, indent=2)}"


def _next_ones(others: int) -> str:
    if others == 1:
        return "the next combination of the plan is tried"
    return f"the next {others} combinations of the plan are tried in turn"


_VOLUMES = "encrypted by their hardware: an instance type has local disks, for which the service accepts no --kms-key"


def _output_key_alone(request: Mapping[str, Any]) -> bool:
    return "KmsKeyId" in request["OutputDataConfig"] and "VolumeKmsKeyId" not in request["ResourceConfig"]


def format_sagemaker_job(state: Mapping[str, Any]) -> str:
    """A job's state (``offload.sagemaker-job/1``) as text."""
    metrics = state["metrics"]
    rows = [
        ("job", state["name"]),
        ("status", " / ".join(dict.fromkeys(filter(None, (state["status"], state["secondary_status"]))))),
        ("reason", state["failure_reason"]),
        ("instances", " + ".join(f"{g['count']} × {g['type']} ({name})" for name, g in state["groups"].items())),
        ("trained for", None if state["seconds"] is None else f"{state['seconds']:,.0f} s"),
        ("cost", _cost(state)),
        ("throughput", f"{metrics['samples_per_s']:,.1f} samples/s" if "samples_per_s" in metrics else None),
        ("stall", f"{metrics['stall']:.1%} of step time waiting for data" if "stall" in metrics else None),
        (
            "goodput",
            f"{metrics['goodput']:,.1f} samples/s as useful as the initial batch's" if "goodput" in metrics else None,
        ),
        ("loss", f"{metrics['loss']:.4g}" if "loss" in metrics else None),
        (
            "a million samples",
            None
            if state["usd_per_million_samples"] is None
            else f"${state['usd_per_million_samples']:,.2f} at that rate",
        ),
        ("model", state["model"]),
        ("checkpoints", state["checkpoints"]),
    ]
    return _table([(name, value) for name, value in rows if value is not None])


def format_ray_job(state: Mapping[str, Any]) -> str:
    """The state of a job on a Ray cluster (``offload.ray-job/1``) as text."""
    rows = [
        ("job", state["job"]),
        ("cluster", state["address"]),
        (
            "status",
            state["status"] if state["exit_code"] is None else f"{state['status']}, exit code {state['exit_code']}",
        ),
        ("reason", state["reason"]),
        ("time", None if state["seconds"] is None else f"{state['seconds']:,.0f} s"),
        ("run directory", state["run_dir"] and f"{state['run_dir']} on the cluster's head"),
    ]
    return _table([(name, value) for name, value in rows if value is not None])


def format_ray_request(request: Mapping[str, Any], *, bundle_bytes: int) -> str:
    """A request to a Ray cluster below a summary of its main points."""
    rows = [
        ("job", str(request["submission_id"])),
        ("command", str(request["entrypoint"])),
        ("upload", f"{bundle_bytes / 2**20:,.1f} MiB: the working directory and offload"),
    ]
    return f"{_table(rows)}\n\n{json.dumps(request, indent=2)}"


def _cost(state: Mapping[str, Any]) -> str | None:
    if state["usd_per_hour"] is None:
        return "not known: an instance type is not in the catalog (--catalog)"
    rate = f"${state['usd_per_hour']:,.2f} an hour on demand" + (", less on spot" if state["spot"] else "")
    return rate if state["usd"] is None else f"${state['usd']:,.2f} ({rate})"


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)
