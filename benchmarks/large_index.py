"""What an index of very many samples takes: seconds and memory to list Parquet files, and to draw the order of an epoch.

    python benchmarks/large_index.py [--rows 100000000] -o result.json

Each measurement runs in a process of its own, which reports its peak memory over that of a process that only imports offload.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side

ROWS_PER_FILE, ROWS_PER_GROUP = 1_000_000, 50_000
STEPS = ("imports", "listing", "listing and order")


@click.command(help=__doc__)
@click.option("--rows", default=100_000_000, show_default=True, type=click.IntRange(min=ROWS_PER_FILE))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
@click.option("--measure", nargs=2, type=str, hidden=True)
def main(rows: int, repeats: int, output: Path | None, measure: tuple[str, str] | None) -> None:
    if measure is not None:
        print(json.dumps(_measured(Path(measure[0]), measure[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        table = pa.table({"x": pa.array(np.zeros(ROWS_PER_FILE, np.int8))})
        files = rows // ROWS_PER_FILE
        for number in range(files):
            pq.write_table(table, Path(folder, f"{number:05}.parquet"), row_group_size=ROWS_PER_GROUP)
        found: dict[str, list[dict[str, float]]] = {step: [] for step in STEPS}
        for _ in range(repeats):
            for step in STEPS:
                ran = subprocess.run(
                    [sys.executable, __file__, "--measure", folder, step], capture_output=True, text=True, check=True
                )
                found[step].append(json.loads(ran.stdout))
    medians = {
        step: {name: statistics.median(each[name] for each in found[step]) for name in ("seconds", "peak_mb")}
        for step in STEPS
    }
    base = medians["imports"]["peak_mb"]
    each_sample = {step: (medians[step]["peak_mb"] - base) * 1e6 / rows for step in STEPS[1:]}
    result = {
        "benchmark": "large_index",
        "rows": files * ROWS_PER_FILE,
        "files": files,
        "row_groups": files * ROWS_PER_FILE // ROWS_PER_GROUP,
        "repeats": found,
        "medians": medians,
        "bytes_per_sample": each_sample,
        "command": f"python benchmarks/large_index.py --rows {rows} --repeats {repeats}",
        "machine": {name: value for name, value in side_by_side.machine().items() if name != "cores_used"},
        "versions": side_by_side.versions(),
    }
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
    for step in STEPS[1:]:
        each = medians[step]
        print(
            f"{step} of {rows:,} samples: {each['seconds']:.2f} s, {each['peak_mb'] - base:,.0f} MB over {base:,.0f} MB of imports "
            f"({each_sample[step]:.1f} bytes a sample)"
        )


def _measured(folder: Path, step: str) -> dict[str, float]:
    import offload
    from offload.pipeline.shuffling import epoch_permutation
    from offload.pipeline.sources.parquet import list_parquet

    _ = offload.parquet  # whatever a program imports belongs to the base
    began = time.perf_counter()
    if step != STEPS[0]:
        index = list_parquet(str(folder))
        if step == STEPS[2]:
            epoch_permutation(len(index), seed=0, epoch=0, groups=index.groups)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}


if __name__ == "__main__":
    main()
