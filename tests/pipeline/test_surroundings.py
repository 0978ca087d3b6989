"""What a program has set up around its objects, as another process finds it: the script, the variables, the search path."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.pipeline.pool.packed_recipe import pack
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.program import main_module, surroundings
from offload.pipeline.program.main_module import has_guard, names_of, settings_of
from offload.pipeline.program.surroundings import Program
from offload.pipeline.program.variables import removed, travelling
from tests.helpers import ROOT

NAMES = st.sampled_from(["PATH", "HOME", "MINE", "RAY_X", "OMP_NUM_THREADS", "SM_HOSTS", "LANG", "OFFLOAD_X"])
ENVIRONMENTS = st.dictionaries(NAMES, st.sampled_from("abc"))


@given(ENVIRONMENTS, ENVIRONMENTS)
def test_a_variable_of_a_host_travels_only_once_the_program_has_changed_it(
    now: dict[str, str], start: dict[str, str]
) -> None:
    sent = travelling(now, start)
    assert sent.items() <= now.items()
    assert not sent.keys() & {"RAY_X", "OMP_NUM_THREADS", "OFFLOAD_X"}
    for name in {"MINE", "LANG"} & now.keys():
        assert name in sent
    for name in {"PATH", "HOME", "SM_HOSTS"} & now.keys():
        assert (name in sent) == (start.get(name) != now[name])
    assert not set(removed(now, start)) & now.keys()
    assert not set(removed(now, start)) & {"RAY_X", "OMP_NUM_THREADS", "OFFLOAD_X"}


@pytest.mark.parametrize(
    ("source", "guarded"),
    [
        (b"if __name__ == '__main__':\n    main()", True),
        (b"if '__main__' == __name__ and True: main()", True),
        (b"def f():\n    if __name__ == '__main__': pass\nf()", False),
        (b"main()", False),
        (b"# -*- coding: latin-1 -*-\nname = '\xe9'\nif __name__ == '__main__': pass", True),
    ],
)
def test_a_script_runs_again_only_if_it_asks_for_its_name_at_its_top_level(source: bytes, guarded: bool) -> None:
    assert has_guard(source) is guarded


def test_settings_are_what_a_script_changes_in_other_modules() -> None:
    source = b"""
import os, torch.nn as nn
from PIL import Image, ImageFile
from pillow_heif import register_heif_opener as register
ImageFile.LOAD_TRUNCATED_IMAGES = True
register()
os.environ["A"] = "b"
nn.init.own = 3
image = Image.open("x")
Image.open("x").load()
def f(): ImageFile.LOAD_TRUNCATED_IMAGES = False
f()
own = [1]
own[0] = 2
"""
    found = [(setting.line, setting.module) for setting in settings_of(source)]
    assert found == [(5, "PIL.ImageFile"), (6, "pillow_heif.register_heif_opener"), (7, "os"), (8, "torch.nn")]


def test_names_are_those_that_a_script_has_without_its_guard() -> None:
    source = b"""
a = b = 1
with open("x") as c, d: e: int = 2
try:
    [f, g.h] = 1, 2
except ValueError: i += 1
def j(): k = 1
class L: m = 1
if __name__ == "__main__": n = 1
"""
    assert sorted(names_of(source)) == ["a", "b", "c", "e", "f", "i"]


@pytest.mark.parametrize("guarded", [True, False])
def test_what_cannot_be_pickled_is_found_in_the_script_that_has_run_again(tmp_path: Path, guarded: bool) -> None:
    """As under spawn: the lock of the other process is the one that the script makes there."""
    (tmp_path / "script.py").write_text(
        """
import sys, threading
from offload.pipeline.program import pickling, surroundings

_lock = threading.Lock()

def locked():
    return _lock.locked()

def work():
    assert _lock.acquire()
    program = surroundings.Program.here()
    sys.stdout.buffer.write(pickling.dumps((program, locked)))
