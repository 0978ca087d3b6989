"""The parts of serving without Serve: what a request becomes, and which outputs it gets."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.serving.batches import ServedModel
from offload.serving.ingress import Ingress
from offload.serving.preprocessing import RequestPreprocessing
from offload.serving.requests import MOST_BYTES, Refusal, Sample, sample_of
from tests.programs import predicted


def scaled(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform of rows."""
    return {"features": np.stack([batch["age"] / 10, batch["income"]], axis=1).astype(np.float32)}


def predictor(rows: Path) -> offload.Predictor:
    data = offload.parquet(rows, scaled)
    return offload.Predictor(lambda: torch.nn.Linear(2, 3), data, outputs=lambda model, batch: model(batch["features"]))


def test_rows_get_the_outputs_of_a_prediction(tmp_path: Path) -> None:
    rows = [{"age": number, "income": number / 7} for number in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "weights.pt")
    of_rows = predictor(tmp_path / "rows.parquet")
    result = offload.predict(of_rows, tmp_path / "weights.pt", tmp_path / "out.parquet", batch_size=8, quiet=True)
    preprocessing = RequestPreprocessing(of_rows.data)
    model = ServedModel(of_rows, str(tmp_path / "weights.pt"))
    samples = [sample_of("application/json", json.dumps(row).encode()) for row in rows]
    columns = [preprocessing(sample) for sample in samples if isinstance(sample, Sample)]
    refused = preprocessing(Sample(row={"age": 1}))
    assert isinstance(refused, Refusal)
    assert (refused.status, "KeyError: 'income'" in refused.text) == (422, True)
    # Neither a refused sample nor one that fits no batch changes the others' outputs.
    assert not isinstance(columns[0], Refusal)
    odd = {**columns[0], "features": np.zeros((1, 3), np.float32)}
    answers = model.answers([columns[0], refused, *columns[1:]])
    assert answers.pop(1) is refused
    assert answers == [{"output": row["output"]} for row in pq.read_table(result.output).to_pylist()]
    alone, failed = model.answers([columns[0], odd])
    assert alone == model.answers(columns[:1])[0]
    assert isinstance(failed, Refusal)
    assert failed.status == 500


@given(
    kind=st.sampled_from(["", "image/png", "application/json", "text/html", "a;b", ";"]) | st.text(), body=st.binary()
)
def test_every_body_is_a_sample_or_refused_with_a_sentence(kind: str, body: bytes) -> None:
    sample = sample_of(kind, body)
    if isinstance(sample, Refusal):
        assert 400 <= sample.status < 500
        assert sample.text.endswith(".")
    else:
        assert (sample.image is None) != (sample.row is None)


@pytest.mark.parametrize(
    "name", ["__samples__", "__contents__", "__lengths__", "__position__", "__error__", "sample_id"]
)
def test_a_client_cannot_name_a_column_as_offload_does(name: str) -> None:
    refused = sample_of("application/json", json.dumps({"age": 1, name: []}).encode())
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.text) == (
        400,
        f"A column is named {name}, which offload adds itself. Give it another name.",
    )


def test_lists_that_differ_in_length_reach_the_transform(tmp_path: Path) -> None:
    pq.write_table(pa.table({"polygon": [[[1, 2, 3], [4, 5]]]}), tmp_path / "rows.parquet")
    data = offload.parquet(tmp_path / "rows.parquet", corners)
    columns = RequestPreprocessing(data)(Sample(row={"polygon": [[1, 2, 3], [4, 5]]}))
    assert not isinstance(columns, Refusal), columns
    assert np.asarray(columns["corners"]).tolist() == [5]


