"""The demo's data set: real JPEGs, labels that are true, handwriting kept apart, made once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from offload import demo_data
from offload.demo_data import HEIGHT, WIDTH, DemoData, make_demo_data
from offload.errors import ConfigError

IMAGES = 60


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoData]:
    out = tmp_path_factory.mktemp("demo") / "data"
    return out, make_demo_data(out, images=IMAGES)


def digests(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*.jpg")}


def test_layout_and_counts(made: tuple[Path, DemoData]) -> None:
    out, data = made
    assert (data.train, data.val) == (out / "train", out / "val")
    assert (data.train_images, data.val_images, data.classes) == (48, 12, 10)
    files = sorted(out.rglob("*.jpg"))
    assert len(files) == IMAGES
    assert data.total_bytes == sum(file.stat().st_size for file in files)
    for split in (data.train, data.val):
        assert sorted(folder.name for folder in split.iterdir()) == [str(digit) for digit in range(10)]
        assert all(any(folder.iterdir()) for folder in split.iterdir())


def test_images_are_photographic(made: tuple[Path, DemoData]) -> None:
    out, data = made
    for file in sorted(out.rglob("*.jpg"))[:10]:
        with Image.open(file) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (WIDTH, HEIGHT))
    assert 20_000 < data.total_bytes / IMAGES < 100_000


def test_second_call_returns_at_once_and_same_arguments_give_the_same_files(
    made: tuple[Path, DemoData], tmp_path: Path
) -> None:
    out, data = made
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.jpg")}
    assert make_demo_data(out, images=IMAGES) == data
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*.jpg")} == before
    make_demo_data(tmp_path / "again", images=IMAGES)
    assert digests(tmp_path / "again") == digests(out)


def test_a_folder_at_which_nobody_may_look_is_told_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="cannot be read: File name too long; name another folder"):
        make_demo_data(Path("x" * 300), images=IMAGES)  # too long for a name


def test_other_arguments_replace_it(tmp_path: Path) -> None:
    out = tmp_path / "data"
    make_demo_data(out, images=20)
    first = digests(out)
    seen: list[tuple[int, int]] = []
    data = make_demo_data(out, images=20, seed=1, progress=lambda done, total: seen.append((done, total)))
    assert data.train_images + data.val_images == 20
    assert seen == [(n, 20) for n in range(1, 21)]
    second = digests(out)
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_handwriting_is_disjoint_and_labels_are_true() -> None:
    from sklearn.datasets import load_digits

    material = demo_data._load_material(seed=0)
    digits = load_digits()
    # Two of the 1,797 scans may be equal pixel for pixel by nature; none may be in both splits by the split.
    assert sum(map(len, material.scans["train"])) + sum(map(len, material.scans["val"])) == len(digits.images)
    known = {
        (image * (255 / 16)).astype(np.uint8).tobytes(): label
        for image, label in zip(digits.images, digits.target, strict=True)
    }
    train = {scan.tobytes() for scans in material.scans["train"] for scan in scans}
    val = {scan.tobytes() for scans in material.scans["val"] for scan in scans}
    assert not train & val
    for split in ("train", "val"):
        for label, scans in enumerate(material.scans[split]):
            assert all(known[scan.tobytes()] == label for scan in scans)


def test_interrupted_call_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo_data(tmp_path / "data", images=20, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_too_few_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"images must be at least 20 .*found 3"):
        make_demo_data(tmp_path / "data", images=3)


@pytest.mark.parametrize("images", [10**9, 99999999999999999999])
def test_more_images_than_the_disk_holds(tmp_path: Path, images: int) -> None:
    says = rf"images must be at most [\d,]+ \(the [\d,.]+ GB that are free at {tmp_path} hold no more\), found {images}"
    with pytest.raises(ConfigError, match=says):
        make_demo_data(tmp_path / "data", images=images)
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not a demo data set"):
        make_demo_data(tmp_path, images=20)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_unwritable_place_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the demo data set"):
        make_demo_data(tmp_path / "file" / "data", images=20)
