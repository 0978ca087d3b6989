"""The public names, pinned: a change here is a change for users and belongs into the changelog."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import offload
from offload.pipeline.describe import sources

PUBLIC = [
    "Adaptation",
    "BatchSize",
    "Callback",
    "Checkpoints",
    "Cluster",
    "ConfigError",
    "Context",
    "DataLoader",
    "LoaderStats",
    "Normalize",
    "OffloadError",
    "Pipeline",
    "Prediction",
    "Predictor",
    "Result",
    "RunError",
    "Trainer",
    "__version__",
    "arbiter",
    "cached",
    "collate",
    "from_ray",
    "from_torch",
    "image_folder",
    "mix",
    "notebook",
    "parquet",
    "predict",
    "runs",
    "transforms",
    "tune",
    "webdataset",
    "weighted",
]


def test_the_public_names() -> None:
    assert offload.__all__ == PUBLIC
    assert dir(offload) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_resolves_and_says_what_it_is(name: str) -> None:
    member = getattr(offload, name)
    if name == "__version__":
        assert re.fullmatch(r"\d+\.\d+\.\d+", member)
        return
    assert member.__name__.removeprefix("offload.") == name
    assert member.__doc__
    assert not member.__doc__.startswith(f"{name}(")  # a dataclass without words of its own


def test_messages_name_every_source_that_users_can_call() -> None:
    """A Ray Dataset is the user's own, so messages speak of it apart."""
    made = {
        name
        for name, member in vars(sources).items()
        if inspect.isfunction(member) and member.__module__ == sources.__name__ and name in offload.__all__
    }
    assert made == {*sources.SOURCES, "from_ray"}
    with pytest.raises(offload.ConfigError) as refused:
        sources.as_pipeline("train", 3)
    assert all(name in str(refused.value) for name in sources.SOURCES)


def test_other_names_are_refused_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'offload' has no attribute 'Trianer'"):
        offload.Trianer  # noqa: B018
    assert not hasattr(offload, "torch")


def test_errors_are_one_family() -> None:
    assert issubclass(offload.ConfigError, offload.OffloadError)
    assert issubclass(offload.RunError, offload.OffloadError)
    assert (offload.ConfigError.exit_code, offload.RunError.exit_code) == (2, 1)


def loaded_by(code: str) -> set[str]:
    report = (
        "; import sys; print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'ray', 'torchvision', 'timm'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True, timeout=800
    )
    return set(done.stdout.split())


def test_import_loads_neither_torch_nor_ray() -> None:
    assert loaded_by("import offload") == set()
    assert loaded_by("from offload import ConfigError, Normalize") == set()
