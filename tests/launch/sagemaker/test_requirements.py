"""A user's requirements.txt against offload's own and the job's image: what would fail on paid instances is found before."""

from __future__ import annotations

import html
import re
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.launch.requirements import check_targets, names_in, own_requirements, requirements
from offload.launch.sagemaker import resolve
from offload.launch.sagemaker.images import Contents
from offload.launch.sagemaker.resolve import check_requirements, read_answer

IMAGE = Contents(python="3.12", torch="2.8.0")


def wheel(index: Path, name: str, version: str, *, needs: tuple[str, ...] = (), python: str = ">=3.9") -> None:
    """Add a wheel of nothing to a package index in a folder."""
    info, file_name = f"{name}-{version}.dist-info", f"{name}-{version}-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / file_name, "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join([*lines, *(f"Requires-Dist: {each}" for each in needs)]) + "\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    with (folder / "index.html").open("a") as page:
        page.write(f'<a href="{file_name}" data-requires-python="{html.escape(python)}">{file_name}</a>\n')


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A requirements.txt to fill in. uv finds packages in a folder alone."""
    wheels = tmp_path / "index"
    for version in ("2.4.0", "2.8.0", "2.9.0"):
        wheel(wheels, "torch", version)
        wheel(wheels, "torchvision", version, needs=(f"torch=={version}",))
    for version in ("1.0", "2.0"):
        wheel(wheels, "plain", version)
    wheel(wheels, "framework", "1.0", needs=("plain>=2",))
    wheel(wheels, "new", "1.0", python=">=3.13")
    monkeypatch.setenv("UV_DEFAULT_INDEX", wheels.as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(cache))
    monkeypatch.delenv("UV_OFFLINE", raising=False)
    monkeypatch.setenv("COLUMNS", "40")  # a narrow terminal, in which uv breaks its lines
    monkeypatch.setattr(resolve, "requirements", lambda own: ["framework"])
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine" / "requirements.txt"


@pytest.fixture
def silent_server() -> Iterator[int]:
    """The port of one that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("text", ["", "# nothing\n", "plain==2.0\n", "torchvision\n", "-r more.txt\n"])
def test_what_fits_is_told(own: Path, text: str) -> None:
    own.write_text(text)
    own.with_name("more.txt").write_text("plain>1\n")
    assert check_requirements(own, IMAGE) == "requirements.txt: can be installed with offload on Python 3.12."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plain==1.0\n", ("plain==1.0", "framework", "Change requirements.txt.")),
        ("plain==7\n", ("plain==7",)),
        ("torch==2.4.0\n", ("torch==2.4.0", "or take another image: torch==2.8.0 is the image's own")),
        ("torchvision==2.9.0\n", ("torchvision==2.9.0", "or take another image")),
        ("new\n", ("new", "Python")),
        ("plainn\n", ("plainn was not found in the package registry", "correct the name")),
        ("what is this\n", ("Couldn't parse requirement", "what is this")),
        ("-r nowhere.txt\n", ("nowhere.txt",)),
        ("./nowhere\n", ("Distribution not found", "nowhere")),
        ("plain==2.0 --hash=sha256:aa\n", ("holds hashes", "without hashes")),
    ],
)
def test_what_pip_would_refuse_there_is_refused_here(own: Path, text: str, said: tuple[str, ...]) -> None:
    own.write_text(text)
    with pytest.raises(ConfigError) as error:
        check_requirements(own, IMAGE)
    assert all(each in str(error.value) for each in said), error.value
    assert str(own) in str(error.value)


def test_where_the_images_python_is_not_known_any_of_those_that_it_may_be_will_do(own: Path) -> None:
    own.write_text("new\n")
    assert "on Python 3.13 (assumed, since the image's tag does not say)" in check_requirements(own, Contents())
    own.write_text("plain==1.0\n")
    with pytest.raises(ConfigError, match=r"on Python 3\.12 or 3\.11 or 3\.13 or 3\.14 \(assumed"):
        check_requirements(own, Contents())