"""
        + ("if __name__ == '__main__':\n    work()" if guarded else "work()")
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    sent = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, timeout=800, check=False
    )
    assert (sent.returncode == 0) is guarded
    if not guarded:
        assert b"cannot pickle '_thread.lock'" in sent.stderr
        return
    load = (
        "import sys\nfrom offload.pipeline.program import pickling\nprint(pickling.loads(sys.stdin.buffer.read())[1]())"
    )
    done = subprocess.run(
        [sys.executable, "-c", load], input=sent.stdout, env=env, capture_output=True, timeout=800, check=False
    )
    assert done.stdout.split() == [b"False"], done.stderr.decode()


def test_the_program_itself_enters_nothing(tmp_path: Path) -> None:
    before = surroundings.entered(), os.getcwd(), list(sys.path), dict(os.environ), sys.modules["__main__"]
    here = pickle.loads(pickle.dumps(Program.here()))
    assert here == Program.here()
    here.enter()
    assert (surroundings.entered(), os.getcwd(), sys.path, dict(os.environ), sys.modules["__main__"]) == before


OTHER = """
import os, pickle, sys
os.environ["OWN"] = "own"
given = sys.stdin.buffer.read()
import io
stream = io.BytesIO(given)
from offload.pipeline.program import surroundings, main_module
from offload.pipeline.program.remedies import image_remedy, remedy
"""


def _in_another_process(programs: list[Program], code: str, folder: Path) -> str:
    """What ``code`` prints in a process that can unpickle these programs, one after another, by ``pickle.load(stream)``."""
    given = b"".join(map(pickle.dumps, programs))
    done = subprocess.run(
        [sys.executable, "-c", OTHER + code],
        input=given,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_a_process_follows_one_program_after_another_and_gets_its_own_variables_back(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        os.mkdir(folder)
    programs = [
        Program(folder=folder, path=(folder,), arguments=("script", folder), variables=(("SET", folder),), unset=unset)
        for folder, unset in zip(folders, ((), ("OWN", "SET_BEFORE")), strict=True)
    ]
    programs[0] = surroundings.replace(programs[0], variables=(("OWN", "changed"), ("SET", "a"), ("SET_BEFORE", "1")))
    last = surroundings.replace(programs[0], variables=(), unset=())
    code = """
for _ in range(3):
    pickle.load(stream)
    print(os.getcwd(), sys.path[0], sys.argv[1], *(os.environ.get(name) for name in ("OWN", "SET", "SET_BEFORE")))
"""
    a, b = folders
    printed = _in_another_process([*programs, last], code, tmp_path)
    assert printed.splitlines() == [
        f"{a} {a} {a} changed a 1",
        f"{b} {b} {b} None {b} None",
        f"{a} {a} {a} own None None",
    ]


def _program(tmp_path: Path, source: str, *, guarded: bool = True, folder: str = "") -> Program:
    main = main_module.MainModule(str(tmp_path / "script.py"), source.encode(), None, guarded)
    return Program(folder=folder or str(tmp_path), path=(str(tmp_path),), main=main)


def test_a_script_runs_once_for_all_recipes_and_is_then_the_main_module(tmp_path: Path) -> None:
    source = """
import dataclasses, os
os.environ["RUNS"] = os.environ.get("RUNS", "") + "x"
@dataclasses.dataclass
class Point:
    x: "int" = 1
if __name__ == "__main__":
    raise SystemExit("the guard")
"""
    once = _program(tmp_path, source)
    other = surroundings.replace(once, arguments=("other",))
    code = """
pickle.load(stream), pickle.load(stream)
import __main__
print(os.environ["RUNS"], __main__.Point(), __main__.__name__, __main__ is sys.modules["__mp_main__"])
print(pickle.loads(pickle.dumps(__main__.Point())))
"""
    printed = _in_another_process([once, other], code, tmp_path)
    assert printed.splitlines() == ["x Point(x=1) __mp_main__ True", "Point(x=1)"]


def test_what_the_program_has_changed_since_outlasts_the_script(tmp_path: Path) -> None:
    source = "import os, sys\nos.environ['SET'] = 'top'\nsys.argv.append('--more')\nif __name__ == '__main__': pass"
    program = surroundings.replace(_program(tmp_path, source), arguments=("x", "--more"), variables=(("SET", "later"),))
    code = "pickle.load(stream)\nprint(os.environ['SET'], *sys.argv)"
    assert _in_another_process([program], code, tmp_path).split() == ["later", "x", "--more"]


def test_a_script_that_fails_leaves_what_it_has_set_up_and_says_where_it_ended(tmp_path: Path) -> None:
    source = "import os\nos.environ['SET'] = '1'\nopen('/nonexistent/log')\nif __name__ == '__main__': pass"
    code = """
