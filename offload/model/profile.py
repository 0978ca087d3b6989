"""A probe's findings about a workload, the input of a plan. The document is profile.json, schema ``offload.profile/1``.

A profile may be written by hand: only core-seconds and wire bytes per sample and the two compute terms are required.
Where it stops: parsed JSON in, a checked value out.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.errors import ConfigError
from offload.model.blocks import HUB_BLOCK_S
from offload.model.checks import check_count, check_number, shown
from offload.model.goodput import OVERLAP
from offload.model.input_rate import REMOTE_CORE_SECONDS_PER_BYTE, InputRate
from offload.model.noise import GradientNoise
from offload.model.step_ranges import DAY_TO_DAY, Uncertainty
from offload.model.step_time import PARAMETERS, StepTime
from offload.model.synchronisation import INTER_OVER_INTRA, Synchronisation

SCHEMA = "offload.profile/1"
MOST_PROBED_S = 3600.0  # a probe knows its unit, and models on a CPU or samples of video take seconds
MOST_CHANGE = 1e6  # largest change of a step's parameter, in its unit: a larger one is a mistake


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """The range of a number in the profile. Above ``most`` a wrong unit is likelier than the value; ``most_probed`` is the bound in a
    profile that a probe wrote, if it is another one."""

    sane: str
    least: float = 0.0
    most: float = math.inf
    most_probed: float | None = None
    above: float | None = None
    required: bool = False
    default: float | None = None  # also the meaning of null
    whole: bool = False


_SECONDS = "in seconds, such as {}: {} ms"
_INPUT = {
    "core_seconds_per_sample": _Rule(
        sane=_SECONDS.format(0.029, 29) + " of one core",
        above=0.0,
        least=1e-9,
        most=10.0,
        most_probed=MOST_PROBED_S,
        required=True,
    ),
    "contention": _Rule(sane="between 0 and 1, such as 0.02", most=1.0, default=0.0),
    "raw_bytes_per_sample": _Rule(sane="in bytes, such as 110000 for a JPEG", default=0.0),
    "wire_bytes_per_sample": _Rule(sane="in bytes, such as 150528 for 224×224×3 uint8", least=1.0, required=True),
    "ingest_samples_per_s_per_worker": _Rule(
        sane="in samples/s, such as 9000, or null if unknown", above=0.0, least=1e-3, default=math.inf
    ),
    "storage_bytes_per_s": _Rule(sane="in bytes/s, such as 1.2e9, or null if unknown", above=0.0, default=math.inf),
    "remote_core_seconds_per_byte": _Rule(
        sane="in seconds, such as 1.4e-9: 1.4 ns", most=1e-6, default=REMOTE_CORE_SECONDS_PER_BYTE
    ),
    "hub_block_s": _Rule(sane="in seconds, such as 0.005: 5 ms, or 0 for no limit", most=1.0, default=HUB_BLOCK_S),
}
_STEP = {
    "alpha_compute": _Rule(sane=_SECONDS.format(0.01, 10), most=5.0, most_probed=MOST_PROBED_S, required=True),
    "beta_compute": _Rule(
        sane=_SECONDS.format(0.0016, 1.6) + " per sample", most=10.0, most_probed=MOST_PROBED_S, required=True
    ),
    "alpha_intra": _Rule(sane=_SECONDS.format(0.001, 1), most=5.0, most_probed=MOST_PROBED_S, default=0.0),
    "beta_intra": _Rule(sane=_SECONDS.format(0.0001, 0.1), most=5.0, most_probed=MOST_PROBED_S, default=0.0),
    "alpha_inter": _Rule(sane=_SECONDS.format(0.004, 4), most=5.0, most_probed=MOST_PROBED_S, default=0.0),
    "beta_inter": _Rule(sane=_SECONDS.format(0.0001, 0.1), most=5.0, most_probed=MOST_PROBED_S, default=0.0),
    "gamma": _Rule(sane="between 1 and 10, such as 1.5", least=1.0, most=10.0, default=1.0),
    "variation": _Rule(sane="a share, such as 0.05", most=1.0, default=0.0),
    "max_local_batch_size": _Rule(
        sane="a whole number of samples, such as 256, or null for no limit", least=1.0, default=math.inf, whole=True
    ),
}
_MEASURED_WITH = {
    "nodes": _Rule(sane="the nodes of the measured steps, such as 1", least=1.0, whole=True),
    "workers": _Rule(sane="the workers of the measured steps, such as 2", least=1.0, whole=True),
    "gradient_bytes": _Rule(sane="in bytes, such as 102000000", above=0.0, least=1.0),
}
_NOISE = {
    "sqr": _Rule(sane="such as 0.00136", required=True),
    "var": _Rule(sane="such as 0.000502", required=True),
    "batch_size": _Rule(sane="the global batch it was measured at, such as 64", least=1.0, required=True, whole=True),
    "sqr_error": _Rule(sane="the standard error of noise.sqr, such as 0.0004", default=0.0),
}
_NOISE_SAMPLES = {"samples": _Rule(sane="the samples behind the gradients, such as 512", least=1.0, whole=True)}
_UNCERTAINTY = {
    "core_seconds_per_sample": _Rule(sane="a share, such as 0.03 for ± 3 %", most=1.0, default=0.0),
    "step": _Rule(sane="a share, such as 0.02 for ± 2 %", most=1.0, default=0.0),
    "day_to_day": _Rule(sane="a share, such as 0.06 for ± 6 %", most=1.0, default=DAY_TO_DAY),
}
_TOP = {
    "overlap": _Rule(sane="at least 1, such as 8", least=1.0, default=OVERLAP),
    "host_cpus_per_worker": _Rule(sane="cores, such as 1", most=1024.0, default=1.0),
    "batch_size": _Rule(sane="the global batch, such as 64", least=1.0, whole=True),
}
_MEASURED = {
    "core_speed": _Rule(sane="relative to an ml.c5 vCPU, such as 1.0", above=0.0, least=0.01, most=100.0, default=1.0)
}
_STAGE = {
    "core_seconds_per_sample": _Rule(
        sane=_SECONDS.format(0.004, 4), most=10.0, most_probed=MOST_PROBED_S, required=True
    ),
    "bytes_out": _Rule(sane="in bytes, such as 562500"),
}
_SECTIONS = ("schema", "workload", "input", "step", "noise", "uncertainty", "measured", *_TOP)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of preprocessing: its cost per sample, and the bytes it outputs (None: unknown)."""

    name: str
    core_seconds_per_sample: float
    bytes_out: float | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A workload as the model sees it.

    Args:
        input: the input side, its core-seconds converted to a core of speed 1.
        step_time: the accelerators on ``device``.
        device: the GPU that the step was measured on; None: the planned GPU.
        max_local_batch_size: the largest local batch that fits the device's memory, or infinity.
        overlap: delta of the joint model.
        batch_size: the global batch to plan with when none is given, or None.
        noise: gradient noise, or None.
        noise_samples: the samples whose gradients were compared; None: unknown.
        uncertainty: the uncertainty of the two sides.
        synchronisation: which of the step's terms were measured.
        workload: the probed workload, for the reader.
        stages: the stages of preprocessing.
        measured: where, when and with which versions it was measured; for the reader, and to detect a stale profile.
    """

    input: InputRate
    step_time: StepTime
    device: str | None = None
    max_local_batch_size: float = math.inf
    overlap: float = OVERLAP
    batch_size: int | None = None
    noise: GradientNoise | None = None
    noise_samples: int | None = None
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    synchronisation: Synchronisation = field(default_factory=Synchronisation)
    workload: str = ""
    stages: tuple[Stage, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_document(document: Any, *, source: str = "the profile") -> Profile:
        """Read the JSON document of a profile.

        Raises ConfigError if the schema is unknown, or if a field is missing, not a number, out of its range or misspelt. The
        message gives the value found and an example of a sane one.
        """
        if not isinstance(document, dict):
            raise ConfigError(f"{source} must be a JSON object, found {type(document).__name__}.")
        if document.get("schema") != SCHEMA:
            raise ConfigError(
                f"{source} has the schema {document.get('schema')!r}, expected {SCHEMA!r}: recreate it with "
                "offload probe SCRIPT -o profile.json."
            )
        versions = _table(_table(document.get("measured")).get("versions"))
        read = _Reader(source, probed=bool(versions))
        read.names("", document, _SECTIONS)
        top = read.numbers("", document, _TOP)
        inputs = read.numbers("input.", read.section(document, "input"), _INPUT, others=("stages", "constant"))
        step = read.numbers("step.", read.section(document, "step"), {**_STEP, **_MEASURED_WITH}, others=("device",))
        measured_with = {name: step.pop(name) for name in _MEASURED_WITH}
        measured = document.get("measured") or {}
        read.table("measured.versions", read.table("measured", measured).get("versions") or {})
        speed = read.numbers("measured.", read.table("measured", measured), _MEASURED, closed=False)["core_speed"]
        uncertainty = read.table("uncertainty", document.get("uncertainty") or {})
        limit = step.pop("max_local_batch_size")
        if step["alpha_compute"] + step["beta_compute"] <= 0:
            raise ConfigError(
                f"{source}: step.alpha_compute and step.beta_compute are both 0; expected values such as 0.01 and 0.0016."
            )
        # A slow core spends more seconds on a sample than a reference core would.
        inputs["core_seconds_per_sample"] *= speed
        return Profile(
            input=InputRate(host_cpus_per_worker=top["host_cpus_per_worker"], **inputs),
            step_time=StepTime(**step),
            device=read.text("step.device", document["step"].get("device")),
            max_local_batch_size=limit,
            overlap=top["overlap"],
            batch_size=None if top["batch_size"] is None else int(top["batch_size"]),
            noise=read.noise(document.get("noise")),
            noise_samples=read.noise_samples(document.get("noise")),
            uncertainty=Uncertainty(
                step_directions=read.rows("uncertainty.step_directions", uncertainty.get("step_directions")),
                local_batch_sizes=read.sizes("uncertainty.local_batch_sizes", uncertainty.get("local_batch_sizes")),
                **read.numbers(
                    "uncertainty.", uncertainty, _UNCERTAINTY, others=("step_directions", "local_batch_sizes")
                ),
            ),
            synchronisation=_synchronisation(step, **measured_with),
            workload=read.text("workload", document.get("workload")) or "",
            stages=read.stages(document["input"].get("stages")),
            measured=measured,
        )


def _synchronisation(
    step: Mapping[str, Any], *, nodes: int | None, workers: int | None, gradient_bytes: float | None
) -> Synchronisation:
    """What was measured: by the nodes and workers of the measured steps, or by the terms if the profile does not name those."""
    intra, inter = (step[f"alpha_{link}"] + step[f"beta_{link}"] > 0 for link in ("intra", "inter"))
    if nodes is None or workers is None:
        # A fit that saw one node writes this multiple.
        guessed = intra and math.isclose(step["alpha_inter"], INTER_OVER_INTRA * step["alpha_intra"], rel_tol=1e-6)
        return Synchronisation(intra=intra, inter=inter and not guessed, gradient_bytes=gradient_bytes)
    return Synchronisation(
        intra=nodes == 1 and workers > 1, inter=nodes > 1 and workers > 1, gradient_bytes=gradient_bytes
    )


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


class _Reader:
    """A reader of a document's fields, which names a wrong field. ``probed``: whether a probe wrote the document."""

    def __init__(self, source: str, *, probed: bool) -> None:
        self.source, self._probed = source, probed

    def section(self, document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        if name not in document:
            raise ConfigError(f"{self.source} has no section {name!r}. A profile needs at least input and step.")
        return self.table(name, document[name])

    def table(self, name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise ConfigError(f"{self.source}: {name} must be an object of fields, found {value!r}.")
        return value

    def text(self, name: str, value: Any) -> str | None:
        if not isinstance(value, str | None):
            raise ConfigError(f"{self.source}: {name} must be text, found {value!r}.")
        return value

    def names(self, where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
        """Refuse names that are close to a known one: those are typos. Others are extensions, which this version ignores."""
        for name in table:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75)
            if name not in known and near:
                raise ConfigError(f"{self.source} has an unknown field {where}{name}. Did you mean {where}{near[0]}?")

    def numbers(
        self,
        where: str,
        table: Mapping[str, Any],
        rules: Mapping[str, _Rule],
        *,
        others: tuple[str, ...] = (),
        closed: bool = True,
    ) -> dict[str, Any]:
        if closed and where:
            self.names(where, table, (*rules, *others))
        return {name: self._number(where + name, table.get(name), rule) for name, rule in rules.items()}

    def _number(self, name: str, value: Any, rule: _Rule) -> float | None:
        if value is None:
            if rule.required:
                raise ConfigError(f"{self.source} has no {name}: give it {rule.sane}.")
            return rule.default
        name = f"{self.source}: {name}"
        if rule.whole:
            return check_count(name, value, least=int(rule.least), sane=rule.sane, whole_floats=True)
        most = rule.most if rule.most_probed is None or not self._probed else rule.most_probed
        if 1 < most < math.inf and isinstance(value, int | float) and value > most:
            raise ConfigError(f"{name} is {value:g}, which looks like another unit: expected {rule.sane}.")
        return check_number(name, value, least=rule.least, most=most, above=rule.above, sane=rule.sane)

    def noise(self, section: Any) -> GradientNoise | None:
        if section is None:
            return None
        table = self.table("noise", section)
        return GradientNoise(**self.numbers("noise.", table, _NOISE, others=tuple(_NOISE_SAMPLES)))

    def noise_samples(self, section: Any) -> int | None:
        """The samples whose gradients were compared; None if the profile does not tell."""
        samples = self.numbers("noise.", section or {}, _NOISE_SAMPLES, closed=False)["samples"]
        return None if samples is None else int(samples)

    def rows(self, name: str, listed: Any) -> tuple[tuple[float, ...], ...]:
        """Rows of a number for each of the step's parameters."""
        if not isinstance(listed, list | None) or len(listed or []) > len(PARAMETERS) ** 2:
            raise ConfigError(f"{self.source}: {name} must be a list of a few rows, found {shown(listed)}.")
        return tuple(
            self._numbers(f"{name}[{at}]", row, len(PARAMETERS), -MOST_CHANGE) for at, row in enumerate(listed or [])
        )

    def sizes(self, name: str, listed: Any) -> tuple[float, float] | None:
        """The least and the most of a range of sizes."""
        if listed is None:
            return None
        least, most = self._numbers(name, listed, 2, 1.0)
        if least > most:
            raise ConfigError(f"{self.source}: {name} must name the least first, found {shown(listed)}.")
        return least, most

    def _numbers(self, name: str, listed: Any, count: int, least: float) -> tuple[float, ...]:
        if not isinstance(listed, list) or len(listed) != count:
            raise ConfigError(f"{self.source}: {name} must be a list of {count} numbers, found {shown(listed)}.")
        return tuple(
            check_number(f"{self.source}: {name}[{at}]", value, least=least, most=MOST_CHANGE, sane="such as 0.01")
            for at, value in enumerate(listed)
        )

    def stages(self, listed: Any) -> tuple[Stage, ...]:
        if not isinstance(listed, list | None):
            raise ConfigError(f"{self.source}: input.stages must be a list, found {listed!r}.")
        stages = []
        for position, item in enumerate(listed or []):
            where = f"input.stages[{position}]"
            table = self.table(where, item)
            name = self.text(f"{where}.name", table.get("name"))
            if not name:
                raise ConfigError(f"{self.source}: {where} has no name.")
            stages.append(Stage(name=name, **self.numbers(f"{where}.", table, _STAGE, others=("name",))))
        return tuple(stages)