@pytest.mark.parametrize("why", ["index", "offline", "slow", "uv", "ours"])
def test_where_it_cannot_be_checked_a_note_says_so_and_the_launch_goes_on(
    own: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, why: str
) -> None:
    own.write_text("plain==1.0\n")
    deadline_s = resolve.DEADLINE_S
    if why == "index":
        monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    if why == "offline":
        monkeypatch.setenv("UV_OFFLINE", "1")
    if why == "slow":
        silent = request.getfixturevalue("silent_server")
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{silent}/simple")
        deadline_s = 1.0
    if why == "uv":
        monkeypatch.setattr(resolve, "_uv", lambda: None)
    if why == "ours":  # an index that lacks what offload needs proves nothing against the user
        monkeypatch.setattr(resolve, "requirements", lambda own: ["nowhere"])
    assert "not checked whether it can be installed with offload (" in check_requirements(own, IMAGE, deadline_s)


def test_a_network_that_is_off_or_a_package_that_cannot_be_built_refuses_nobody(tmp_path: Path) -> None:
    for said in (
        "error: No solution found when resolving dependencies\n  hint: the network was disabled",
        "error: Failed to build `x==1`\n  cause: gcc failed",
        "",
    ):
        answer = read_answer(1, said, tmp_path)
        assert not answer.refused
        assert not answer.solved
        assert answer.said
    drawn = "  × No solution found when resolving dependencies:\n  ╰─▶ Because a<2\n      and b.\n\n      hint: x"
    assert read_answer(1, drawn, tmp_path).said == "Because a<2 and b"


def test_ray_is_pinned_unless_the_user_names_it(tmp_path: Path) -> None:
    own, more = tmp_path / "requirements.txt", tmp_path / "more" / "base.txt"
    more.parent.mkdir()
    own.write_text("# ray\neinops==0.8.0 # ray\n")
    assert any(each.startswith("ray[data]==") for each in requirements(own))
    own.write_text("-r more/base.txt\n")
    more.write_text("-r ../requirements.txt\nRay[tune] == 2.61\n")
    assert names_in(own) == {"ray"}
    assert "ray[data]>=2.50" in requirements(own)


def test_a_link_includes_the_files_beside_it(own: Path) -> None:
    """As pip reads it there: the job's hosts have its lines in a file in the script's folder."""
    base = own.parent / "more" / "base.txt"
    base.parent.mkdir()
    base.write_text("-r common.txt\n")
    own.symlink_to(base)
    base.with_name("common.txt").write_text("plain==2.0\n")
    with pytest.raises(
        ConfigError, match=f"has the line '-r common.txt', and {re.escape(str(own.parent / 'common.txt'))} is not"
    ):
        check_targets(own)
    own.with_name("common.txt").write_text("Ray==2.61\n")
    check_targets(own)
    assert names_in(own) == {"ray"}
    own.with_name("common.txt").write_text("plain==2.0\n")
    base.with_name("common.txt").unlink()
    assert check_requirements(own, IMAGE) == "requirements.txt: can be installed with offload on Python 3.12."


def test_packages_lie_where_pip_runs_and_included_files_beside_the_file_that_names_them(own: Path) -> None:
    base = own.parent / "more" / "base.txt"
    (base.parent / "lib").mkdir(parents=True)
    own.write_text("-r more/base.txt\n")
    base.write_text("-r common.txt\n-e ./lib\n")
    base.with_name("common.txt").write_text("plain==2.0\n")
    (base.parent / "lib" / "pyproject.toml").write_text("")
    with pytest.raises(ConfigError, match=f"the line '-e ./lib', and {re.escape(str(own.parent / 'lib'))} is not"):
        check_targets(own)
    (own.parent / "lib").mkdir()
    (own.parent / "lib" / "pyproject.toml").write_text("")
    check_targets(own)


def test_only_ray_is_pinned() -> None:
    """A user's stack may pin NumPy, pandas or PyArrow as it likes, within what offload can use."""
    names = {each for each in requirements() if "==" in each}
    assert {each.partition("[")[0] for each in names} == {"ray"}
    assert not {"torch", "torchvision"} & {each.partition(">")[0] for each in requirements()}


def test_a_byte_order_mark_stays_behind(tmp_path: Path) -> None:
    own = tmp_path / "requirements.txt"
    own.write_bytes("\ufeffeinops\n".encode())
    assert own_requirements(own) == "einops\n"
