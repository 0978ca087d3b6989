"""Events of a run in words, grouped by what they are about.

Every known kind has a sentence here or in :mod:`offload.report.sentences`, which the live line uses too. A kind without one shows its
name and its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.report.formatting import count, duration, figure, rate
from offload.report.page.nodes import Node
from offload.report.page.records import number, text
from offload.report.sentences import sentence

GROUPS = {
    "run": "The run",
    "decision": "Decisions",
    "node": "Nodes",
    "fault": "Faults",
    "checkpoint": "Checkpoints",
    "report": "Reported metrics",
    "other": "Other events",
}
"""The groups of events in the order in which the page shows them."""

_GROUP_OF = {
    **dict.fromkeys(
        ("run_started", "run_resumed", "run_finished", "resumed", "first_batch", "first_step", "stopped_early", "pass_not_finished"),
        "run",
    ),
    **dict.fromkeys(
        (
            "decided", "measured", "rebatched", "resized", "resize_cost", "ready_to_resize", "workers_wanted", "cores_wanted",
            "not_granted", "ignored",
        ),
        "decision",
    ),
    **dict.fromkeys(
        ("cluster_changed", "node_preprocesses", "training_nodes", "spot_notice", "spot_rebalance", "spot_unwatched", "run_leaving"),
        "node",
    ),
    **dict.fromkeys(
        (
            "worker_lost", "worker_hung", "worker_waits", "preprocessing_lost", "preprocessing_slow", "out_of_memory", "node_excluded",
            "short_of_memory", "not_started", "blocks_through_ray", "others_hold", "classes_differ", "passes_differ",
            "callback_failed", "cores_shared", "waits_for_cpus",
        ),
        "fault",
    ),
    "checkpoint": "checkpoint",
    "report": "report",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Told:
    """An event in words. ``at_s``: its second of the run; ``changes``: whether it changed, or tried to change, what the run does."""

    at_s: float
    kind: str
    group: str
    words: str
    changes: bool


def group_of(kind: str) -> str:
    """The group of a kind of events."""
    return _GROUP_OF.get(kind, "other")


def told(event: Mapping[str, Any], at_s: float, nodes: Mapping[str, Node]) -> Told:
    """An event in words. ``at_s``: its second of the run; ``nodes``: by id."""
    kind = event["event"]
    try:
        words = _words(kind, event, nodes)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        words = ""  # an event of another version, or a damaged one
    group = group_of(kind)
    return Told(
        at_s=at_s,
        kind=kind,
        group=group,
        words=words or _plain(kind, event),
        changes=group in ("decision", "fault") and kind not in _ASIDE and not _keeps(event),
    )


_ASIDE = (
    "measured", "resize_cost", "ready_to_resize", "ignored", "others_hold", "classes_differ", "passes_differ", "callback_failed",
    "worker_waits", "cores_shared", "waits_for_cpus",
)  # fmt: skip


def _keeps(event: Mapping[str, Any]) -> bool:
    return event["event"] == "decided" and event.get("decision") == "keep"


def _words(kind: str, event: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    own = _SENTENCES.get(kind)
    said = own(event, nodes) if own is not None else sentence(kind, event)
    return (said[:1].upper() + said[1:]) if said else ""


def _plain(kind: str, event: Mapping[str, Any]) -> str:
    rest = ", ".join(
        f"{name} {text(value, 200)}"
        for name, value in event.items()
        if name not in ("event", "at", "rank") and value is not None
    )
    return kind.replace("_", " ") + (f": {rest}" if rest else "")


def _called(node_id: Any, nodes: Mapping[str, Node]) -> str:
    found = nodes.get(node_id) if isinstance(node_id, str) else None
    return found.name if found is not None else text(node_id, 100)


def _began(event: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    verb = "starts" if event["event"] == "run_started" else "resumes"
    there = len(event["nodes"])
    return (
        f"the run {verb}: {count(event['workers'], 'worker')}, {count(event['preprocessing_cores'], 'preprocessing core')}, "
        f"{count(there, 'node')}, global batch {event['global_batch_size']:,}"
    )


def _finished(event: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    error = f": {event['error']}" if event.get("error") else ""
    return f"the run ends, {event['status']}, after {event['steps']:,} steps and {event['samples']:,} samples{error}"


def _decided(event: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    if event["decision"] == "keep":
        return f"keeps its size: {event['reason']}"
    batch = event["local_batch_size"] * event["workers"] * (event["accum_steps"] + 1)
    expected = number(event.get("predicted_samples_per_s"))
    return f"decides on {count(event['workers'], 'worker')} with a global batch of {batch:,}: {event['reason']}" + (
        f"; it expects {rate(expected)}" if expected == expected else ""
    )


def _measured(event: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    predicted, found = number(event["predicted_samples_per_s"]), number(event["measured_samples_per_s"])
    return f"after the change: {rate(found)} measured, {figure(predicted)} predicted"


def _checkpoint(event: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    aside = "" if event.get("waited", True) else ", while training went on"
    return f"step {event['step']:,}: a checkpoint ({event['reason']}) took {duration(number(event['seconds']))}{aside}"


def _reported(event: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    values = "  ".join(f"{name} {figure(number(value))}" for name, value in event["metrics"].items())
    return f"epoch {event['epoch'] + 1}, step {event['step']:,}: {values}"


def _resumed(event: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    again = f"; the epoch starts again ({event['epoch_starts_again']})" if event.get("epoch_starts_again") else ""
    older = "".join(f"; an older checkpoint serves: {each}" for each in event.get("damaged") or ())
    return f"workers resume at epoch {event['epoch'] + 1}, step {event['step']:,}, from a checkpoint{again}{older}"


def _training_on(event: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    names = ", ".join(_called(each, nodes) for each in event["nodes"])
    return f"workers train on {names}" if names else "no worker trains"


_SENTENCES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Node]], str]] = {
    "run_started": _began,
    "run_resumed": _began,
    "run_finished": _finished,
    "decided": _decided,
    "measured": _measured,
    "checkpoint": _checkpoint,
    "report": _reported,
    "resumed": _resumed,
    "training_nodes": _training_on,
    "node_preprocesses": lambda event, nodes: f"node {_called(event['node'], nodes)} preprocesses",
    "first_batch": lambda event, nodes: (
        f"epoch {event['epoch'] + 1}: the first batch came after {duration(number(event['seconds']))}"
    ),
    "first_step": lambda event, nodes: (
        f"step {event['step']:,}: {count(event['workers'], 'worker')} made the first step"
    ),
    "resize_cost": lambda event, nodes: (
        f"the change of workers took {duration(number(event['without_steps_s']))} without a step"
    ),
    "ready_to_resize": lambda event, nodes: (
        f"step {event['step']:,}: the workers have committed and make way for the next group"
    ),
    "stopped_early": lambda event, nodes: (
        f"training stopped early, in epoch {event['epoch'] + 1} at step {event['step']:,}"
    ),
    "ignored": lambda event, nodes: f"the run ignored {event['what']}: {event['reason']}",
}