pickle.load(stream)
print(os.environ["SET"], main_module.problem())
print(remedy(ValueError("x")))
"""
    first, second = _in_another_process([_program(tmp_path, source)], code, tmp_path).splitlines()
    assert first.startswith("1 ")
    assert "script.py" in first
    assert "line 3" in first
    assert "/nonexistent/log" in first
    assert "line 3" in second


def test_a_script_without_a_guard_does_not_run_and_its_settings_explain_errors_of_their_library(tmp_path: Path) -> None:
    source = "import json, os\njson.scanner.own = 1\nos.environ['SET'] = '1'\nimport PIL\nPIL.own = 1\nwork()"
    code = """
pickle.load(stream)
import json
try:
    json.loads("{")
except ValueError as error:
    print("SET" in os.environ, remedy(error))
print("|", remedy(ValueError("of the data set alone")))
print(image_remedy())
"""
    first, second, third = _in_another_process([_program(tmp_path, source, guarded=False)], code, tmp_path).splitlines()
    assert first.startswith("False ")
    assert "line 2 (json.scanner.own = 1)" in first
    assert "worker_init_fn" in first
    assert "line 3" not in first
    assert second.strip() == "|"
    assert "line 5 (PIL.own = 1)" in third


def test_a_program_without_a_guard_is_warned_of_settings_that_will_be_missing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        """
import os, sys, torch
from PIL import ImageFile
from offload.pipeline.program import remedies
torch.backends.cudnn.benchmark = True
torch.manual_seed(1)
os.environ["SET"] = "1"
sys.path.insert(0, "lib")
torch.set_default_dtype(torch.float64)
ImageFile.LOAD_TRUNCATED_IMAGES = True
print(remedies.warning())
"""
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, timeout=800, check=True, capture_output=True, text=True
    )
    assert (
        "line 9 (torch.set_default_dtype(torch.float64)) and line 10 (ImageFile.LOAD_TRUNCATED_IMAGES = True)"
        in done.stdout
    )
    assert done.stdout.count("line ") == 2


def test_in_a_fork_of_the_program_a_script_without_a_guard_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        """
import json, os, pickle, sys
from offload.pipeline.program.remedies import remedy
from offload.pipeline.program.surroundings import Program, entered

json.scanner.own = 1
sent = pickle.dumps(Program.here())
if (child := os.fork()) == 0:
    pickle.loads(sent)
    try:
        json.loads("{")
    except ValueError as error:
        os._exit(3 if entered() is None or remedy(error) else 0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=env, timeout=800, check=False).returncode == 0
    )


def test_an_error_about_a_missing_module_or_file_names_the_folder_that_the_node_lacks(tmp_path: Path) -> None:
    program = surroundings.replace(
        _program(tmp_path, "pass", folder="/nonexistent/work"),
        host="mine",
        own_folders=("/nonexistent/lib", str(tmp_path)),
    )
    code = """
pickle.load(stream)
for fails in ("import nonexistent_module", "open('relative/file')", "open('/absolute/file')"):
    try:
        exec(fails)
    except Exception as error:
        print(remedy(error))
"""
    module, file, absolute = _in_another_process([program], code, tmp_path).split("\n")[:3]
    assert "mine also finds modules in /nonexistent/lib," in module
    assert "beside the script" in module
    assert "/nonexistent/work" in file
    assert "absolute path" in file
    assert not absolute


def test_a_recipe_whose_module_is_not_on_the_node_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "only_on_the_host.py").write_text("def transform(batch):\n    return batch\n")
    monkeypatch.syspath_prepend(library)
    transform = importlib.import_module("only_on_the_host").transform
    try:
        packed = pack(Recipe(transform=transform, kind="batch", seed=0)).tobytes()
    finally:
        del sys.modules["only_on_the_host"]
    library.rename(tmp_path / "elsewhere")
    code = """
import numpy as np
from offload.pipeline.pool.packed_recipe import loaded
loaded(np.frombuffer(sys.stdin.buffer.read(), dtype=np.uint8))
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys{code}"],
        input=packed, cwd=ROOT, capture_output=True, text=False, timeout=800, check=False,
    )  # fmt: skip
    said = done.stderr.decode().splitlines()[-1]
    assert "RunError: a data set raised ModuleNotFoundError: No module named 'only_on_the_host'" in said
    assert f"also finds modules in {library}" in said


def test_while_a_script_runs_again_it_starts_no_work() -> None:
    main_module.refuse_again("work")
    main_module._running.append(main_module.MainModule("script.py", b""))
    try:
        with pytest.raises(ConfigError, match="would start work"):
            main_module.refuse_again("work")
    finally:
        main_module._running.pop()
