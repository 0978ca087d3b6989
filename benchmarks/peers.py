"""Other libraries that preprocess training data, beside offload and the plain loop, on the same cores.

    python benchmarks/peers.py --workload jpeg --row tfdata --row offload -o result.json

Every row makes the batches of one workload: the same decoding, the same random transforms, the same batch size and types. Where a library
has functions of its own for that, the row uses these and says so in `about`. Rows run on one or two emulated hosts, each pinned to a core,
with as many preprocessing processes or threads as cores. The consumer only counts. The plain loop runs before and after every row, as in
offload_vs_single.py, and `delivered_over_ideal` is the row's rate over that of plain loops on the row's cores. Repeats are interleaved.

\b
* A row's first run is short. It converts the data set to the library's format, warms caches, and finds how many samples take --seconds.
* Memory is the peak of the summed PSS (proportional set size) of all processes of the row's hosts, looked at every two seconds.
* Bytes on the wire are what the hosts' network devices send in the steady state.
* `label_sum` is compared with the data set's: a row that loses or repeats samples has a note.

A row that cannot run stays in the table, with the reason. Libraries live in environments of their own, which the first use makes from a
package index; later ones need no index.
"""

import json
import re
import shlex
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import environments, reference, side_by_side, tables
from benchmarks.environments import EnvironmentFailed
from benchmarks.raw_images import LABELS, labelled_files
from benchmarks.reference import Beside
from benchmarks.rows.peers.common import SHARD
from benchmarks.rows.protocol import TOO_FEW, Task
from benchmarks.side_by_side import CPU_HOST, GPU_HOST, Measurement, Row, RowFailed
from tests.emulation import HostsError, unavailable

WORKLOADS = ("jpeg", "blur", *tables.NAMES)
HOSTS = (GPU_HOST, CPU_HOST)
MEMORY_EVERY_S = 2.0
MORE = 8  # times as many samples, if a first run was too short to measure
TRIES = 2  # of a row that never worked
CONVERSION_S = 300.0  # additional time of a first run
PLAIN_WIDTH = 150
LONGEST_REASON = 300

