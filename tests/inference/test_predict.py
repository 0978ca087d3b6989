"""Batch inference: every sample once, in order, with the outputs of validation, however often it was interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

import offload
from offload.cli.main import main
from offload.errors import ConfigError, RunError
from offload.inference import parts
from offload.inference.weights import read_weights
from tests.helpers import PROGRAMS, ROOT, eventually
from tests.programs import predicted

SCRIPT = PROGRAMS / "predicted.py"
BATCH = 8


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the state of the model."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(predicted.build_model().state_dict(), path)
    return path


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """The exit code and the message of ``offload predict`` with these arguments."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def predict(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["predict", *map(str, arguments)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stderr.strip().splitlines()[-1]

    return predict


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    """A file with the state of a :func:`layer`."""
    path = tmp_path / "linear.pt"
    torch.save(layer().state_dict(), path)
    return path


def layer() -> torch.nn.Module:
    return torch.nn.Linear(2, 3)


def rows(path: Path) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return table


@pytest.mark.slow
def test_outputs_equal_those_of_validation_bit_for_bit(jpeg_folder: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen.pt"

    def train(ctx: offload.Context) -> None:
        model = predicted.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ctx.prepare(model, optimizer)
        for _epoch in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"]))
                ctx.step()
        model.eval()
        with torch.no_grad():
            batches = [(batch["sample_id"].clone(), model(batch["image"])) for batch in ctx.batches("val")]
        torch.save(batches, seen)

    trainer = offload.Trainer(
        train,
        datasets={"train": predicted.data(jpeg_folder), "val": predicted.data(jpeg_folder)},
        batch_size=BATCH,
        workers=1,
    )
    trainer.fit(run_dir=tmp_path / "run", quiet=True)
    validated = {
        int(number): output.tolist() for ids, of in torch.load(seen) for number, output in zip(ids, of, strict=True)
    }
    predictor = offload.Predictor(predicted.build_model, trainer.datasets["val"], keep=("label",))
    prediction = offload.predict(predictor, tmp_path / "run", tmp_path / "out.parquet", batch_size=BATCH, argmax=True)
    results = rows(prediction.output)
    assert {row["sample_id"]: row["output"] for row in results} == validated
    files = sorted(jpeg_folder.rglob("*.jpg"))
    assert [row["key"] for row in results] == list(map(str, files))
    assert [row["label"] for row in results] == [int(file.parent.name[-1]) for file in files]
    assert all(row["prediction"] == row["output"].index(max(row["output"])) for row in results)
    assert not (tmp_path / "out.parquet.parts").exists()


@pytest.mark.slow
def test_a_killed_prediction_goes_on_where_it_ended(jpeg_folder: Path, weights: Path, tmp_path: Path) -> None:
    """What is done is done once: the second run has the parts of the first, and the file is that of an uninterrupted prediction."""

    def command(output: Path, *arguments: object) -> list[str]:
        words = [
            "predict",
            weights,
            SCRIPT,
            "-o",
            output,
            "--batch-size",
            BATCH,
            "--json",
            "--",
            jpeg_folder,
            *arguments,
        ]
        return [sys.executable, "-m", "offload", *map(str, words)]

    output, whole = tmp_path / "out.parquet", tmp_path / "whole.parquet"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    killed = subprocess.Popen(
        command(output, tmp_path / "never"), env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        eventually(lambda: any((tmp_path / "out.parquet.parts").glob("part-*.arrow")))
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert not output.exists()
    documents = [
        json.loads(subprocess.run(command(path), env=environment, capture_output=True, check=True, timeout=800).stdout)
        for path in (output, whole)
    ]
    assert 0 < documents[0]["resumed_samples"] < 103
    assert documents[1]["resumed_samples"] == 0
    assert pq.read_table(output).equals(pq.read_table(whole))
    assert [row["sample_id"] for row in rows(output)] == list(range(103))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "whole.parquet"]


@pytest.mark.ray
@pytest.mark.slow
def test_others_do_what_a_lost_worker_had_claimed(
    ray_cluster: None, jpeg_folder: Path, weights: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "lost"

    def outputs(model: torch.nn.Module, batch: Any) -> Any:
        if int(batch["sample_id"][0]) >= 48 and not marker.exists():
            marker.touch()
            os._exit(1)
        return {"logits": model(batch["image"]), "none": None}

    predictor = offload.Predictor(predicted.build_model, predicted.data(jpeg_folder), outputs=outputs)
    prediction = offload.predict(predictor, weights, tmp_path / "out.parquet", batch_size=BATCH, quiet=True)
    assert marker.exists()
    model = predicted.build_model()
    model.load_state_dict(torch.load(weights))
    table = pq.read_table(prediction.output)
    assert table.column_names == ["sample_id", "key", "logits"]
    assert table.column("sample_id").to_pylist() == list(range(103))
    assert table.column("logits").type == pa.list_(pa.field("element", pa.float32()), 3)


@pytest.mark.slow
def test_later_workers_get_the_cpus_and_gpus_of_lost_ones(jpeg_folder: Path, tmp_path: Path) -> None:
    """Also where another program has taken a GPU at the last moment: those who have one do all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.lost_model_workers", jpeg_folder, tmp_path],
        capture_output=True, text=True, timeout=800, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"two nodes": True, "two GPUs": True, "a GPU that another program took": True}


@pytest.mark.ray
@pytest.mark.slow
def test_a_failure_on_a_cluster_is_told_in_one_sentence(
    ray_cluster: None, jpeg_folder: Path, weights: Path, tmp_path: Path
) -> None:
    def outputs(model: torch.nn.Module, batch: Any) -> Any:
        raise LookupError("no such layer")

    predictor = offload.Predictor(predicted.build_model, predicted.data(jpeg_folder), outputs=outputs)
    with pytest.raises(RunError) as caught:
        offload.predict(predictor, weights, tmp_path / "out.parquet", batch_size=BATCH, quiet=True)
    assert str(caught.value).startswith("outputs")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_with_weights_on_remote_storage_is_read_without_its_neighbours(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    really_open = MemoryFileSystem._open

    def noted(self: MemoryFileSystem, path: str, *more: Any, **options: Any) -> Any:
        opened.append(path)
        return really_open(self, path, *more, **options)

    folder = f"/{tmp_path.name}"
    memory = MemoryFileSystem()
    memory.pipe(f"{folder}/weights.pt", weights.read_bytes())
    memory.pipe(f"{folder}/images/one.jpg", b"much else")
    monkeypatch.setattr(MemoryFileSystem, "_open", noted)
    found = read_weights(f"memory:/{folder}/weights.pt")
    assert found.state.keys() == predicted.build_model().state_dict().keys()
    assert opened == [f"{folder}/weights.pt"]


def test_skipped_samples_are_counted_and_named(jpeg_folder: Path, weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    for file in sorted(jpeg_folder.rglob("*.jpg"))[:5]:
        (folder / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file.parent.name / file.name)
    broken = sorted(folder.rglob("*.jpg"))[2]
    broken.write_bytes(b"no image")
    predictor = offload.Predictor(predicted.build_model, predicted.data(folder, on_error="skip"))
    prediction = offload.predict(predictor, weights, tmp_path / "out.parquet", quiet=True)
    assert [row["sample_id"] for row in rows(prediction.output)] == [0, 1, 3, 4]
    skipped = prediction.document["skipped_samples"]
    assert [(one["sample_id"], str(broken) in one["reason"]) for one in skipped] == [(2, True)]
    assert "1 samples were skipped" in prediction.summary()


def test_bad_input_is_refused_with_the_reason(
    jpeg_folder: Path, weights: Path, tmp_path: Path, refused: Callable[..., tuple[int, str]]
) -> None:
    output = tmp_path / "out.parquet"
    script = tmp_path / "script.py"

    def says(*arguments: object) -> str:
        code, message = refused(*arguments)
        assert code == 2
        return message

    missing = tmp_path / "no run"
    assert f"there is no checkpoint {missing}" in says(missing, SCRIPT, "-o", output, "--", jpeg_folder)
    assert f"{tmp_path} holds no complete checkpoint" in says(tmp_path, SCRIPT, "-o", output, "--", jpeg_folder)
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(weights.read_bytes()[:100])
    assert f"the checkpoint {damaged} is damaged, or none" in says(damaged, SCRIPT, "-o", output, "--", jpeg_folder)
    other = tmp_path / "other.pt"
    torch.save(torch.nn.Linear(2, 3).state_dict(), other)
    message = says(other, SCRIPT, "-o", output, "--", jpeg_folder)
    assert f"the checkpoint {other} is not of the model Sequential: Missing key(s)" in message
    assert "no images under" in says(weights, SCRIPT, "-o", output, "--", tmp_path)
    assert "must be a Parquet file" in says(weights, SCRIPT, "-o", tmp_path / "out.csv", "--", jpeg_folder)
    assert "is not a writable folder" in says(weights, SCRIPT, "-o", tmp_path / "no" / "out.parquet", "--", jpeg_folder)
    nobody = says(weights, SCRIPT, "-o", "~no-such-user/out.parquet", "--", jpeg_folder)
    assert "--output ~no-such-user/out.parquet cannot be found: nobody knows the home folder ~no-such-user" in nobody
    long = tmp_path / f"{'x' * 300}.parquet"
    assert f"{long} cannot be written: File name too long" in says(weights, SCRIPT, "-o", long, "--", jpeg_folder)
    predictor = offload.Predictor(predicted.build_model, predicted.data(jpeg_folder))
    with pytest.raises(ConfigError, match=r"checkpoint must be a path .*, found nothing"):
        offload.predict(predictor, None, output)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"output must be a path .*, found 5"):
        offload.predict(predictor, weights, 5)  # type: ignore[arg-type]
    assert "is not a file" in says(weights, tmp_path / "no.py", "-o", output)
    assert "--batch-size must be" in says(weights, SCRIPT, "-o", output, "--batch-size", 0, "--", jpeg_folder)
    for code, reason in {
        "x = 1": f"{script} defines no predictor(). Add one that returns an offload.Predictor",
        "def predictor():\n    return 5": "it must return an offload.Predictor",
        "import offload, torch\ndef predictor():\n    return offload.Predictor(torch.nn.Linear(1, 1), [1])": "model must be a function",
        "import offload\ndef predictor():\n    return offload.Predictor(dict, [1])": "must return the model, a torch.nn.Module",
        "import offload\ndef predictor():\n    return offload.Predictor(dict, [])": "",
    }.items():
        script.write_text(code)
        assert reason in says(weights, script, "-o", output)
    output.write_bytes(b"")
    assert f"{output} exists. Pass --overwrite to replace it" in says(weights, SCRIPT, "-o", output)


def test_a_failed_prediction_names_the_sample_and_goes_on_after_the_repair(
    jpeg_folder: Path, weights: Path, tmp_path: Path, refused: Callable[..., tuple[int, str]]
) -> None:
    folder, output = tmp_path / "images", tmp_path / "out.parquet"
    shutil.copytree(jpeg_folder, folder)
    broken = sorted(folder.rglob("*.jpg"))[90]
    content = broken.read_bytes()
    broken.write_bytes(b"x" * len(content))
    command = (weights, SCRIPT, "-o", output, "--batch-size", BATCH)
    code, message = refused(*command, "--", folder)
    assert (code, str(broken) in message, output.exists()) == (1, True, False)
    broken.write_bytes(content)
    code, message = refused(*command, "--argmax", "--", folder)
    assert code == 2
    assert "holds an interrupted prediction of other arguments: argmax was False, and is True" in message
    code, message = refused(*command, "--json", "--", folder)
    assert code == 0
    assert [row["sample_id"] for row in rows(output)] == list(range(103))


def score(model: torch.nn.Module, batch: Any) -> Any:
    return model(batch["x"])


def test_kept_columns_may_miss_values(linear: Path, tmp_path: Path) -> None:
    """Whole batches have no value here, others have some."""
    captions = [None if number < 16 or number % 3 else f"caption {number}" for number in range(40)]
    samples = [{"x": torch.zeros(2), "cap": caption} for caption in captions]
    predictor = offload.Predictor(layer, samples, outputs=score, keep=("cap",))
    prediction = offload.predict(predictor, linear, tmp_path / "out.parquet", batch_size=BATCH, quiet=True)
    assert [row["cap"] for row in rows(prediction.output)] == captions


@dataclass
class Refuses:
    """A prediction of a batch of two samples whose outputs or kept columns are refused. ``reason``: what the error says."""

    reason: str
    outputs: Callable[[torch.nn.Module, Any], Any] = score
    keep: tuple[str, ...] = ()
    argmax: bool = False
    count: int = 2


@pytest.mark.parametrize(
    "case",
    [
        Refuses(
            "the output 'output' is a tuple of several values, for 2 samples. Return a dict",
            lambda m, b: (score(m, b), 0),
        ),
        Refuses("the output 'output' is a tuple", lambda m, b: (score(m, b), [score(m, b)])),
        Refuses(
            "the output 'aux' is a dict, for 2 samples", lambda m, b: {"aux": {"u": score(m, b), "v": score(m, b)}}
        ),
        Refuses("the output 'output' is a str without rows", lambda m, b: "ab"),
        Refuses("keep names the column 'target', which is a dict, for 2 samples. Keep columns", keep=("target",)),
        Refuses("keep names the column 'target', which is a dict, for 3 samples", keep=("target",), count=3),
        Refuses("keep names the column 'mean', which is a Tensor without rows", keep=("mean",)),
        Refuses("keep names the column 'three', which has 3 rows, for 2 samples", keep=("three",)),
        Refuses(
            "the name of an output is 'prediction'", lambda m, b: {"prediction": b["x"], "output": b["x"]}, argmax=True
        ),
        Refuses("'x' is both an output and a column of keep", lambda m, b: {"x": score(m, b)}, keep=("x",)),
        Refuses("the name of an output is 'key'", lambda m, b: {"key": score(m, b)}),
        Refuses("keep names the column 'key', which the results use themselves", keep=("key",)),
        Refuses("keep names the column 'prediction', which", keep=("prediction",), argmax=True),
        Refuses("argmax needs an output of one row of scores", lambda m, b: score(m, b) > 0, argmax=True),
        Refuses("that one has the shape (2, 0)", lambda m, b: score(m, b)[:, :0], argmax=True),
    ],
    ids=lambda case: case.reason,
)
def test_what_is_not_one_row_for_each_sample_is_refused(case: Refuses, linear: Path, tmp_path: Path) -> None:
    samples = [{"x": torch.zeros(2), "target": {"u": number, "v": 0}} for number in range(case.count)]
    data = offload.from_torch(samples, collate_fn=collated)
    predictor = offload.Predictor(layer, data, outputs=case.outputs, keep=case.keep)
    with pytest.raises((ConfigError, RunError)) as error:
        offload.predict(predictor, linear, tmp_path / "out.parquet", argmax=case.argmax, quiet=True)
    assert case.reason in str(error.value)


def collated(samples: list[Any]) -> dict[str, Any]:
    """A batch with columns that have no row for each sample."""
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "mean": torch.tensor(0.5), "three": [1, 2, 3]}


def test_outputs_may_be_lists_with_an_entry_for_each_sample(linear: Path, tmp_path: Path) -> None:
    """Such as the boxes of each image."""

    def outputs(model: torch.nn.Module, batch: Any) -> Any:
        return {"boxes": [np.arange(float(number)) for number in batch["sample_id"].tolist()], "pair": ("a", "b")}

    predictor = offload.Predictor(layer, [{"x": torch.zeros(2)}] * 2, outputs=outputs)
    prediction = offload.predict(predictor, linear, tmp_path / "out.parquet", quiet=True)
    assert [(row["boxes"], row["pair"]) for row in rows(prediction.output)] == [([], "a"), ([0.0], "b")]


class Stuck:
    """Samples of which reading number 3, or transforming number 5, takes forever."""

    def __init__(self, *, transform: bool) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 3 and not self.transform:
            time.sleep(10_000)
        return {"x": torch.full((2,), float(number))}


def stuck_at_5(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"][0] == 5:
        time.sleep(10_000)
    return sample


@pytest.mark.parametrize("engine", ["this machine", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_a_sample_that_hangs_is_skipped_or_named(
    engine: str, linear: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As in training: what cannot be read in time is skipped, and a transform that hangs ends the prediction."""
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
    reading = offload.from_torch(Stuck(transform=False), on_error="skip", sample_timeout_s=0.5)
    predictor = offload.Predictor(layer, reading, outputs=score)
    prediction = offload.predict(predictor, linear, tmp_path / "out.parquet", batch_size=BATCH, quiet=True)
    assert [row["sample_id"] for row in rows(prediction.output)] == [0, 1, 2, *range(4, 20)]
    (skipped,) = prediction.document["skipped_samples"]
    assert skipped["sample_id"] == 3
    assert "took longer than sample_timeout_s=0.5" in skipped["reason"]
    hanging = offload.from_torch(
        Stuck(transform=True), transform=stuck_at_5, per_sample=True, on_error="skip", sample_timeout_s=0.5
    )
    predictor = offload.Predictor(layer, hanging, outputs=score)
    with pytest.raises(RunError, match=r"the transform stuck_at_5 took longer than sample_timeout_s=0\.5 on .*5"):
        offload.predict(predictor, linear, tmp_path / "other.parquet", batch_size=BATCH, quiet=True)


def test_tensors_that_share_negated_memory_are_stored(linear: Path, tmp_path: Path) -> None:
    """Such as the imaginary part of conjugated numbers."""

    def outputs(model: torch.nn.Module, batch: Any) -> Any:
        return torch.complex(batch["x"], batch["x"] + 1).conj().imag

    predictor = offload.Predictor(layer, [{"x": torch.zeros(2)}], outputs=outputs)
    prediction = offload.predict(predictor, linear, tmp_path / "out.parquet", quiet=True)
    assert [row["output"] for row in rows(prediction.output)] == [[-1.0, -1.0]]


class Drawn:
    """Samples with random numbers."""

    def __len__(self) -> int:
        return 1100

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": torch.rand(2), "cap": f"caption {number}"}


def test_random_numbers_do_not_depend_on_the_size_of_batches(linear: Path, tmp_path: Path) -> None:
    """Also where a task ends within a chunk of samples, which draw their random numbers together."""
    predictor = offload.Predictor(layer, Drawn(), outputs=lambda model, batch: batch["x"], keep=("cap",))
    whole, cut = (
        offload.predict(predictor, linear, tmp_path / f"{size}.parquet", batch_size=size, quiet=True).output
        for size in (16, 129)
    )
    assert pq.read_table(cut).equals(pq.read_table(whole))
    assert [row["cap"] for row in rows(cut)] == [f"caption {number}" for number in range(1100)]


def test_a_prediction_goes_on_with_tasks_of_its_size_alone(
    linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FLUSH_S", 0.0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # one worker, which makes one task after another
    fails = [True]

    def outputs(model: torch.nn.Module, batch: Any) -> Any:
        if fails[0] and int(batch["sample_id"][0]) > 1000:
            raise ValueError("out of luck")
        return batch["x"]

    def predicted_rows() -> Any:
        predictor = offload.Predictor(layer, Drawn(), outputs=outputs)
        return offload.predict(predictor, linear, tmp_path / "out.parquet", batch_size=513, quiet=True)

    with pytest.raises(RunError, match="out of luck"):
        predicted_rows()
    fails[0] = False
    manifest = tmp_path / "out.parquet.parts" / "manifest.json"
    content = manifest.read_text()
    older = {name: value for name, value in json.loads(content).items() if name != "the size of a task"}
    manifest.write_text(json.dumps(older))
    with pytest.raises(ConfigError, match="the size of a task was None, and is 513"):
        predicted_rows()
    manifest.write_text(content)
    prediction = predicted_rows()
    assert prediction.document["resumed_samples"] == 513
    assert [row["sample_id"] for row in rows(prediction.output)] == list(range(1100))


def refuses(batch: dict[str, Any]) -> dict[str, Any]:
    """A step on the device."""
    raise ValueError("no such class")


def test_a_step_on_the_device_that_raises_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "rows.parquet")
    torch.save({}, tmp_path / "weights.pt")
    data = offload.parquet(tmp_path / "rows.parquet", on_device=refuses)
    predictor = offload.Predictor(torch.nn.Identity, data, outputs=lambda model, batch: batch["x"])
    with pytest.raises(
        offload.RunError, match=r"a step of on_device raised ValueError: no such class .*on a batch of 2 samples"
    ):
        offload.predict(predictor, tmp_path / "weights.pt", tmp_path / "out.parquet", quiet=True)
