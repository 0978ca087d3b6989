"""A preprocessing process sees what a spawned worker process of torch sees: programs with random set-ups, on a cluster and without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

DEADLINE_S = 800.0

SETUPS = {
    "search path": ("sys.path.insert(0, os.path.join(HERE, 'lib'))", "__import__('library_of_the_program').NAME"),
    "another search path": ("sys.path.append(os.path.join(HERE, 'nothing'))", "own_path()[:entries]"),
    "arguments": ("sys.argv.append('--more')", "list(dict.fromkeys(sys.argv))"),  # spawn adds it twice
    "working folder": ("os.chdir(os.path.join(HERE, 'elsewhere'))", "os.getcwd()"),
    "a variable": ("os.environ['OF_THE_PROGRAM'] = 'set'", "os.environ.get('OF_THE_PROGRAM')"),
    "a variable changed": ("os.environ['GIVEN'] = 'changed'", "os.environ.get('GIVEN')"),
    "a variable removed": ("os.environ.pop('GIVEN_TOO', None)", "os.environ.get('GIVEN_TOO')"),
    "a variable of the host": ("os.environ['XDG_MINE'] = 'mine'", "os.environ.get('XDG_MINE')"),
    "the time zone": ("os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()", "time.strftime('%z')"),
    "truncated images": ("ImageFile.LOAD_TRUNCATED_IMAGES = True", "ImageFile.LOAD_TRUNCATED_IMAGES"),
    "large images": ("Image.MAX_IMAGE_PIXELS = 12345", "Image.MAX_IMAGE_PIXELS"),
    "an opener": ("Image.register_extension('MINE', '.mine')", "'.mine' in Image.registered_extensions()"),
    "a plug-in": ("import plug_in", "'.plugged' in Image.registered_extensions()"),
    "default type": ("torch.set_default_dtype(torch.float64)", "str(torch.zeros(1).dtype)"),
    "warnings": ("warnings.filterwarnings('ignore', 'mine')", "any(f[1] and f[1].pattern == 'mine' for f in warnings.filters)"),
    "logging": ("logging.getLogger('mine').setLevel(logging.ERROR)", "logging.getLogger('mine').level"),
    "printing": ("np.set_printoptions(precision=2)", "np.get_printoptions()['precision']"),
    "types of files": ("mimetypes.add_type('image/mine', '.mine')", "mimetypes.guess_type('a.mine')"),
    "a name of the script": ("OWN = 7", "getattr(sys.modules['__main__'], 'OWN', None)"),
}  # fmt: skip
"""Set-ups of a program: the statement, and what a data set sees of it."""

PROGRAM = """
import json, logging, mimetypes, os, sys, time, warnings
import numpy as np, torch
from PIL import Image, ImageFile

HERE = os.path.dirname(os.path.abspath(__file__))
{top}

class Seen(torch.utils.data.Dataset):
    def __init__(self, entries):
        self.entries = entries
    def __len__(self):
        return 2
    def __getitem__(self, i):
        entries, seen = self.entries, {{}}
        for name, expression in json.loads(PROBES).items():
            try:
                seen[name] = repr(eval(expression, dict(globals_of_the_data_set(), entries=entries)))
            except Exception as error:
                seen[name] = type(error).__name__
        return json.dumps(seen)

def globals_of_the_data_set():
    return dict(
        json=json, logging=logging, mimetypes=mimetypes, os=os, sys=sys, time=time, warnings=warnings, np=np, torch=torch,
        Image=Image, ImageFile=ImageFile, own_path=own_path,
    )

def own_path():
    return [entry for entry in dict.fromkeys(sys.path) if "/ray/" not in entry]  # importing Ray adds one

PROBES = {probes!r}

if __name__ == "__main__":
    {guarded}
    kind = os.environ.pop("KIND")
    if kind == "torch":
        from torch.utils.data import DataLoader
    else:
        from offload import DataLoader
    told = []
    for between in ("one", "two", None):
        if between is None:
            del os.environ["BETWEEN"]
        else:
            os.environ["BETWEEN"] = between
        options = dict(num_workers=1) if kind == "cluster" else dict(num_workers=1, multiprocessing_context="spawn")
        loader = DataLoader(Seen(len(own_path())), batch_size=None, **options)
        told += list(loader)
    with open(sys.argv[1], "w") as file:
        json.dump([json.loads(one) for one in told], file)
"""
PLACES = st.sampled_from(["top", "guarded", "absent"])


def _written(folder: Path, places: dict[str, str]) -> Path:
    """The script of a program with each set-up at its place."""
    (folder / "lib").mkdir()
    (folder / "elsewhere").mkdir()  # Ray adds the working folder to the search path of its processes
    (folder / "lib" / "library_of_the_program.py").write_text("NAME = 'found'\n")
    (folder / "plug_in.py").write_text("from PIL import Image\nImage.register_extension('PLUGGED', '.plugged')\n")
    at = {place: [SETUPS[name][0] for name, found in places.items() if found == place] for place in ("top", "guarded")}
    probes = {name: probe for name, (_, probe) in SETUPS.items()} | {"between": "os.environ.get('BETWEEN')"}
    source = PROGRAM.format(
        top="\n".join(at["top"]), guarded="\n    ".join(["pass", *at["guarded"]]), probes=json.dumps(probes)
    )
    script = folder / "program.py"
    script.write_text(source)
    return script


def _seen(script: Path, kind: str) -> list[dict[str, str]]:
    """What the data set of a program sees in each of its samples."""
    told = script.with_name(f"{kind}.json")
    env = {**os.environ, "KIND": kind, "GIVEN": "given", "GIVEN_TOO": "too"}
    if kind == "cluster":
        env["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, str(script), str(told)],
        cwd=script.parent, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, str]] = json.loads(told.read_text().replace(str(told), "FILE"))
    return seen


# Each example starts two programs and their processes.
@settings(max_examples=2, phases=(Phase.explicit, Phase.generate), suppress_health_check=[HealthCheck.too_slow])
@given(st.fixed_dictionaries(dict.fromkeys(SETUPS, PLACES)))
def test_a_preprocessing_process_sees_what_a_spawned_worker_of_torch_sees(places: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = _written(Path(folder), places)
        expected = _seen(script, "torch")
        found = {kind: _seen(script, kind) for kind in ("cluster", "this machine")}
    assert [one["between"] for one in expected] == ["'one'"] * 2 + ["'two'"] * 2 + ["None"] * 2
    for kind, seen in found.items():
        differs = [
            {name: (here[name], there[name]) for name in there if here[name] != there[name]}
            for here, there in zip(seen, expected, strict=True)
        ]
        assert not any(differs), f"found and expected on {kind} with {places}"


def test_every_set_up_at_the_top_reaches_preprocessing(tmp_path: Path) -> None:
    seen = _seen(_written(tmp_path, dict.fromkeys(SETUPS, "top")), "cluster")[0]
    assert seen["search path"] == "'found'"
    assert seen["working folder"] == repr(str(tmp_path / "elsewhere"))
    assert (seen["a variable"], seen["a variable changed"], seen["a variable removed"]) == (
        "'set'",
        "'changed'",
        "None",
    )
    for name in ("truncated images", "an opener", "a plug-in", "warnings"):
        assert seen[name] == "True", name
    assert (seen["default type"], seen["large images"]) == ("'torch.float64'", "12345")
