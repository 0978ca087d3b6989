"""Writes docs/map.md: the file for each question, and every module of the package in a line, from the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# Map of the package

Which file to open for which question. Below that, every module in a line, from its docstring, room by room in the order in which a sample
meets them. `make map` writes this page; a test holds that it is current.

## Which file for which question

| question | files, in the order in which to read them |
|---|---|
"""
QUESTIONS = {
    "How do I add a source of samples?": {
        "pipeline/index/source.py": "what a source is: an index and a reader",
        "pipeline/index/rows.py": "the rows of an index: a table is enough",
        "pipeline/sources/image_folder.py": "an example with one file per sample",
        "pipeline/sources/parquet.py": "an example with many samples per file",
        "pipeline/describe/sources.py": "the function that users call, and `SOURCES`, which names it in messages",
        "__init__.py": "its public name",
    },
    "What decides the size of a task?": {
        "pipeline/feed/sizing.py": "the rule and its constants",
        "pipeline/feed/meter.py": "the measurements of the rule",
        "pipeline/pool/task.py": "the work that counts (`Cost.work_s`)",
        "pipeline/feed/tasks.py": "who asks it for a run; beside it, `pace.py` limits blocks behind slow links",
        "loader/job/loader_feed.py": "who asks it for a DataLoader on a cluster",
        "loader/local/local_fetcher.py": "who asks it for a DataLoader on this machine alone",
    },
    "Why did a sample come twice, or never, within a run?": {
        "pipeline/feed/tasks.py": "each position in one task, except those that were trained",
        "pipeline/feed/passes.py": "who gets which block, and which are made again",
        "pipeline/order/allot.py": "one rank for each row",
        "pipeline/preprocessing/block.py": "trained rows of a chunk are dropped",
        "train/worker/loop.py": "a rank without samples gets a filler of weight 0, with an older sample's id",
    },
    "Why did a sample come twice, or never, after a resume?": {
        "train/worker/saving/training_state.py": "what a worker commits and restores, and when an epoch starts again",
        "pipeline/order/ranges.py": "the positions that were trained",
        "train/checkpoints/format.py": "how a checkpoint stores them",
        "train/driver/listed.py": "how a changed source is noticed",
    },
    "Which checkpoints stay, and from which does a run resume?": {
        "train/checkpoints/run_folder.py": "which of them count",
        "train/checkpoints/retention.py": "which of them a run removes",
        "train/worker/saving/checkpointer.py": "who lists, writes and removes them",
        "train/worker/saving/committing.py": "when a worker commits one",
    },
    "Why did a batch of a DataLoader come twice, or never?": {
        "loader/orders.py": "the order, from the user's sampler",
        "loader/line.py": "each batch once, in order",
        "loader/state/epoch_progress.py": "the place in the epoch that a state holds",
        "loader/state/trail.py": "the checksum by which another order is noticed",
    },
    "Why did a run resize, or not?": {
        "adapt/decide.py": "the decision and its reason",
        "adapt/observe.py": "the measurements that it saw",
        "train/driver/tuner.py": "when it is asked",
        "train/driver/fleet/state_machine.py": "what the run does with it",
        "report/events/decisions.py": "what it says",
    },
    "How do I add a launcher?": {
        "launch/launcher.py": "the protocol",
        "launch/ray/launcher.py": "an example, on a cluster that runs Ray",
        "cli/launch/ray.py": "an example of a command",
        "cli/launch/job_commands.py": "options and the follow loop that all commands share",
        "cli/launch/__init__.py": "where a command is added",
        "report/terminal/job_text.py": "what the command prints of a job",
    },
    "How does a launcher start Ray on bare hosts?": {
        "launch/sagemaker/container/process_one.py": "what a container starts",
        "launch/sagemaker/container/entry.py": "which host is the head",
        "launch/sagemaker/container/head.py": "the head's way through a job",
        "launch/sagemaker/container/follower.py": "that of all other hosts",
        "launch/sagemaker/container/ray_node.py": "a host's part of the Ray cluster",
    },
    "How do I add a learning-rate rule?": {
        "adapt/rules.py": "the rules",
        "train/config.py": "what users set, and its checks",
        "train/worker/steps/batch_scaling.py": "who applies them",
    },
    "How do I change when a run resizes?": {
        "adapt/situation.py": "the bounds of decisions",
        "adapt/decide.py": "the decision",
        "adapt/worth.py": "the best batch and the goodput of each option",
        "train/config.py": "what users set",
    },
    "Where does a chart of the report come from?": {
        "report/page/records.py": "the columns of a run directory",
        "report/page/charts/run_charts.py": "the charts of a run, as values",
        "report/page/page_view.py": "which charts a page has",
        "report/page/charts/svg.py": "how they are drawn",
    },
    "How does an event become a sentence?": {
        "report/events/event.py": "the JSON form of events; beside it, each kind with its sentence",
        "train/driver/event_log.py": "who writes it down",
        "report/terminal/live_line.py": "who shows it",
    },
    "What may a column hold?": {
        "pipeline/blocks/wire.py": "columns of a block",
        "pipeline/blocks/whole_samples.py": "samples that are no columns",
        "pipeline/preprocessing/block.py": "what is refused, and how",
    },
    "What of my program reaches preprocessing?": {
        "pipeline/program/pickling.py": "functions, classes, modules",
        "pipeline/program/surroundings.py": "search path, arguments, working folder, environment",
        "pipeline/program/variables.py": "which variables of the environment",
        "pipeline/program/main_module.py": "the script, run again",
        "pipeline/preprocessing/unpicklable.py": "the words for what cannot travel",
        "pipeline/program/output_tail.py": "what comes back: printed lines",
    },
    "What happens when a worker or a node dies?": {
        "train/driver/fleet/state_machine.py": "what the run decides",
        "train/driver/losses.py": "how the ends of ranks are judged",
        "train/driver/supervisor.py": "who ends the workers and starts the next",
        "train/group/group.py": "the contract of the workers' processes; beside it, those on Ray and on this machine",
        "train/group/deaths.py": "the sentence on the cause",
        "pipeline/pool/pool.py": "the same for a preprocessing process",
    },
    "What if a release of Ray changes something private?": {
        "ray_private/part.py": "what a part is, and how its absence is noticed",
        "ray_private/parts.py": "all parts",
        "cli/doctor.py": "who lists them for users",
    },
}
MOST_FILES = 6
"""For one question: with more, the code is at fault."""

