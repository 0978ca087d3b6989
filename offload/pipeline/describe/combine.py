"""Other passes over data sets: samples drawn by weight, and several data sets in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from offload.errors import ConfigError
from offload.model.checks import check_count, check_mapping, check_number, check_text, shown
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.describe.sources import ANY_SOURCE, as_pipeline
from offload.pipeline.index.mixed import MixedIndex, mixed_index
from offload.pipeline.index.source import Index, Tell, silent
from offload.pipeline.order.shuffling import Draws
from offload.pipeline.preprocessing.processing import IndexRecipe
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.raydata.dataset_source import list_dataset_rows

_R = TypeVar("_R", bound=Recipe)


def weighted(pipeline: Any, weights: Any, *, samples: int | None = None) -> Pipeline:
    """A data set whose passes draw samples by weight, with replacement, as torch's ``WeightedRandomSampler`` does.

    The draws are a function of the seed, the epoch and the number of the pass within it. Each counts once by its position, so that a
    resumed run makes exactly the rest. A sample that is drawn repeatedly gets other random numbers each time.

    Args:
        pipeline: a result of :func:`offload.image_folder` and its siblings, a ``ray.data.Dataset``, a map-style torch data set, or a list
            of samples.
        weights: one number per sample, in a sequence, an array or a tensor. A sample of weight 0 is never drawn.
        samples: the draws of a pass. None: as many as there are samples.

    Raises:
        ConfigError: for invalid weights; and, when the run starts, for another number of weights, or a ``ray.data.Dataset`` whose
            number of rows only running it tells.
    """
    inner = indexed("weighted", pipeline)
    if inner.drawn:
        raise ConfigError(
            f"{inner.name} already draws its samples by weight. Multiply the weights, and pass them once."
        )
    if inner.shuffle is False:
        raise ConfigError(
            f"weighted draws {inner.name} in random order, and shuffle=False forbids that. Drop shuffle=False."
        )
    numbers = _weights("weighted: weights", weights)
    number = None if samples is None else check_count("weighted: samples", samples, least=1, sane="draws of a pass")
    lister = inner.list
    assert lister is not None

    def listed(tell: Tell = silent) -> Index:
        index = lister(tell)
        if len(numbers) != len(index):
            raise ConfigError(
                f"weighted: weights holds {len(numbers)} numbers, and {inner.name} has {len(index)} samples. Give one weight per "
                "sample."
            )
        return replace(index, draws=Draws(weights=numbers, number=number or len(index)))

    return replace(inner, name=f"weighted({inner.name})", list=listed, drawn=True)


def mix(
    pipelines: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, samples: int | None = None
) -> Pipeline:
    """Several data sets in one. Each keeps its own transform; their samples must end with the same columns.

    Without weights a pass visits every sample of every set once, shuffled together. With weights it draws samples with
    replacement, as :func:`weighted` does, and each set has that share of the draws. The ids of a set follow those of the set
    before it.

    Args:
        pipelines: results of :func:`offload.image_folder` and its siblings, Datasets of Ray, map-style torch data sets or lists, by name.
        weights: the share of each set, such as ``{"a": 1, "b": 3}``.
        samples: the draws of a pass with weights. None: as many as there are samples.

    Raises:
        ConfigError: for unknown names, invalid weights, or sets that differ in ``shuffle`` or in what runs on the device; and, when the run
            starts, for sets with different class names, or a ``ray.data.Dataset`` whose number of rows only running it tells.
    """
    by_name = check_mapping("mix: pipelines", pipelines, sane="data sets by name, such as {'a': ..., 'b': ...}")
    if not by_name:
        raise ConfigError(
            "mix: pipelines is empty. Name at least one data set, such as {'a': offload.image_folder(...)}."
        )
    for name in by_name:
        check_text("the names in mix", name, sane='such as "a"')
    parts = {name: indexed(f"mix: {name!r}", value) for name, value in by_name.items()}
    shares = None if weights is None else _shares(parts, weights)
    if shares is None:
        if samples is not None:
            raise ConfigError(
                f"mix: samples={samples!r} counts draws, and without weights there are none. Pass weights too."
            )
        for name, part in parts.items():
            if part.drawn:
                raise ConfigError(
                    f"mix without weights visits every sample once, and {name!r} draws its samples by weight. Pass weights={{...}}."
                )
    number = None if samples is None else check_count("mix: samples", samples, least=1, sane="draws of a pass")
    first_name, first = next(iter(parts.items()))
    for name, part in parts.items():
        if part.shuffle != first.shuffle:
            raise ConfigError(
                f"mix: {first_name!r} has shuffle={first.shuffle} and {name!r} has shuffle={part.shuffle}. Pass the same to both."
            )
        if not _same(part.on_device, first.on_device):
            raise ConfigError(
                f"mix: {first_name!r} and {name!r} differ in what runs on the device: {_steps(first)} and {_steps(part)}. A batch "
                "holds samples of both: pass the same on_device, and transforms with the same last steps."
            )
        if not _same(part.collate_fn, first.collate_fn) or (part.kind == "generator") != (first.kind == "generator"):
            raise ConfigError(
                f"mix: {first_name!r} and {name!r} differ in collate_fn, or only one's transform is a generator. A batch holds samples of "
                "both: pass the same collate_fn, and generators to both or none."
            )
    if shares is not None and first.shuffle is False:
        raise ConfigError("mix with weights draws in random order, and shuffle=False forbids that. Drop shuffle=False.")
    title = f"mix({', '.join(parts)})"

    def listed(tell: Tell = silent) -> Index:
        indexes = {name: part.list(tell) for name, part in parts.items() if part.list is not None}
        _check_classes(parts, indexes)
        index = mixed_index(title, indexes)
        if shares is None:
            return index
        by_sample = np.concatenate([_sample_weights(shares[name], index) for name, index in indexes.items()])
        return replace(
            index, draws=Draws(weights=by_sample, number=number or sum(len(index) for index in indexes.values()))
        )

    return Mixed(
        name=title,
        list=listed,
        collate_fn=first.collate_fn,
        on_device=first.on_device,
        on_error="skip" if any(part.on_error == "skip" for part in parts.values()) else "raise",
        shuffle=first.shuffle,
        notes=tuple(f"{name}: {note}" for name, part in parts.items() for note in part.notes),
        aside=all(part.aside for part in parts.values()),
        caches=tuple(cache for part in parts.values() for cache in part.caches),
        kept=tuple(entry for part in parts.values() for entry in part.kept),
        drawn=shares is not None,
        parts=parts,
    )


@dataclass(frozen=True, kw_only=True)
class Mixed(Pipeline):
    """Several data sets in one, the result of :func:`mix`."""

    def recipe(self, index: Index | None, *, seed: int, dataset: str = "") -> IndexRecipe:
        """The recipe of all parts, each with its own transform."""
        assert isinstance(index, MixedIndex)
        whole = super().recipe(index, seed=seed, dataset=dataset)
        parts = [
            part.recipe(own, seed=seed, dataset=dataset)
            for part, own in zip(self.parts.values(), index.parts, strict=True)
        ]
        return seeded_alike(
            dataclasses.replace(
                whole, parts=tuple(parts), part_names=tuple(self.parts), whole=any(part.whole for part in parts)
            ),
            whole.seeded_by,
        )


def seeded_alike(recipe: _R, seeded_by: str) -> _R:
    """The recipe and its parts, all with random numbers seeded by this column."""
    parts = tuple(seeded_alike(part, seeded_by) for part in recipe.parts)
    return dataclasses.replace(recipe, seeded_by=seeded_by, parts=parts)


def indexed(title: str, value: Any) -> Pipeline:
    """The pipeline of an argument, with an index. ``title``: the argument's name in messages.

    Raises ConfigError for anything else.
    """
    if isinstance(value, Pipeline):
        pipeline = value
    else:
        try:
            pipeline = as_pipeline(title, value)
        except ConfigError:
            raise ConfigError(
                f"{title} takes the result of {ANY_SOURCE}, a ray.data.Dataset, a map-style torch data set, or a list of samples, "
                f"found {shown(value)}."
            ) from None
    dataset = pipeline.dataset
    if dataset is None:
        return pipeline
    if pipeline.id_column is not None:
        raise ConfigError(
            f"{title} numbers the samples itself, found a ray.data.Dataset with id_column={pipeline.id_column!r}. Drop id_column."
        )
    shuffle = pipeline.shuffle is not False
    changed = pipeline.kind != "none"
    return replace(
        pipeline,
        list=lambda tell=silent: list_dataset_rows(title, dataset, shuffle=shuffle, changed=changed),
        dataset=None,
    )


def _weights(name: str, values: Any) -> NDArray[np.float64]:
    """The user's weights as an array. Raises ConfigError for anything but finite numbers of 0 or more, some above 0."""
    if hasattr(values, "detach"):
        values = values.detach().to("cpu").double().numpy()
    try:
        numbers = np.asarray(values)
    except Exception:  # ragged lists
        numbers = np.empty((), dtype=object)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iufb" or not len(numbers):
        raise ConfigError(f"{name} must be a list of numbers, one per sample, found {shown(values)}.")
    weights: NDArray[np.float64] = numbers.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise ConfigError(f"{name}[{wrong[0]}] must be a finite number of 0 or more, found {numbers[wrong[0]]}.")
    if not weights.any():
        raise ConfigError(f"{name} holds only zeros, so nothing can be drawn. Give some sample a weight above 0.")
    return weights


