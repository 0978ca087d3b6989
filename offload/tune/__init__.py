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
from offload.model.checks import check_callable
from offload.pipeline.cache.spec import parse_cache
from offload.pipeline.preprocessing.shared_samples import Sharing

if TYPE_CHECKING:
    from ray.tune import Trainable

__all__ = ["trainable"]


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
        raise ConfigError(
            f"offload.tune needs Ray Tune, which cannot be imported here ({error}): pip install 'offload[tune]'."
        ) from None
    spec = parse_cache("shared", shared)
    # A new name: files may have changed since an earlier search.
    sharing = None if spec is None else Sharing(spec=spec, search=uuid.uuid4().hex)
    name = getattr(build, "__name__", None)
    named = name if isinstance(name, str) and name.isidentifier() else type(build).__name__
    return type(named, (Trial,), {"build": staticmethod(build), "sharing": sharing, "__doc__": build.__doc__})
