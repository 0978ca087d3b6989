"""No module outside of the room imports or changes what is private to Ray, and the room needs little of offload."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import MODULES, ROOT, imports, module_of

ROOM = "offload.ray_private"
# Ray Train's own, and a script that runs before anything may be imported.
EXCEPTIONS = {"offload.preload.python"}  # it may import nothing
# Attributes of Ray's objects and functions of its developers that its documentation does not promise.
OF_OBJECTS = {
    *("_actor_id", "_ray_actor_id", "_logical_plan", "_global_node", "_do_request", "_server_ray_version"),
    *("_map_actor_context", "_ray_remote_args", "gcs_client", "core_worker", "iter_internal_ref_bundles"),
}
IN_TEXT = re.compile(r"(?:ray|raylet)\.(?:\w+\.)*\w+")


def is_private(name: str) -> bool:
    """Whether a dotted name is private to Ray."""
    first, *rest = name.split(".")
    hidden = any(part.startswith("_") and not part.endswith("__") for part in rest)
    return first == "ray" and (hidden or rest[:2] == ["core", "generated"])


def private_uses(path: Path) -> Iterator[str]:
    """What a file uses of Ray's private interface: by import, as an attribute, by name in a text, or as a keyword."""
    yield from filter(is_private, imports(path))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(ast.unparse(node)) or node.attr in OF_OBJECTS:
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield from filter(is_private, IN_TEXT.findall(node.value) if " " not in node.value else ())
            yield from {node.value} & OF_OBJECTS
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "ray.init":
            yield from (word.arg for word in node.keywords if word.arg is not None and word.arg.startswith("_"))


def test_only_the_room_knows_what_is_private_to_ray() -> None:
    outside = [path for path in MODULES if not module_of(path).startswith(ROOM) and module_of(path) not in EXCEPTIONS]
    assert {module_of(path): uses for path in outside if (uses := sorted(set(private_uses(path))))} == {}


def test_benchmarks_use_what_is_public() -> None:
    """A release of Ray must not break what measures it."""
    benchmarks = (ROOT / "benchmarks").rglob("*.py")
    assert {path.name: uses for path in benchmarks if (uses := sorted(set(private_uses(path))))} == {}


def test_the_room_imports_little_of_offload() -> None:
    allowed = (ROOM, "offload.errors", "offload.process.forks")
    for path in MODULES:
        if module_of(path).startswith(ROOM):
            ours = [name for name in imports(path) if name.split(".")[0] == "offload"]
            assert [name for name in ours if not name.startswith(allowed)] == []
            # A name of a package is not one of its module: `from offload.process import forks`.


@pytest.mark.parametrize(
    "text",
    [
        "import ray._private.worker",
        "from ray._raylet import GcsClient",
        "from ray.core.generated import gcs_pb2",
        "def f():\n    from ray.data._internal.planner import create_planner",
        "import ray\nray._private.worker.global_worker",
        "import ray\nray.data._map_actor_context = None",
        "import importlib\nimportlib.import_module('ray._private.worker')",
        "actor._actor_id",
        "getattr(dataset, 'iter_internal_ref_bundles')",
        "import ray\nray.init(_system_config={})",
    ],
)
def test_the_check_sees_every_way_to_something_private(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_layers.ROOT", tmp_path)
    path = tmp_path / "offload" / "x.py"
    path.parent.mkdir()
    path.write_text(text)
    assert list(private_uses(path))


@pytest.mark.parametrize(
    "text", ["import ray\nray.__version__", "'''About ray._private.worker.'''", "self._actor", "'array._mmap'"]
)
def test_the_check_leaves_what_is_public(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_layers.ROOT", tmp_path)
    path = tmp_path / "offload" / "x.py"
    path.parent.mkdir()
    path.write_text(text)
    assert not list(private_uses(path))
