"""Every part is active on the tested Ray, says what it is for and what its absence costs, and notices what a Ray lacks."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import offload.ray_private
from offload.ray_private.part import ABSENT, Part
from offload.ray_private.parts import PARTS, found_parts

each_part = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)


def part(*needs: str) -> Part:
    return Part(name="a part", purpose="", without="", cost="", needs=needs)


def test_all_parts_of_the_room_are_listed_once() -> None:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(offload.ray_private.__path__, "offload.ray_private.")
    ]
    known = {id(value) for module in modules for value in vars(module).values() if isinstance(value, Part)}
    assert {id(each) for each in PARTS} == known
    assert len(PARTS) == len(known) == len({each.name for each in PARTS})


@each_part
def test_the_tested_ray_has_it(part: Part) -> None:
    assert part.lacking() is None, (
        f"{part.name}: Ray has changed. Mend it in offload/ray_private, or offload does without"
    )
    assert part.available()


@each_part
def test_it_says_what_it_is_for(part: Part) -> None:
    for text in (part.name, part.purpose, part.without, part.cost):
        assert text
        assert not text.endswith("."), "a part of a sentence"
    assert part.needs


def lacking(module: str, path: str | None, parameters: str | None) -> ModuleType | None:
    """A module without this name or parameter; None instead of a module that is missing."""
    if path is None:
        return None
    stand_in = ModuleType(module)
    *above, name = path.split(".")
    inner: Any = stand_in
    for holder in above:
        setattr(inner, holder, type(holder, (), {}))
        inner = getattr(inner, holder)
    if parameters:
        setattr(inner, name, lambda: None)
    return stand_in


@each_part
def test_it_is_absent_if_ray_lacks_anything_that_it_needs(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    for need in part.needs:
        match = re.fullmatch(r"([\w.]+)(?::([\w.]+))?(?:\((.*)\))?", need)
        assert match is not None
        module, path, parameters = match.groups()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, lacking(module, path, parameters))
            assert not part.available(), need
            assert part.lacking() is not None
            assert part.use(lambda: "private", otherwise=lambda: "public") == "public"
    assert part.use(lambda: "private", otherwise=lambda: "public") == "private"


def test_fields_and_attributes_of_objects_count() -> None:
    class Node:
        declared: int

        def __init__(self) -> None:
            self.constructed = 1

    module = ModuleType("a_module")
    module.Node = Node  # type: ignore[attr-defined]
    sys.modules["a_module"] = module
    try:
        assert part("a_module:Node.declared", "a_module:Node.constructed").available()
        assert part("a_module:Node.other").lacking() == "a_module:Node.other"
    finally:
        del sys.modules["a_module"]


def test_a_keyword_that_a_function_takes_from_all_keywords_counts() -> None:
    assert part("ray:init(address, _system_config)").available()
    assert not part("ray:init(_no_such_keyword)").available()


def test_a_module_that_fails_as_it_is_imported_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    assert part("broken_module").lacking() == "broken_module"


@pytest.mark.parametrize("error", [AttributeError, ImportError, TypeError, KeyError, IndexError])
def test_a_part_that_has_changed_otherwise_is_done_without(error: type[Exception]) -> None:
    def private() -> str:
        raise error

    assert part().use(private, otherwise=lambda: "public") == "public"


def test_an_error_of_the_cluster_is_no_change() -> None:
    def private() -> str:
        raise ConnectionError("refused")

    with pytest.raises(ConnectionError, match="refused"):
        part().use(private, otherwise=lambda: "public")


def test_tests_leave_parts_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ABSENT, f"{PARTS[0].name},{PARTS[2].name}")
    assert [each.name for each in found_parts() if not each.active] == [PARTS[0].name, PARTS[2].name]
    monkeypatch.setenv(ABSENT, "all")
    assert not any(each.active for each in found_parts())
    assert PARTS[0].use(lambda: "private", otherwise=lambda: "public") == "public"
