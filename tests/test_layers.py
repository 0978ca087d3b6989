"""Imports between layers point down, and what must start fast imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the top down: a layer imports those below it. What has no layer of its own here is a test's mistake.
LAYERS = [
    {
        "offload.__main__",
        "offload.arbiter",
        "offload.cli",
        "offload.demo_data",
        "offload.notebook",
        "offload.runs",
        "offload.tune",
        "offload.serving",
    },
    {"offload.launch"},
    {"offload.probe"},
    {"offload.inference"},
    {"offload.loader", "offload.collate", "offload.callbacks"},
    # Rooms of offload.train, by process: the driver starts the workers, and both talk to the run's actor.
    {"offload.train.driver"},
    # Rooms of offload.train.worker, from the loop down to the links with the other ranks and the driver.
    {"offload.train.worker"},
    {"offload.train.worker.steps"},
    {"offload.train.worker.saving"},
    {"offload.train.worker.data"},
    {"offload.train.worker.links"},
    {"offload.train.hub", "offload.train.steering", "offload.arbiter.ray_arbiter", "offload.arbiter.registry"},
    {"offload.train.messages"},
    {"offload.train.group"},
    {"offload.train.checkpoints", "offload.train.cluster"},
    {"offload.train.config", "offload.train"},
    # Rooms of offload.pipeline, from the user's words to pure functions.
    {"offload.pipeline.describe"},
    {"offload.pipeline.feed"},
    {"offload.pipeline.raydata"},
    {"offload.pipeline.sources"},
    {"offload.pipeline.pool"},
    {"offload.pipeline.preprocessing"},
    {"offload.pipeline.images"},
    {"offload.pipeline.index"},
    {"offload.pipeline.blocks"},
    {"offload.pipeline.program"},
    {"offload.pipeline.cache", "offload.pipeline.order", "offload.pipeline"},
    {"offload.adapt"},
    # Among many runs, of which it sees only what they report.
    {
        "offload.arbiter.arbiter",
        "offload.arbiter.handover",
        "offload.arbiter.ledger",
        "offload.arbiter.page",
        "offload.arbiter.status",
        "offload.arbiter.text",
        "offload.arbiter.values",
    },
    {"offload.report"},  # on plain data: it reads files, not objects of the layers that write them
    {"offload.measure", "offload.prices"},
    {"offload.model"},
    {"offload.actors"},
    {
        "offload.engine",
        "offload.errors",
        "offload.files",
        "offload.formatting",
        "offload.machine",
        "offload.paced",
        "offload.preload",
        "offload.process",
        "offload.ray_private",
        "offload.transforms",
        "offload.uncaught",
        "offload.versions",
    },
]
LEVEL = {name: number for number, names in enumerate(LAYERS) for name in names}

# Names that users import: `import offload` loads a module when one of its names is first used.
PUBLIC = "offload"

MODULES = sorted(path for path in (ROOT / "offload").rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Everything that a file imports anywhere in it, functions and TYPE_CHECKING blocks included."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            # `from offload.pipeline import wire` imports a module, `from offload.errors import causes` a name.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str | None:
    """The most specific name in LAYERS that this module or its package bears."""
    parts = module.split(".")
    return next((".".join(parts[:n]) for n in (4, 3, 2, 1) if ".".join(parts[:n]) in LEVEL), None)


def test_imports_point_down() -> None:
    for path in MODULES:
        check_imports(path)


def check_imports(path: Path) -> None:
    module = module_of(path)
    if module == PUBLIC:
        return
    mine = layer_of(module)
    assert mine is not None, f"{module} is in no layer: give it its place in LAYERS"
    for imported in imports(path):
        if imported.split(".")[0] != "offload":
            continue
        theirs = layer_of(imported)
        if theirs is None:
            # The public names, such as `offload.Trainer` or `__version__`: for those above every layer that defines one.
            assert LEVEL[mine] <= LEVEL["offload.launch"], (
                f"{module} imports {imported} from the package that is above it"
            )
            continue
        assert LEVEL[mine] <= LEVEL[theirs], f"{module} ({mine}) imports {imported} ({theirs}), which is not below it"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports for types count, too: two modules that need each other's names are one module."""
    names = {module_of(path) for path in MODULES}
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        if module_of(path) != PUBLIC:
            found = {each if each in names else each.rpartition(".")[0] for each in imports(path)}
            graph[module_of(path)] = (found & names) - {PUBLIC, module_of(path)}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


