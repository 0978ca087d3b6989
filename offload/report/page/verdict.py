"""The verdict of a run in sentences: its bottleneck, what to do next and what that would bring, and the same accelerators alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from offload.formatting import count, figure, rate, share, times, usd
from offload.measure.steps import INPUT_BOUND
from offload.report.bottleneck import READING_BINDS, verdict
from offload.report.json_values import number
from offload.report.page.money import unpriced
from offload.report.page.story import Story
from offload.report.page.what_if import WORTH_IT, Predicted, alone, best_step, more_cores

DEARER = 1.02  # relative price of a sample from which on an advice says that it costs more


def bottleneck(story: Story) -> str:
    """The bottleneck over the whole run."""
    whole = story.whole
    if whole is None:
        return "Nothing was trained."
    last = story.last
    if last is not None and (last.stall < INPUT_BOUND) != (whole.stall < INPUT_BOUND):
        if last.stall < INPUT_BOUND:
            return (
                f"At its last size, the {story.device} was the bottleneck. Over the whole run, preprocessing was for {share(whole.stall)} "
                "of the time."
            )
        return (
            f"At its last size, preprocessing was the bottleneck for {share(last.stall)} of the time; over the whole run, for "
            f"{share(whole.stall)}."
        )
    blocked = whole.blocked
    if blocked is None:  # earlier versions did not record it per interval
        inputs = story.records.summary.get("input")
        shares = [number(value.get("blocked")) for value in _values(inputs) if isinstance(value, dict)]
        blocked = max((value for value in shares if value == value), default=0.0)
    device = "GPU" if story.device == "GPU" else "CPU worker"
    return verdict({"steps": 1, "stall": whole.stall, "device": device, "input": {"train": {"blocked": blocked}}})


def _values(table: Any) -> Iterable[Any]:
    return table.values() if isinstance(table, dict) else ()


def what_next(story: Story) -> str:
    """The next step and its effect according to the model, or why there is none."""
    model = story.model
    if isinstance(model, str):
        return f"The model cannot say what other nodes would bring: {model}."
    last = model.measured
    if last.stall >= INPUT_BOUND and last.blocked is not None and last.blocked >= READING_BINDS:
        return "Next: faster storage, or data nearer to the nodes. The model counts cores alone, so it predicts nothing here."
    step = best_step(model)
    if step is not None:
        kind, more, predicted = step
        verb = "more" if more > 0 else "fewer"
        # The least dollars per sample may still be more than now: the advice then buys time.
        dearer = (predicted.usd_per_million or 0.0) > DEARER * (story.usd_per_million or math.inf)
        when = ", if time matters more than money" if dearer else ""
        nodes = count(abs(more), f"{verb} {_node(kind)}")
        return f"Next{when}: {nodes}: {_effect(story, predicted)}."
    if last.stall < INPUT_BOUND:
        return f"Next: a faster {story.device}, or more of them. Compare them with offload plan; more CPU nodes would change nothing."
    if model.bottleneck(model.now) == "network":
        return (
            "Next: nodes with a faster network, or smaller samples: more cores would not help, as the network is full."
        )
    if model.bottleneck(model.now) == "hub":
        return (
            "Next: nodes with more memory for each core, or smaller samples: more cores would not help, as the processes that hand out "
            "blocks are busy."
        )
    doubled = more_cores(model)
    if doubled is not None and doubled[1].samples_per_s > (1 + WORTH_IT) * last.samples_per_s:
        cores, predicted = doubled
        return f"Next: {count(cores, 'more preprocessing core')}: {_effect(story, predicted)}."
    return f"Next: nothing that the model knows would raise the rate by more than {WORTH_IT:.0%}."


def against_alone(story: Story) -> str:
    """This run against the same accelerators without the other nodes, predicted from the run's measurements."""
    model = story.model
    if isinstance(model, str):
        return f"Against the same {story.device} alone: not known, since {model}."
    predicted = alone(model)
    if predicted is None:
        return f"This run used the nodes of its {story.device}s alone, so there is nothing to compare it with."
    last = model.measured
    if predicted.samples_per_s <= 0:
        return f"The same {story.device}s alone could not train like this: their workers leave no core to preprocess."
    price = ""
    if predicted.usd_per_million is not None and story.usd_per_million is not None:
        price = f", {usd(story.usd_per_million)} against {usd(predicted.usd_per_million)} per million samples"
    faster = times(last.samples_per_s / predicted.samples_per_s)
    return (
        f"{_nodes(predicted.nodes)} alone would train {figure(predicted.samples_per_s)} samples/s, as the model predicts from this run's "
        f"measurements. With all its nodes the run trained {figure(last.samples_per_s)}, {faster} as fast: stall {share(last.stall)} "
        f"against {share(predicted.stall)}{price}."
    )


def money_missing(story: Story) -> str | None:
    """Why the run has no cost, with the remedy; None if it has one."""
    if story.spending is not None:
        return None
    if not story.nodes:
        return "The run directory names no nodes, so the cost is unknown."
    names = unpriced(story.nodes, story.prices)
    return f"The cost is unknown: no price of {', '.join(names[:3])}. Pass --usd-per-hour {names[0]}=1.40 to offload report."


def _effect(story: Story, predicted: Predicted) -> str:
    last = story.last
    assert last is not None
    effect = f"{figure(last.samples_per_s)} → {rate(predicted.samples_per_s)} predicted"
    if predicted.usd_per_million is not None and story.usd_per_million is not None:
        effect += f", {usd(story.usd_per_million)} → {usd(predicted.usd_per_million)} per million samples"
    return effect


def _node(kind: str) -> str:
    return kind.removesuffix("s") if kind in ("CPU nodes", "GPU nodes") else f"{kind} node"


def _nodes(nodes: Mapping[str, int]) -> str:
    return " + ".join(f"{number_of} × {_node(kind)}" for kind, number_of in nodes.items())
