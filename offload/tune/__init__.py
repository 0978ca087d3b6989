"""Ray Tune with trials that preprocess on every CPU of the cluster: each trial is a run, and reserves nothing itself.

::

    def build(config):
        return offload.Trainer(train, datasets={...}, batch_size=config["batch"], train_loop_config=config)

    tuner = ray.tune.Tuner(
        offload.tune.trainable(build),
        param_space={"lr": ray.tune.loguniform(1e-4, 1e-1), "batch": ray.tune.choice([32, 64])},
        tune_config=ray.tune.TuneConfig(metric="accuracy", mode="max", num_samples=8),
    )

Where it stops: Ray's own ``Tuner`` chooses the configurations, stops and copies trials, and keeps their results.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError
from offload.model.checks import check_callable, check_choice, check_number, check_text
from offload.pipeline.cache.spec import parse_cache
from offload.pipeline.preprocessing.shared_samples import Sharing

if TYPE_CHECKING:
    from ray.tune import Callback, Trainable

__all__ = ["favor_best", "trainable"]


def trainable(build: Callable[..., Any], *, shared: str | None = None) -> type[Trainable]:
    """The trainable for Ray's ``Tuner`` whose trials are trainings of offload.

    A trial trains as a run of the cluster. It is a job of the cluster's arbiter if there is one; otherwise it takes what is free, and waits
    while there is no room for it. Each ``ctx.report`` of its training function is a result, and the checkpoint of the same step, if the run
    writes one, belongs to it. A run writes one at the end of each epoch (:class:`offload.Checkpoints`).

    Population-based training lets a trial go on from the checkpoint of another configuration. Its optimizers then keep the options of its
    own one, and a schedule of learning rates goes on in proportion.

    Args:
        build: called with the trial's configuration, a dict, in the trial's process. It returns the :class:`offload.Trainer` of this
            configuration. Keywords of ``ray.tune.with_parameters`` follow as keywords.
        shared: where each node keeps finished samples for the other trials of this search, and the most bytes there:
            ``"ssd:/mnt/nvme/cache:200GB"``. Trials with equal data sets, transforms and seeds then make a sample of an epoch once on
            each node. None: each trial makes its own.

    Raises:
        ConfigError: if ``build`` is no function, ``shared`` describes no cache, or Ray Tune cannot be imported.
    """
    check_callable("build", build, sane="a function of a configuration that returns an offload.Trainer")
    try:
        from offload.tune.trial import Trial
    except ImportError as error:
        raise _missing(error) from None
    spec = parse_cache("shared", shared)
    # A new name: files may have changed since an earlier search.
    sharing = None if spec is None else Sharing(spec=spec, search=uuid.uuid4().hex)
    name = getattr(build, "__name__", None)
    named = name if isinstance(name, str) and name.isidentifier() else type(build).__name__
    return type(named, (Trial,), {"build": staticmethod(build), "sharing": sharing, "__doc__": build.__doc__})


def favor_best(metric: str, *, mode: str, weight: float = 4.0) -> Callback:
    """A callback for Ray's ``RunConfig`` that gives workers and cores of the cluster to the best trial.

    After each result, the trial with the best newest value counts ``weight`` times as much to the arbiter as each other one. The arbiter
    moves workers if that is worth the restart. A trial can only have more of them if its Trainer allows a range, such as
    ``workers=(1, 4)``.

    Args:
        metric: what the search compares.
        mode: ``"max"`` or ``"min"``.
        weight: what the best trial counts.

    Raises:
        ConfigError: for invalid values, or if Ray Tune cannot be imported. A search without an arbiter raises it at its start.
    """
    check_text("metric", metric, sane="the name of a metric that trials report")
    check_choice("mode", mode, ("max", "min"))
    share = check_number("weight", weight, above=0.0, sane="a share, such as 4")
    try:
        from offload.tune.favor import FavorBest
    except ImportError as error:
        raise _missing(error) from None
    return FavorBest(metric, largest=mode == "max", weight=share)


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(
        f"offload.tune needs Ray Tune, which cannot be imported here ({error}): pip install 'offload[tune]'."
    )
