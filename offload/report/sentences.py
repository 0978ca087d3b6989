"""Events of a run in words, for the live line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.model.checks import rate_shown


def sentence(kind: str, event: Mapping[str, Any]) -> str | None:
    """An event in words; None for one that the run only writes down."""
    if kind == "rebatched":
        return f"step {event['step']:,}: the global batch is {event['global_batch_size']:,} from here on"
    if kind == "decided" and event["decision"] == "resize":
        return f"changing to {counted(event['workers'], 'worker')}: {event['reason']}"
    if kind == "resized":
        train = f"{counted(event['workers'], 'worker')} train{'s' if event['workers'] == 1 else ''}"
        if event["workers"] == event["workers_before"]:
            return f"{train}, on other nodes than before"
        return f"{train}, {event['workers_before']} before"
    if kind == "worker_lost":
        return f"a worker died ({event['reason']}): all workers restart from the last checkpoint"
    if kind == "worker_waits":
        return (
            f"worker {event['rank']} has waited {event['seconds']:g} s in {event['call']} for the other workers: all workers must "
            "make this call, not rank 0 alone"
        )
    if kind == "worker_hung":
        return f"worker {event['rank']} made no progress for {event['deadline_s']:g} s, at {event['where']}: the run kills it"
    if kind == "out_of_memory":
        return (
            f"local batches of {event['did_not_fit']:,} do not fit into the memory of worker {event['rank']}'s device: workers now "
            f"take {event['local_batch_size']:,} samples at a time and accumulate {event['accum_steps'] + 1} micro-batches"
        )
    if kind == "preprocessing_lost":
        return f"a preprocessing process died ({event['reason']}): its tasks run again"
    if kind == "preprocessing_slow":
        return (
            f"{event['what']} has taken {event['seconds']} s so far on {event['node']}, and training waits for it. Pass "
            "sample_timeout_s to give up samples that take too long"
        )
    if kind == "cache_stopped":
        return f"node {event['node']} stores nothing more in its cache ({event['reason']}): the run goes on without"
    if kind == "blocks_through_ray":
        return (
            f"samples of node {event['node']} could not be sent to a worker directly ({event['reason']}): Ray carries them, which takes "
            "more CPU time. A firewall may be blocking the workers' ports"
        )
    if kind == "node_excluded":
        return f"the run stops using {', '.join(event['nodes'])}: {event['reason']}"
    if kind == "cluster_changed":
        verbs = ("left", "leaving", "joined")
        if not any(event[verb] for verb in verbs):  # another event reports their memory
            return None
        parts = [f"{verb} {', '.join(event[verb])}" for verb in verbs if event[verb]]
        cores = event["preprocessing_cores"]
        return (
            f"the cluster changed ({'; '.join(parts)}): {counted(cores, 'core')} preprocess{'es' if cores == 1 else ''}"
        )
    if kind == "short_of_memory":
        each = ", ".join(f"{node} ({cores})" for node, cores in zip(event["nodes"], event["cores"], strict=True))
        mib = event["process_bytes"] / (1 << 20)
        return f"memory limits how many cores preprocess: {each}; each process takes {mib:,.0f} MiB"
    if kind == "spot_notice":
        left_s = max(event["deadline_at"] - event["at"], 0.0)
        return f"AWS takes node {event['node']} back in {left_s:.0f} s ({event['action']}): the run drains it"
    if kind == "spot_rebalance":
        return f"AWS may take node {event['node']} back soon: the run does nothing yet"
    if kind == "spot_unwatched":
        return (
            f"the run would miss a spot notice for node {event['node']} ({event['reason']}), and goes on: see "
            "offload's page 'On spot nodes'"
        )
    if kind == "run_leaving":
        return (
            f"node {', '.join(event['nodes'])} is leaving, and this run cannot go on without it: workers commit a checkpoint, and the "
            "same command resumes the run on another node"
        )
    if kind == "cores_wanted" and "capped_samples_per_s" in event:
        return (
            f"the run wants {event['cores']} preprocessing cores instead of {event['before']}: more cores did not raise the input's "
            f"{rate_shown(event['capped_samples_per_s'])} samples/s"
        )
    if kind == "cores_wanted":
        return (
            f"the run wants {event['cores']} preprocessing cores instead of {event['before']}: the workers could train "
            f"{rate_shown(event['device_samples_per_s'])} samples/s, and a core delivers {rate_shown(event['core_samples_per_s'])}"
        )
    if kind == "workers_wanted":
        return f"the run wants {event['workers']} workers and has room for {event['before']}: it asks for nodes"
    if kind == "others_hold":
        return f"other programs hold {shares(event['held'])}: this run uses the rest, and will not use resources that they release later"
    if kind == "cores_shared":
        return "other tasks of this program wait for CPUs that preprocessing reserves: its processes go on, and reserve none from now on"
    if kind == "waits_for_cpus":
        return (
            f"the preprocessing of {event['dataset']!r} has waited {event['seconds']} s for a CPU, and training waits for it. Who holds "
            f"CPUs: {event['held'] or 'nobody'}. End what is not needed, let workers reserve fewer CPUs, or add nodes"
        )
    if kind == "passes_differ":
        mine, others = event["passes"]
        return (
            f"in epoch {event['epoch'] + 1}, worker 0 went through {event['dataset']!r} {counted(mine, 'time')} and worker "
            f"{event['other']} {counted(others, 'time')}, and each gets its share of the samples alone: validate on all workers, and add "
            "up with ctx.sum"
        )
    if kind == "classes_differ":
        there = "no class" if event["is_there"] is None else repr(event["is_there"])
        return (
            f"label {event['label']} is {event['is_here']!r} in {event['dataset']!r} and {there} in 'train': their labels do not mean the "
            "same, and metrics of one model on both are wrong. Give both folders the same classes"
        )
    if kind == "not_started":
        needs = " and ".join(f"{amount:g} {name}" for name, amount in event["needs"].items())
        free = " and ".join(f"{amount:g} {name}" for name, amount in event["free"].items())
        held = f" Who holds CPUs: {event['held']}." if event.get("held") else ""
        return (
            f"no worker has started for {event['after_s']:.0f} s: they need {event['workers']} × ({needs}), and {free} of the cluster are "
            f"free.{held} They may be starting slowly, or other programs hold the resources; training then begins when those end"
        )
    if kind == "not_granted":
        return (
            f"the nodes that the run asked for did not come within {event['after_s']:.0f} s: {counted(event['workers_now'], 'worker')} "
            f"and {counted(event['cores_now'], 'preprocessing core')} go on"
        )
    if kind == "callback_failed":
        return f"callback {event['callback']} failed in {event['method']} ({event['error']}): the run goes on"
    if kind == "pass_not_finished" and event["untrained"]:
        return f"training ended within a pass: {event['untrained']:,} of its samples were not trained"
    return None


def counted(count: int, what: str) -> str:
    """A number of things in words: ``1 worker``, ``2 workers``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def shares(held: Mapping[str, Sequence[float]]) -> str:
    """The resources that others hold, in words. ``held``: by resource, the held and the total amount."""
    return ", ".join(f"{amount:g} of {there:g} {name}" for name, (amount, there) in held.items())