MOST_MODULES = 16
"""In one folder: a newcomer reads its listing at a glance."""


def test_no_folder_has_too_many_modules() -> None:
    folders = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > MOST_MODULES} == {}


MOST_ATTRIBUTES = 20
"""Of one class, which otherwise does the work of several."""


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What the methods of a class assign to ``self``."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def test_no_class_has_too_many_attributes() -> None:
    many = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and len(attributes_of(node)) > MOST_ATTRIBUTES:
                many[f"{module_of(path)}.{node.name}"] = len(attributes_of(node))
    assert many == {}


MOST_LINES = 900


def test_no_module_is_too_long() -> None:
    lengths = {module_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {module: n for module, n in lengths.items() if n > MOST_LINES} == {}


@pytest.mark.parametrize(
    "layer",
    ["offload.model", "offload.report", "offload.errors", "offload.versions", "offload.measure", "offload.adapt"],
)
def test_plain_layers_name_neither_torch_nor_ray(layer: str) -> None:
    checked = [path for path in MODULES if layer_of(module_of(path)) == layer]
    assert checked
    for path in checked:
        heavy = [i for i in imports(path) if i.split(".")[0] in ("torch", "torchvision", "timm", "ray")]
        assert heavy == [], f"{module_of(path)} imports {heavy}"


def test_model_and_decisions_do_no_io_and_read_no_clock() -> None:
    for path in MODULES:
        if layer_of(module_of(path)) in ("offload.model", "offload.adapt"):
            assert not {i.split(".")[0] for i in imports(path)} & {
                "os",
                "io",
                "time",
                "pathlib",
                "subprocess",
                "random",
            }


def test_plain_layers_load_neither_torch_nor_ray() -> None:
    plain = [
        module_of(path)
        for path in MODULES
        if layer_of(module_of(path))
        in {"offload.model", "offload.report", "offload.measure", "offload.errors", "offload.versions"}
    ]
    code = (
        f"import importlib, sys\n"
        f"for name in {plain!r}: importlib.import_module(name)\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'torchvision', 'timm', 'ray'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=800
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "without"),
    [
        # The actor of a run: it is waited for.
        ("offload.train.hub.ray_hub", {"torch", "torchvision", "timm", "pandas", "ray.data", "ray.train"}),
        # A process on every spot node.
        ("offload.train.cluster.notices", {"torch", "torchvision", "timm", "pandas", "scipy", "ray.data", "ray.train"}),
        # The entry of a job: it must be able to say that its host lacks them.
        (
            "offload.launch.sagemaker.container.entry",
            {"ray", "torch", "numpy", "scipy", "pyarrow", "boto3", "botocore"},
        ),
        ("offload.launch.ray.entry", {"ray", "torch", "numpy", "scipy", "pyarrow", "click", "offload.errors"}),
    ],
)
def test_what_starts_soon_imports_little(module: str, without: set[str]) -> None:
    code = f"import sys, {module}\nprint(sorted({without!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=800
    )
    assert done.stdout.strip() == "[]"


def test_the_check_sees_imports_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "offload" / "model" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("import offload.cli.main\ndef f():\n    from ..train import context\n    from . import y\n")
    assert list(imports(path)) == ["offload.cli.main", "offload.train.context", "offload.model.y"]
    with pytest.raises(AssertionError, match=r"imports offload.cli.main \(offload.cli\), which is not below it"):
        check_imports(path)
