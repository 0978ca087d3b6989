"""The overhead of serving: a request over HTTP beside the bare transform and model in one process.

    python benchmarks/serving.py -o benchmarks/results/serving.json

One JPEG file after the other is decoded, cropped and given to a small model: first by plain torchvision and torch in this process, then
by `offload.serving` on a Ray of this machine, with one preprocessing and one model replica. `serve_alone` is an application of the same
parts that do nothing: what Serve takes. Latencies are medians of requests in turn. The rates are those of eight clients at once.
"""

import json
import logging
import socket
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import httpx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
import offload.serving
from benchmarks import side_by_side, workloads
from benchmarks.jobs import echo_app
from benchmarks.jobs.inference_row import TRANSFORM, build_model
from offload.inference.weights import read_weights
from offload.serving.batches import ServedModel
from offload.serving.preprocessing import RequestPreprocessing
from offload.serving.requests import Sample

CLIENTS = 8
WARM = 20


@click.command()
@click.option("--requests", default=300, show_default=True, type=click.IntRange(min=50), help="Of each measurement.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the result to this file.")
def main(requests: int, output: Path | None) -> None:
    """Measure the overhead of serving."""
    import ray
    from ray import serve

    torch.set_num_threads(1)  # as a replica has
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = sorted(workloads.jpeg_files(folder / "jpeg").rglob("*.jpg"))
        contents = [files[number % len(files)].read_bytes() for number in range(requests + WARM)]
        weights = folder / "weights.pt"
        torch.save(build_model().state_dict(), weights)
        predictor = offload.Predictor(build_model, offload.image_folder(files[0].parents[1], TRANSFORM))
        model = read_weights(str(weights)).fill(build_model())
        parts = RequestPreprocessing(predictor.data), ServedModel(predictor, str(weights))

        def bare(content: bytes) -> Any:
            pixels = torch.from_numpy(_decoded(content)).permute(2, 0, 1)
            with torch.inference_mode():
                return model(TRANSFORM(pixels)[None]).tolist()

        rows = {"bare": _latencies(bare, contents)}
        rows["in_process"] = _latencies(lambda content: parts[1].answers([parts[0](Sample(image=content))]), contents)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ray.init(num_cpus=2, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
        serve.start(http_options={"port": port})
        rates = {}
        for name_of_row, served_app in (
            ("serve_alone", echo_app.app()),
            ("served", offload.serving.app(predictor, weights, batch_size=CLIENTS)),
        ):
            serve.run(served_app, name="images")
            rows[name_of_row], rates[name_of_row] = _over_http(f"http://127.0.0.1:{port}", contents)
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    document = {
        "benchmark": "serving",
        "claim": "the overhead of a request to offload.serving over the bare transform and model",
        "command": " ".join(["python", "benchmarks/serving.py", *sys.argv[1:]]),
        "machine": side_by_side.hardware(),
        "versions": side_by_side.versions(),
        "requests": requests,
        "rows": rows,
        "overhead_ms": round(rows["served"]["median_ms"] - rows["bare"]["median_ms"], 2),
        "clients": CLIENTS,
        "requests_per_s": rates,
        "bare_per_s_of_one_core": round(1000 / rows["bare"]["median_ms"], 1),
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=2) + "\n")
    click.echo(json.dumps({name: document[name] for name in ("rows", "overhead_ms", "requests_per_s")}, indent=2))


def _over_http(address: str, contents: list[bytes]) -> tuple[dict[str, float], float]:
    """Latencies of requests in turn, and requests/s of several clients."""
    with httpx.Client(base_url=address, timeout=300) as client, ThreadPoolExecutor(CLIENTS) as clients:

        def ask(content: bytes) -> Any:
            answer = client.post("/predict", content=content, headers={"Content-Type": "image/jpeg"})
            return answer.raise_for_status().json()

        latencies = _latencies(ask, contents)
        began = time.perf_counter()
        for _ in clients.map(ask, contents):
            pass
        return latencies, round(len(contents) / (time.perf_counter() - began), 1)


def _decoded(content: bytes) -> Any:
    import simplejpeg

    return simplejpeg.decode_jpeg(content, colorspace="RGB")


def _latencies(ask: Any, contents: list[bytes]) -> dict[str, float]:
    times = []
    for content in contents:
        began = time.perf_counter()
        ask(content)
        times.append((time.perf_counter() - began) * 1000)
    times = sorted(times[WARM:])
    return {"median_ms": round(statistics.median(times), 2), "p95_ms": round(times[int(len(times) * 0.95)], 2)}


if __name__ == "__main__":
    main()
