"""What travels between processes arrives as the script had it; what cannot travel is named."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.errors import RunError
from offload.pipeline.preprocessing.unpicklable import used
from offload.pipeline.program import pickling
from tests.helpers import ROOT

SCRIPT = """
import io, threading

lock = threading.Lock()
settings = {"lock": lock}

class Writer:
    def __init__(self):
        self.file = open("/dev/null", "w")

writer = Writer()

def helper():
    return writer

def train(ctx):
    return helper()

def nested(ctx):
    return [settings for _ in "a"]

def defaults(ctx, log=lock): ...

class Data:
    @property
    def size(self):
        return self

    @staticmethod
    def read(i):
        with lock:
            return i

    def __getitem__(self, i):
        return self.read(i)

data = [Data()]

def around(lock):
    return lambda ctx: lock

closure = around(lock)

def ticks():
    yield 1

tick = ticks()

def steps(ctx):
    return next(tick)

def fine(ctx):
    return io
"""


def test_functions_and_classes_of_a_script_arrive_as_they_are() -> None:
    """The cases of the program: what a forked process would have kept, or an import by name would find."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.travelling"], cwd=ROOT, stdout=subprocess.PIPE, timeout=800, check=True
    )
    assert json.loads(done.stdout) == {}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train", "helper() uses the global writer (a Writer)"),
        ("nested", "nested() uses the global settings (a dict)"),
        ("defaults", "defaults() uses a default argument (a lock)"),
        ("data", "Data.read() uses the global lock (a lock)"),
        ("closure", "<lambda>() uses the variable lock of the function around it (a lock)"),
        ("steps", "steps() uses the global tick (a generator)"),
    ],
)
def test_the_function_and_its_global_that_cannot_travel_are_named(name: str, words: str) -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, script)
    with pytest.raises(Exception, match=r"annot pickle") as caught:
        pickling.dumps(script[name])
    found = used((3, script[name], None), caught.value)
    assert found is not None
    assert found.startswith(f"{words}, which cannot be pickled (")
    assert found.endswith("). Make it within the function, at the first call: each process then has its own.")
    script["writer"].file.close()


def test_nothing_is_named_where_no_function_is_to_blame() -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, script)
    script["writer"].file.close()
    pickling.dumps(script["fine"])
    assert used(threading.Lock(), TypeError("a lock")) is None


def test_locks_do_not_travel_though_ray_serve_registers_them() -> None:
    import ray.serve  # noqa: F401 - it registers locks with Ray's pickles when it is imported

    for value in (threading.Lock(), threading.RLock()):
        with pytest.raises(TypeError, match="cannot pickle"):
            pickling.dumps(value)


def test_what_a_library_holds_is_found_there_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.lastResort
    packed = pickling.dumps({"handler": handler})
    assert pickle.loads(packed)["handler"] is handler
    monkeypatch.setattr(logging, "lastResort", None)
    with pytest.raises(
        RunError, match=r"logging\.lastResort is a _StderrHandler in the program, .* set it after the import"
    ):
        pickle.loads(packed)


def test_a_class_that_the_program_does_not_have_comes_with_its_content() -> None:
    def make() -> Callable[[], Any]:
        class Made:
            value = 3

        return Made

    made = make()
    here = pickle.loads(pickling.dumps_back(made()))
    assert type(here) is made
    assert here.value == 3
    packed = pickling.dumps_back(made())
    there = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).value)"],
        input=packed, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=800,
    )  # fmt: skip
    assert there.stdout.strip() == b"3"


BY_PATH = """
import functools

FACTOR = 2

class Twice:
    def __call__(self, x):
        return FACTOR * x

def three():
    return 3
"""


def test_what_a_module_loaded_by_its_path_defines_arrives_as_the_program_has_it(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text(BY_PATH)
    spec = importlib.util.spec_from_file_location("settings_by_path", tmp_path / "settings.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["settings_by_path"] = module
    try:
        spec.loader.exec_module(module)
        module.FACTOR = 5  # such as an argument of the command line
        content = pickling.dumps([module.Twice(), module.three, module, functools])
    finally:
        del sys.modules["settings_by_path"]
    code = """
twice, three, module, functools = pickling.loads(sys.stdin.buffer.read())
print(twice(4), three(), module.FACTOR, module.__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom offload.pipeline.program import pickling\n{code}"],
        input=content, cwd=ROOT, capture_output=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.stdout.decode().split() == ["20", "3", "5", "settings_by_path"], done.stderr.decode()


def test_an_importable_module_travels_by_its_name() -> None:
    from xml.etree import ElementTree

    from tests import helpers

    assert len(pickling.dumps([helpers, helpers.write_jpegs, ElementTree, ElementTree.XMLParser])) < 1000
