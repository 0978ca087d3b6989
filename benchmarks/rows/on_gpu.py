"""The rows of `benchmarks/offload_vs_single_gpu.py`, which trains a model on a GPU. Run as

    python -m benchmarks.rows.on_gpu ROW --model NAME --workload NAME [--data FOLDER] --cores N [--cpu-host-cores N] [--cpu]

inside the host that has the GPU. ROW is `device` (from data on the device), `dataloader`, `predicted` (by the joint model from a probe
on this host) or `offload`. The row prints its figures, one JSON object, as the last line of its standard output.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.gpu import feeding
from benchmarks.gpu.place import Place
from benchmarks.rows import protocol

ROWS = ("device", "dataloader", "predicted", "offload")
SLOW = ("blur", "blur-uint8")
SLOW_BATCH_SIZE = 32  # some tens of samples a second: a step of 256 would take all of the measured time
SLOW_STEADY_S = 20.0


def case_of(place: Place, model: str, workload: str, data: str | None) -> feeding.Case:
    """What the row trains."""
    samples = feeding.Samples(workloads.get(workload, None if data is None else Path(data)))
    if workload in SLOW:
        return feeding.Case(
            model=model, data=samples, batch_size=place.pick(SLOW_BATCH_SIZE, 4), steady_s=SLOW_STEADY_S
        )
    return feeding.Case(model=model, data=samples, batch_size=feeding.batch_size(place))


def figures(row: str, place: Place, case: feeding.Case, *, cores: int, cpu_host_cores: int) -> dict[str, Any]:
    """The row's figures. `predicted` has those of this host alone, and of it with the CPU host."""
    if row == "device":
        return {"samples_per_s": feeding.ceiling(place, case), "batch_size": case.batch_size}
    if row == "dataloader":
        return feeding.dataloader(place, case, workers=cores)
    if row == "offload":
        return feeding.run(place, case)
    profile = feeding.profile(place, case)
    return {
        "samples_per_s": feeding.predicted(profile, case.batch_size, cores=cores),
        "samples_per_s_with_cpu_host": feeding.predicted(
            profile, case.batch_size, cores=cores, cpu_host_cores=cpu_host_cores
        ),
        "core_seconds_per_sample": profile.input.core_seconds_per_sample,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--data")
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--cpu-host-cores", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(device="cpu" if given.cpu else "cuda", gpus=0 if given.cpu else 1, folder=Path(folder))
        case = case_of(place, given.model, given.workload, given.data)
        found = figures(given.row, place, case, cores=given.cores, cpu_host_cores=given.cpu_host_cores)
    print("\n" + protocol.ANSWER + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