def corners(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform of rows: the numbers in nested lists."""
    return {"corners": np.array([sum(len(part) for part in polygon) for polygon in batch["polygon"]])}


def refuses_negative(batch: dict[str, Any]) -> dict[str, Any]:
    """A step on the device."""
    if (batch["features"] < 0).any():
        raise ValueError("a negative income")
    return batch


def test_a_sample_that_a_step_on_the_device_refuses_fails_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"age": [1], "income": [1.0]}), tmp_path / "rows.parquet")
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "weights.pt")
    data = offload.parquet(tmp_path / "rows.parquet", scaled, on_device=refuses_negative)
    of_rows = offload.Predictor(
        lambda: torch.nn.Linear(2, 3), data, outputs=lambda model, batch: model(batch["features"])
    )
    preprocessing, model = RequestPreprocessing(data), ServedModel(of_rows, str(tmp_path / "weights.pt"))
    good, bad = (preprocessing(Sample(row={"age": 1, "income": income})) for income in (1.0, -1.0))
    answered, refused = model.answers([good, bad])
    assert answered == model.answers([good])[0]
    assert isinstance(refused, Refusal)
    assert refused.status == 500
    assert "ValueError: a negative income" in refused.text


def boxes(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """As many boxes for each sample as it is old."""
    ages = [round(10 * float(row[0])) for row in batch["features"]]
    return {
        "boxes": [torch.ones(age, 2) for age in ages],
        "scores": [np.full(age, 0.5) for age in ages],
        "text": ["a" for _ in ages],
    }


def test_outputs_of_different_sizes_are_numbers_in_json(tmp_path: Path) -> None:
    pq.write_table(pa.table({"age": [1], "income": [1.0]}), tmp_path / "rows.parquet")
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "weights.pt")
    data = offload.parquet(tmp_path / "rows.parquet", scaled)
    preprocessing = RequestPreprocessing(data)
    samples = [preprocessing(Sample(row={"age": age, "income": 1.0})) for age in (1, 2)]
    model = ServedModel(
        offload.Predictor(lambda: torch.nn.Linear(2, 3), data, outputs=boxes), str(tmp_path / "weights.pt")
    )
    assert model.answers(samples) == [
        {"boxes": [[1.0, 1.0]] * age, "scores": [0.5] * age, "text": "a"} for age in (1, 2)
    ]
    complex_ = offload.Predictor(
        lambda: torch.nn.Linear(2, 3), data, outputs=lambda model, batch: torch.view_as_complex(batch["features"])
    )
    (refused,) = ServedModel(complex_, str(tmp_path / "weights.pt")).answers(samples[:1])
    assert isinstance(refused, Refusal)
    assert "an output is of type complex, which JSON lacks" in refused.text


def test_a_body_that_is_too_large_is_refused() -> None:
    refused = sample_of("image/png", bytes(MOST_BYTES + 1))
    assert isinstance(refused, Refusal)
    assert refused.status == 413


def test_what_cannot_be_served_is_refused(jpeg_folder: Path) -> None:
    folder = offload.image_folder(jpeg_folder)
    with pytest.raises(offload.ConfigError, match="joins several data sets"):
        RequestPreprocessing(offload.mix({"a": folder, "b": folder}))


def test_serve_writes_a_config_with_the_parts_apart(
    tmp_path: Path, jpeg_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve import scripts

    torch.save(predicted.build_model().state_dict(), tmp_path / "weights.pt")
    (tmp_path / "served_app.py").write_text(
        f"""
import offload, offload.serving
from tests.programs import predicted

predictor = offload.Predictor(predicted.build_model, predicted.data({str(jpeg_folder)!r}))
app = offload.serving.app(predictor, {str(tmp_path / "weights.pt")!r}, preprocessing_replicas=(2, 16), model_replicas=3)
"""
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = tmp_path / "serve.yaml"
    build = CliRunner().invoke(scripts.build, ["served_app:app", "-d", str(tmp_path), "-o", str(config)])
    assert build.exit_code == 0, build.output
    (application,) = yaml.safe_load(config.read_text())["applications"]
    deployments = {deployment["name"]: deployment for deployment in application["deployments"]}
    assert deployments["model"]["num_replicas"] == 3
    scale = deployments["preprocessing"]["autoscaling_config"]
    assert (scale["min_replicas"], scale["max_replicas"]) == (2, 16)
    assert deployments["ingress"]["ray_actor_options"]["num_cpus"] == 0


class Dying:
    """A deployment whose replicas die with each request. It counts them."""

    def __init__(self) -> None:
        self.requests = 0

    async def remote(self, _: Any) -> Any:
        self.requests += 1
        raise ray.exceptions.ActorDiedError


def test_a_request_that_kills_its_replicas_gets_no_further_ones() -> None:
    dying = Dying()
    # No replica of Serve: its end would be a coroutine that nobody awaits.
    ingress: Any = SimpleNamespace(_preprocessing=SimpleNamespace(remote=lambda sample: sample), _model=dying)
    refused = asyncio.run(Ingress._answer(ingress, Sample(row={"x": 1})))
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.text) == (500, "3 replicas have died with this request, so no other one gets it.")
    assert dying.requests == 3