def _shares(parts: Mapping[str, Pipeline], weights: Any) -> dict[str, float]:
    by_name = check_mapping("mix: weights", weights, sane="a number for each data set, such as {'a': 1, 'b': 3}")
    for name in by_name:
        if name not in parts:
            raise ConfigError(f"mix: weights names {name!r}, and the data sets are {', '.join(parts)}.")
    for name in parts:
        if name not in by_name:
            raise ConfigError(f"mix: weights lacks {name!r}. Give every data set a weight; 0 leaves it out.")
    shares = {name: check_number(f"mix: weights[{name!r}]", value, sane="such as 1") for name, value in by_name.items()}
    if not any(shares.values()):
        raise ConfigError(
            "mix: weights holds only zeros, so nothing can be drawn. Give some data set a weight above 0."
        )
    return shares


def _sample_weights(share: float, index: Index) -> NDArray[np.float64]:
    """The weight of each sample of a part. They sum to ``share``, in proportion to the part's own weights."""
    # Dividing by the largest first keeps the sum finite.
    weights = np.ones(len(index.rows)) if index.draws is None else index.draws.weights / index.draws.weights.max()
    return np.asarray(weights * (share / weights.sum()))


def _check_classes(parts: Mapping[str, Pipeline], indexes: Mapping[str, Index]) -> None:
    """Raise ConfigError if the labels of two parts mean different classes, and no transform could change that."""
    known = [name for name, part in parts.items() if indexes[name].classes and part.kind in ("none", "image")]
    for name in known[1:]:
        if indexes[name].classes != indexes[known[0]].classes:
            raise ConfigError(
                f"mix: {known[0]!r} has the classes {_few(indexes[known[0]].classes)}, and {name!r} has {_few(indexes[name].classes)}: "
                "the same label would mean two classes. Use the same class folders, or set batch['label'] in a transform."
            )


def _few(classes: tuple[str, ...]) -> str:
    return ", ".join(classes[:3]) + (", …" if len(classes) > 3 else "")


def _same(one: Any, other: Any) -> bool:
    """Return whether two functions are one, or equal as pickles: users may construct a step once per data set."""
    if one is other:
        return True
    try:
        return bool(cloudpickle.dumps(one) == cloudpickle.dumps(other))
    except Exception:
        return False


def _steps(pipeline: Pipeline) -> str:
    return ", ".join(getattr(step, "__qualname__", None) or repr(step) for step in pipeline.on_device) or "nothing"
