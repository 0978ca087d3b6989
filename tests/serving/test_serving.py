"""Serving over HTTP on a real Ray Serve: outputs of validation bit for bit, sentences for bad input, and no request lost with a replica."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pyarrow.parquet as pq
import pytest
import torch

import offload
from offload.errors import ConfigError
from tests.helpers import eventually
from tests.programs import predicted, served

DEADLINE_S = 800.0

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Served(NamedTuple):
    """An application: its address, the predictor, the weights, and the folder of the files that end its processes."""

    address: str
    predictor: offload.Predictor
    weights: Path
    ends: Path


@pytest.fixture(scope="module")
def application(ray_cluster: None, jpeg_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    import ray
    from ray import serve

    import offload.serving

    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    torch.save(predicted.build_model().state_dict(), folder / "weights.pt")
    predictor = served.predictor(jpeg_folder, folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def is_started() -> bool:
        try:
            serve.start(http_options={"port": port})
        except (TimeoutError, ray.exceptions.RayActorError):  # a busy machine: Serve waits for a minute
            return False
        return True

    eventually(is_started, DEADLINE_S)
    app = offload.serving.app(
        predictor, folder / "weights.pt", preprocessing_replicas=2, model_replicas=2, batch_size=4
    )
    serve.run(app, name="images")
    eventually(lambda: is_there(f"http://127.0.0.1:{port}"), DEADLINE_S)
    try:
        yield Served(f"http://127.0.0.1:{port}", predictor, folder / "weights.pt", folder)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]


def is_there(address: str) -> bool:
    try:
        return httpx.get(address, timeout=DEADLINE_S).status_code == 200
    except httpx.TransportError:
        return False


def asked(application: Served, **request: Any) -> httpx.Response:
    return httpx.post(f"{application.address}/predict", timeout=DEADLINE_S, **request)


def image(file: Path) -> dict[str, Any]:
    return {"content": file.read_bytes(), "headers": {"Content-Type": "image/jpeg"}}


def test_outputs_equal_those_of_validation_bit_for_bit(
    application: Served, jpeg_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests one after the other form batches of one sample, as in a prediction with that batch size. A form is as good as a body."""
    monkeypatch.setattr("offload.engine.program_uses_ray", lambda: False)
    result = offload.predict(
        application.predictor, application.weights, tmp_path / "out.parquet", batch_size=1, quiet=True
    )
    expected = {row["key"]: row["output"] for row in pq.read_table(result.output).to_pylist()}
    files = sorted(jpeg_folder.rglob("*.jpg"))[:12]
    assert [asked(application, **image(file)).json() for file in files] == [
        {"output": expected[str(file)]} for file in files
    ]
    form = asked(application, files={"image": files[0].read_bytes()})
    assert form.json() == {"output": expected[str(files[0])]}


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        ({"content": b"", "headers": {"Content-Type": "image/jpeg"}}, 400, "The body is empty. Send an image"),
        ({"content": b"no image", "headers": {"Content-Type": "image/jpeg"}}, 422, "corrupt or truncated image"),
        ({"content": b"<p>", "headers": {"Content-Type": "text/html"}}, 415, "The Content-Type is text/html. Send an image"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "The body is not JSON"),
        ({"json": [1]}, 400, "A row is a JSON object with a value for each column, found a list"),
        ({"json": {"age": 5}}, 422, "image"),
        ({"files": {"a": b"1", "b": b"2"}}, 400, "A form holds one file, the image, found 2"),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(application: Served, request_: dict[str, Any], status: int, says: str) -> None:
    answer = asked(application, **request_)
    assert (answer.status_code, says in answer.json()["error"]) == (status, True), answer.text


@pytest.mark.parametrize("part", ["model", "preprocessing"])
def test_no_request_is_lost_with_a_replica(application: Served, jpeg_folder: Path, part: str) -> None:
    files = sorted(jpeg_folder.rglob("*.jpg"))[:8]
    expected = [asked(application, **image(file)).json()["output"] for file in files]
    marker, over = application.ends / part, threading.Event()
    answers: list[tuple[int, httpx.Response]] = []

    def load(client: int) -> None:
        number = client
        while not over.is_set():
            answers.append((number % 8, asked(application, **image(files[number % 8]))))
            number += 1

    with ThreadPoolExecutor(8) as clients:
        running = [clients.submit(load, client) for client in range(8)]
        try:
            eventually(lambda: len(answers) > 8, DEADLINE_S)
            marker.touch()
            eventually(lambda: not marker.exists(), DEADLINE_S)  # a replica has taken a sample, and ends
            after = len(answers)
            eventually(lambda: len(answers) > after + 32, DEADLINE_S)
        finally:
            over.set()
        for client in running:
            client.result(DEADLINE_S)
    assert {answer.status_code for _, answer in answers} == {200}
    for number, answer in answers:  # batches of other sizes may round differently
        torch.testing.assert_close(torch.tensor(answer.json()["output"]), torch.tensor(expected[number]))


def test_a_script_becomes_an_application(
    tmp_path: Path, jpeg_folder: Path, application: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    import offload.serving

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text(
        f"import offload\nfrom tests.programs import predicted\n\ndef predictor():\n"
        f"    return offload.Predictor(predicted.build_model, predicted.data({str(jpeg_folder)!r}))\n"
    )
    arguments = {"script": str(script), "checkpoint": str(application.weights), "model_replicas": "1-4"}
    assert type(offload.serving.build(arguments)).__name__ == "Application"
    for wrong, says in (
        ({"script": str(script)}, "serving.build needs checkpoint="),
        ({**arguments, "replicas": 2}, "found replicas"),
        ({**arguments, "model_replicas": "4-1"}, "model_replicas must be"),
        ({**arguments, "batch_size": "many"}, "batch_size must be a number, found 'many'"),
        ({**arguments, "checkpoint": str(tmp_path / "no")}, "there is no checkpoint"),
    ):
        with pytest.raises(ConfigError, match=says):
            offload.serving.build(wrong)
    mixed = offload.mix({"a": predicted.data(jpeg_folder), "b": predicted.data(jpeg_folder)})
    with pytest.raises(ConfigError, match="joins several data sets"):
        offload.serving.app(offload.Predictor(predicted.build_model, mixed), application.weights)