# The rooms in the order in which a sample meets them; then the rooms of decisions, and those around a run.
ROOMS = (
    "",
    "pipeline",
    "pipeline/describe",
    "pipeline/sources",
    "pipeline/raydata",
    "pipeline/index",
    "pipeline/order",
    "pipeline/feed",
    "pipeline/pool",
    "pipeline/program",
    "pipeline/preprocessing",
    "pipeline/images",
    "pipeline/cache",
    "pipeline/blocks",
    "inference",
    "serving",
    "train/hub",
    "train/worker",
    "train/worker/data",
    "train/worker/steps",
    "train/worker/saving",
    "train/checkpoints",
    "loader",
    "loader/job",
    "loader/state",
    "train",
    "train/driver",
    "train/driver/fleet",
    "train/group",
    "train/cluster",
    "adapt",
    "measure",
    "model",
    "model/planning",
    "prices",
    "report",
    "ray_private",
    "ray_private/data",
    "ray_private/preload",
)


def first_sentence(path: Path) -> str:
    """What a module says of itself first."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    sentence = re.match(r"(.*?\.)(?:\s|$)", text)
    return (sentence[1] if sentence else text).rstrip(".:").replace("|", "\\|")


def rooms() -> list[str]:
    """The folders with modules: those of ROOMS in their order, then the others, each after its parent."""
    package = ROOT / "offload"
    folders = {str(path.parent.relative_to(package)).removeprefix(".") for path in package.rglob("*.py")}
    missing = set(ROOMS) - folders
    assert not missing, f"ROOMS names folders that do not exist: {missing}"
    return [*ROOMS, *sorted(folders - set(ROOMS))]


def answer(question: str) -> str:
    """A row of the table of questions."""
    files = QUESTIONS[question]
    missing = [name for name in files if not (ROOT / "offload" / name).is_file()]
    assert not missing, f"{question} names files that do not exist: {missing}"
    assert len(files) <= MOST_FILES, f"{question} takes {len(files)} files, of at most {MOST_FILES}"
    return f"| {question} | {'<br>'.join(f'`{name}`: {what}' for name, what in files.items())} |\n"


def written() -> str:
    """The page."""
    parts = [HEAD, *map(answer, QUESTIONS)]
    for room in rooms():
        folder = ROOT / "offload" / room
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        package = folder / "__init__.py"
        title = f"\n## {folder.relative_to(ROOT)}\n"
        summary = first_sentence(package) if package.exists() else ""
        parts.append(
            title + (f"\n{summary}.\n" if summary else "") + ("\n| module | |\n|---|---|\n" if modules else "")
        )
        parts += [f"| `{path.name}` | {first_sentence(path)} |\n" for path in modules]
    return "".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "map.md").write_text(written(), encoding="utf-8")