ONE_PROCESS = "it reads and preprocesses on the host of the process that consumes, and cannot use a second host"
NO_TABLES = "it has no reader for tables"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to feed a consumer."""

    name: str
    about: str
    module: str
    environment: str | None = None
    """The name of its environment; None: the project's own."""
    ray: bool = False
    helper: str | None = None
    no_second_host: str | None = None
    """The reason why it cannot use a second host; None: it can."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    """The reason for each workload that it cannot run."""

    def row(self, hosts: int, python: str = sys.executable) -> Row:
        return Row(
            name=name_of(self, hosts), module=self.module, hosts=HOSTS[:hosts], ray=self.ray, python=python,
            helper=self.helper,
        )  # fmt: skip

    def reason(self, workload: str, hosts: int) -> str | None:
        """Why this peer cannot run a workload on so many hosts; None if it can."""
        return self.cannot.get(workload) or (self.no_second_host if hosts > 1 else None)


ON_OFFLOAD = {
    "offload": ("offload_row", "offload.Trainer"),
    "loader": ("loader_row", "offload.DataLoader"),
    "dataset": ("dataset_row", "offload.Trainer on the ray.data.Dataset of the row ray"),
}
TFDATA = (
    "TensorFlow's own functions: it decodes only the crop's region, and resizes without antialiasing; synthetic images are its own; "
    "tables are TFRecord files"
)

PEERS = (
    Peer(
        name="dataloader",
        about="torch's DataLoader, one worker process a core; the plain loop's functions",
        module="dataloader",
        no_second_host=ONE_PROCESS,
    ),
    Peer(
        name="spdl",
        about="SPDL's pipeline of threads; the plain loop's functions",
        module="peers.spdl_row",
        environment="spdl",
        no_second_host=ONE_PROCESS,
    ),
    Peer(
        name="tfdata",
        about=f"tf.data. {TFDATA}",
        module="peers.tfdata_row",
        environment="tensorflow",
        no_second_host="without tf.data service, " + ONE_PROCESS,
    ),
    Peer(
        name="tfdata-antialias",
        about="tf.data that decodes whole images and resizes with antialiasing, as the plain loop does",
        module="peers.tfdata_antialias_row",
        environment="tensorflow",
        no_second_host="without tf.data service, " + ONE_PROCESS,
        cannot=dict.fromkeys(("blur", *tables.NAMES), "as tfdata: nothing is resized"),
    ),
    Peer(
        name="tfdata-service",
        about=f"tf.data service with a worker process on each host, over gRPC. {TFDATA}",
        module="peers.tfdata_service_row",
        environment="tensorflow",
        helper="peers.tfdata_worker",
    ),
    Peer(
        name="dali",
        about="DALI on the CPU. Its own functions: it decodes only the crop's region, resizes with antialiasing, and blurs with two "
        "kernels of one dimension in place of one of two dimensions",
        module="peers.dali_row",
        environment="dali",
        no_second_host=ONE_PROCESS,
        cannot=dict.fromkeys(tables.NAMES, NO_TABLES),
    ),
    Peer(
        name="litdata",
        about="LitData's StreamingDataLoader, one worker process a core, on its own chunks, or Parquet; the plain loop's functions",
        module="peers.litdata_row",
        environment="litdata",
        no_second_host=ONE_PROCESS,
    ),
    Peer(
        name="streaming",
        about="MosaicML Streaming's StreamingDataLoader, one worker process a core, on MDS shards; the plain loop's functions",
        module="peers.streaming_row",
        environment="streaming",
        no_second_host=ONE_PROCESS,
    ),
    Peer(
        name="webdataset",
        about="WebDataset's WebLoader, one worker process a core, on tar shards; the plain loop's functions",
        module="peers.webdataset_row",
        environment="webdataset",
        no_second_host=ONE_PROCESS,
        cannot=dict.fromkeys(tables.NAMES, f"{NO_TABLES}: a sample is a group of files in a tar archive"),
    ),
    Peer(
        name="grain",
        about="Grain with one prefetching process a core; the plain loop's functions",
        module="peers.grain_row",
        environment="grain",
        no_second_host=ONE_PROCESS,
    ),
    Peer(
        name="ray-data",
        about="Ray Data as its guides show it, without Ray Train: read_images decodes with Pillow; else the plain loop's functions",
        module="ray_data",
        ray=True,
    ),
    Peer(name="ray", about="the script of the reference article, on today's Ray Train", module="ray_script", ray=True),
    *(Peer(name=name, about=about, module=module, ray=True) for name, (module, about) in ON_OFFLOAD.items()),
    Peer(
        name="images",
        about="offload.Trainer on offload.image_folder, which decodes only the crop's region, to the plain loop's pixels",
        module="images_row",
        ray=True,
        cannot=dict.fromkeys(("blur", *tables.NAMES), "as offload: there are no image files"),
    ),
)


def name_of(peer: Peer, hosts: int) -> str:
    return f"{peer.name}-{'1-host' if hosts == 1 else f'{hosts}-hosts'}"


@click.command(help=__doc__)
@click.option("--workload", "workloads", multiple=True, type=click.Choice(WORKLOADS), help="[default: all]")
@click.option("--row", "names", multiple=True, type=click.Choice([peer.name for peer in PEERS]), help="[default: all]")
@click.option("--hosts", "counts", multiple=True, type=click.Choice(["1", "2"]), help="[default: both]")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
              help="Approximate time that each run lasts, without its start.")  # fmt: skip
@click.option("--environments", "folder", default=environments.DEFAULT_FOLDER, show_default=True,
              type=click.Path(path_type=Path, file_okay=False), help="Folder of the libraries' environments.")  # fmt: skip
@click.option("--resume", is_flag=True,
              help="Keep the repeats in the output file, and run only those that it lacks.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(
    workloads: tuple[str, ...],
    names: tuple[str, ...],
    counts: tuple[str, ...],
    repeats: int,
    seconds: float,
    folder: Path,
    resume: bool,
    output: Path | None,
) -> None:
    if (reason := unavailable()) is not None:
        raise click.ClickException(reason)
    log = Console(stderr=True)
    folder = folder.expanduser().resolve()
    peers = [peer for peer in PEERS if not names or peer.name in names]
    ready, lost = _environments(peers, folder, log)
    earlier: dict[str, Any] = {"rows": [], "versions_of_peers": {}}
    if resume and output is not None and output.exists():
        earlier = json.loads(output.read_text())
    lines: list[dict[str, Any]] = earlier["rows"]
    versions = earlier["versions_of_peers"] | {name: environments.versions(name, folder) for name in ready}
    document = {
        "repeats": repeats,
        "seconds": seconds,
        "command": shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]]),
        "machine": side_by_side.machine(),
        "versions": side_by_side.versions(),
        "versions_of_peers": versions,
    }
    for workload in workloads or WORKLOADS:
        kept = {line["name"]: line for line in lines if line["workload"] == workload}
        chosen = [
            (peer, hosts)
            for hosts in sorted(map(int, counts)) or (1, 2)
            for peer in peers
            if not is_complete(kept.get(name_of(peer, hosts)), repeats)
        ]
        if not chosen:
            continue
        ran = _Workload(workload, seconds, ready, lost, log, kept)
        for repeat in range(repeats):
            ran.run(chosen, repeat, repeats)
        made = ran.lines(chosen)
        replaced = {line["name"] for line in made}
        lines = [line for line in lines if line["workload"] != workload or line["name"] not in replaced] + made
        # After each workload, so that an interrupted benchmark can be resumed.
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            result = {"rows": lines, **document}
            output.write_text(json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    for workload in dict.fromkeys(line["workload"] for line in lines):
        console.print(table_of([line for line in lines if line["workload"] == workload], workload))


def _environments(peers: Sequence[Peer], folder: Path, log: Console) -> tuple[dict[str, str], dict[str, str]]:
    """Return the interpreters of the environments that exist now, and the reasons of those that could not be made."""
    ready, lost = {}, {}
    for name in dict.fromkeys(peer.environment for peer in peers if peer.environment is not None):
        log.print(f"environment {name}: {', '.join(environments.requirements(name))}", markup=False, highlight=False)
        try:
            ready[name] = str(environments.make(name, folder))
        except EnvironmentFailed as error:
            lost[name] = f"its environment could not be made: {reason_of(str(error))}"
            log.print(f"{name}: {error}", style="red", markup=False)
    return ready, lost


class _Workload:
    """The runs of all rows on one workload."""

    def __init__(
        self,
        name: str,
        seconds: float,
        ready: Mapping[str, str],
        lost: Mapping[str, str],
        log: Console,
        earlier: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._name, self._seconds, self._ready, self._lost, self._log = name, seconds, ready, lost, log
        self._earlier = earlier
        data = reference.jpeg_files(None) if name == "jpeg" else str(reference.folder_of(name))
        batch_size = tables.BATCH_SIZES.get(name, reference.BATCH_SIZE)
        # Synthetic images have no files, but libraries with formats of their own keep theirs beside this folder.
        self._task = Task(
            workload=name, samples=0, batch_size=batch_size, data=f"{data}/none" if name == "blur" else data
        )
        self._plain_per_s = reference.calibrate(self._task)
        self._plain_task = reference.plain_task(self._task, self._plain_per_s)
        self._tasks: dict[str, Task] = {}
        self._measured: dict[str, list[Beside]] = defaultdict(list)
        self._reasons: dict[str, str] = {}
        self._failures: Counter[str] = Counter()

    def run(self, chosen: Sequence[tuple[Peer, int]], repeat: int, repeats: int) -> None:
        """Run each row that lacks this repeat once, and the plain loop before and after it."""
        before: Measurement | None = None
        for peer, hosts in chosen:
            name = name_of(peer, hosts)
            if repeat < len(repeats_of(self._earlier.get(name))):
                continue
            if self._failures[name] >= TRIES and not self._measured[name]:
                continue  # the row does not work at all
            if (reason := peer.reason(self._name, hosts) or self._lost.get(peer.environment or "")) is not None:
                self._reasons[name] = reason
                continue
            row = peer.row(hosts, self._ready.get(peer.environment or "", sys.executable))
            try:
                if name not in self._tasks:
                    before = None  # a loop before the first run would be too long ago
                    self._tasks[name] = self._first_run(row)
                before = before or self._plain_loop()
                run = self._run(row, self._tasks[name])
                after = self._plain_loop()
            except (RowFailed, HostsError) as error:
                self._failures[name] += 1
                self._reasons[name] = reason_of(str(error))
                self._log.print(f"{self._name} {name}: {error}", style="red", markup=False)
                before = None
                continue
            beside = Beside(row=row, run=run, plain=(before, after))
            self._measured[name].append(beside)
            before = after
            self._log.print(f"{repeat + 1}/{repeats} {self._name} {name}: {beside}", markup=False, highlight=False)

    def lines(self, chosen: Sequence[tuple[Peer, int]]) -> list[dict[str, Any]]:
        """The lines of the table: the plain loop, then each row, with its figures or its reason."""
        besides = [beside for ran in self._measured.values() for beside in ran]
        plain = [*repeats_of(self._earlier.get(reference.PLAIN.name)), *map(figures_of, (b.plain[0] for b in besides))]
        made = [plain_line(self._name, plain)] if plain else []
        for peer, hosts in chosen:
            name = name_of(peer, hosts)
            told = {"name": name, "workload": self._name, "hosts": hosts, "about": peer.about}
            # A row that failed in one repeat has figures and a reason.
            failed = {"reason": self._reasons[name]} if name in self._reasons else {}
            earlier, ran = self._earlier.get(name, {}), self._measured[name]
            if repeats := [*repeats_of(earlier), *map(repeat_of, ran)]:
                remarks = list(earlier.get("notes", ()))
                if ran:
                    sums = label_sum(self._name, Path(self._task.data or "."), self._tasks[name].samples)
                    remarks = list(dict.fromkeys([*remarks, *notes(ran, sums)]))
                made.append({**told, **figures(repeats), "notes": remarks, **failed})
            else:
                made.append({**told, **failed})
        return made

    def _run(self, row: Row, task: Task, more_s: float = 0.0) -> Measurement:
        limit_s = reference.START_S + reference.SLOWNESS * self._seconds + more_s
        return side_by_side.run(row, reference.with_files(task), timeout_s=limit_s, memory_every_s=MEMORY_EVERY_S)

    def _plain_loop(self) -> Measurement:
        return reference.plain_loop(self._plain_task, self._log, memory_every_s=MEMORY_EVERY_S)

    def _first_run(self, row: Row) -> Task:
        """Return the task that takes the wanted time, by the rate of a short run. It also fills caches."""
        ideal = self._plain_per_s * len(row.hosts)
        short = self._with_samples(0)
        if short.samples >= ideal * self._seconds:
            return short
        while True:
            try:
                rate = self._run(row, short, CONVERSION_S).samples_per_s
            except RowFailed as error:
                if TOO_FEW not in str(error) or short.samples > ideal * self._seconds:
                    raise
                short = self._with_samples(MORE * short.samples)
                continue
            return self._with_samples(rate * self._seconds)

    def _with_samples(self, samples: float) -> Task:
        unit = None if self._name in tables.NAMES else SHARD
        return reference.with_samples(self._task, round(samples), reference.MIN_BATCHES, unit)


def label_sum(workload: str, data: Path, samples: int) -> int:
    """The sum of the labels of a task's samples, each once."""
    if workload == "jpeg":
        labels = np.array(labelled_files(data)[1])
        return int(labels[np.arange(samples) % len(labels)].sum())
    if workload in tables.NAMES:
        column = pq.read_table(data / f"{workload}.parquet", columns=["label"])["label"].to_numpy()
        return int(column.sum()) * (samples // tables.ROWS_PER_FILE[workload])
    return int((np.arange(samples) % LABELS).sum())


def notes(ran: Sequence[Beside], expected_sum: int) -> list[str]:
    """How the samples of a row differ from the plain loop's."""
    found = []
    if any(beside.run.label_sum != expected_sum for beside in ran):
        found.append("it lost or repeated samples")
    batch, plain = ran[0].run.batch, ran[0].plain[0].batch
    if batch != plain:
        found.append("its batches are " + ", ".join(f"{name} {kind}" for name, kind in batch.items()))
    return found


def is_complete(line: Mapping[str, Any] | None, repeats: int) -> bool:
    """Whether a row of an earlier result needs no more runs: it has its repeats, or could not run at all."""
    return line is not None and len(repeats_of(line) or range(repeats)) >= repeats


def repeats_of(line: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [] if line is None else list(line.get("repeats", ()))


FIGURES = (
    "samples_per_s", "cpu_ms_per_sample", "daemon_cpu_ms_per_sample", "first_batch_s", "start_to_first_batch_s", "stall",
    "busy_cores", "wire_bytes_per_sample", "peak_memory_bytes",
)  # fmt: skip
RATIOS = ("delivered_over_ideal", "cpu_over_plain")


def figures_of(run: Measurement) -> dict[str, float]:
    return {name: float(getattr(run, name)) for name in FIGURES}


def repeat_of(beside: Beside) -> dict[str, Any]:
    return {**side_by_side.as_dict(beside.run), **{name: getattr(beside, name) for name in RATIOS}}


def figures(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats, the range of each ratio, and all repeats."""
    ratios = {name: [repeat[name] for repeat in repeats] for name in RATIOS}
    return {
        **{name: statistics.median(values) for name, values in ratios.items()},
        "spread": {name: [min(values), max(values)] for name, values in ratios.items()},
        **_medians(repeats),
        "repeats": list(repeats),
    }


def plain_line(workload: str, repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The plain loop, on both hosts at once."""
    rates = [repeat["samples_per_s"] for repeat in repeats]
    return {
        "name": reference.PLAIN.name,
        "workload": workload,
        "hosts": len(reference.PLAIN.hosts),
        "about": "one process on each of both cores, no library between",
        "delivered_over_ideal": 1.0,
        "cpu_over_plain": 1.0,
        "spread": {"samples_per_s": [min(rates), max(rates)]},
        **_medians(repeats),
        "repeats": list(repeats),
        "notes": [],
    }


def _medians(repeats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    made = {name: statistics.median(float(repeat[name]) for repeat in repeats) for name in FIGURES}
    conversions = [
        extra["conversion_s"] for repeat in repeats if (extra := repeat.get("extra", {})).get("conversion_s")
    ]
    return made | ({"conversion_s": statistics.median(conversions)} if conversions else {})


def table_of(lines: Sequence[Mapping[str, Any]], workload: str) -> Table:
    """The table of one workload, the rows with figures first, by their ratio."""
    table = Table(title=workload)
    for heading in ("row", "samples/s", "÷ plain", "(spread)", "CPU ms", "÷ plain", "start to batch s", "MB", "wire B"):
        table.add_column(heading, justify="left" if heading == "row" else "right", no_wrap=heading == "row")
    table.add_column("notes", justify="left", overflow="fold")
    for line in sorted(lines, key=_place):
        remarks = [*line.get("notes", []), *([line["reason"]] if "reason" in line else [])]
        if "samples_per_s" not in line:
            table.add_row(line["name"], *[""] * 8, "; ".join(remarks))
            continue
        spread = line["spread"].get("delivered_over_ideal")
        table.add_row(
            line["name"],
            f"{line['samples_per_s']:,.1f}",
            f"{line['delivered_over_ideal']:.3f}",
            "" if spread is None else f"{spread[0]:.2f}–{spread[1]:.2f}",
            f"{line['cpu_ms_per_sample']:.3g}",
            f"{line['cpu_over_plain']:.2f}",
            f"{line['start_to_first_batch_s']:.1f}",
            f"{line['peak_memory_bytes'] / 1e6:,.0f}",
            f"{line['wire_bytes_per_sample']:,.0f}",
            "; ".join(remarks),
        )
    return table


def _place(line: Mapping[str, Any]) -> tuple[bool, int, float]:
    return line["name"] != reference.PLAIN.name, line["hosts"], -line.get("delivered_over_ideal", -1.0)


def reason_of(failure: str) -> str:
    """The line of a row's output that says why it failed: the last that names an error, else the last of all. Without addresses."""
    said = [line.strip() for line in failure.strip().splitlines() if line.strip()] or ["it said nothing"]
    errors = [line for line in said if re.search(r"\w*(Error|Exception|Exit)\b", line)]
    return re.sub(r"\S+://\S+", "…", (errors or said)[-1])[:LONGEST_REASON]


if __name__ == "__main__":
    main()
