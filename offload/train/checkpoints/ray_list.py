"""Ray Train's list of a run's checkpoints. The file is private to Ray Train; only this module reads and repairs it.

If a cloud service copies a checkpoint folder while a run writes to it, the copy may list checkpoints that do not exist, or hold only
half a list. Ray Train would refuse to resume from it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import pyarrow.fs as pafs
import ray

from offload.pipeline.sources.storage_paths import open_filesystem
from offload.train.checkpoints.storage import CHECKSUMS_FILE, Storage
from offload.train.config import Checkpoints

SNAPSHOT = "checkpoint_manager_snapshot.json"
PREFIX = "checkpoint_"


def mend_snapshot(storage: Storage, name: str, settings: Checkpoints) -> int:
    """Repair the list in the folder ``name`` of a storage, so that it names the existing checkpoints, in the order in which the run
    deletes them. Return their number; at 0, training starts from the beginning.

    Ray Train writes the list up to two seconds after a checkpoint. If a run was killed in between and left no list, the new list
    holds the complete checkpoints.
    """
    fs, root = open_filesystem(storage.path, storage.filesystem)
    folder = f"{root.rstrip('/')}/{name}"
    entries = fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    existing = sorted(
        info.base_name for info in entries if info.type == pafs.FileType.Directory and info.base_name.startswith(PREFIX)
    )
    if any(info.base_name == SNAPSHOT for info in entries):
        listed = _read(fs, f"{folder}/{SNAPSHOT}")
    else:
        existing, listed = [entry for entry in existing if is_whole(fs, f"{folder}/{entry}")], None
        if not existing:
            return 0
    mended = in_order(mended_snapshot(listed, existing), settings)
    if mended != listed:
        with fs.open_output_stream(f"{folder}/{SNAPSHOT}") as stream:
            stream.write(json.dumps(mended).encode())
    return len(mended["checkpoint_results"])


def is_whole(fs: pafs.FileSystem, folder: str) -> bool:
    """Return whether the files of a checkpoint still have the lengths that the run wrote."""
    try:
        with fs.open_input_stream(f"{folder}/{CHECKSUMS_FILE}") as stream:
            written = json.loads(stream.read())
        return all(fs.get_file_info(f"{folder}/{name}").size == checksum["bytes"] for name, checksum in written.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def mended_snapshot(listed: dict[str, Any] | None, existing: list[str]) -> dict[str, Any]:
    """The list without missing checkpoints; if the list is broken, a list of all existing ones, oldest first."""
    if listed is None:
        results = [{"version": 0, "checkpoint_dir_name": entry, "metrics": {}} for entry in existing]
        return {
            "ray_version": ray.__version__,
            "checkpoint_results": results,
            "checkpoint_report_indices": [*range(len(results))],
            "latest_checkpoint_result": results[-1] if results else None,
            "pending_training_results": [],
            "pending_validation_specs": [],
            "current_report_index": len(results),
            "validated_checkpoint_dir_names": [],
            "timed_out_validation_checkpoint_dir_names": [],
            "failed_validation_checkpoint_dir_names": [],
        }
    if all(entry["checkpoint_dir_name"] in existing for entry in listed["checkpoint_results"]):
        return listed
    remaining = [
        (result, index)
        for result, index in zip(listed["checkpoint_results"], listed["checkpoint_report_indices"], strict=True)
        if result["checkpoint_dir_name"] in existing
    ]
    latest = listed["latest_checkpoint_result"]
    gone = latest is None or latest["checkpoint_dir_name"] not in existing
    newest = max((result for result, _ in remaining), key=lambda entry: str(entry["checkpoint_dir_name"]), default=None)
    return {
        **listed,
        "checkpoint_results": [result for result, _ in remaining],
        "checkpoint_report_indices": [index for _, index in remaining],
        "latest_checkpoint_result": newest if gone else latest,
        "pending_training_results": [],
        "pending_validation_specs": [],
    }


def in_order(listed: dict[str, Any], settings: Checkpoints) -> dict[str, Any]:
    """Sort the list into the order in which a run with these settings deletes checkpoints: the worst first, or without ``best`` the oldest.

    Ray Train keeps the order that it reads. With ``mode="min"``, it would rank a checkpoint without the metric as the best.
    """
    results, indices = listed["checkpoint_results"], listed.get("checkpoint_report_indices", [])
    if len(results) != len(indices):  # written by another version of Ray; Ray Train itself refuses it
        return listed
    scored = [{**result, "metrics": with_score(result["metrics"], settings)} for result in results]
    sign = -1.0 if settings.mode == "min" else 1.0
    scores = [0.0 if settings.best is None else sign * entry["metrics"][settings.best] for entry in scored]
    order = sorted(range(len(scored)), key=lambda at: (scores[at], indices[at]))  # ties: the oldest first
    return {
        **listed,
        "checkpoint_results": [scored[at] for at in order],
        "checkpoint_report_indices": [indices[at] for at in order],
    }


def with_score(metrics: Mapping[str, Any], settings: Checkpoints) -> dict[str, Any]:
    """The metrics of a checkpoint for Ray Train, which keeps the best one. Without a finite value of ``best``, the checkpoint gets the
    worst possible value.

    Otherwise, Ray Train logs an error about the missing metric. Its list stores a value that is not finite as null, which no resumed
    run can compare.
    """
    if settings.best is None:
        return dict(metrics)
    value = metrics.get(settings.best)
    if isinstance(value, int | float) and math.isfinite(value):
        return dict(metrics)
    worst = sys.float_info.max
    return {**metrics, settings.best: worst if settings.mode == "min" else -worst}


def _read(fs: pafs.FileSystem, path: str) -> dict[str, Any] | None:
    try:
        with fs.open_input_stream(path) as stream:
            snapshot = json.loads(stream.read())
    except ValueError:
        return None
    return snapshot if isinstance(snapshot, dict) and "checkpoint_results" in snapshot else None
