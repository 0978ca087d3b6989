"""A remote checkpoint as a local folder: shared, complete, and gone afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from offload.preload.python import own_folder
from offload.train.checkpoints.local_copy import local_copy


class Counting(pafs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """A remote file system of one folder that counts how often a file was opened."""

    def __init__(self, folder: Path) -> None:
        self.local, self.folder, self.opened = pafs.LocalFileSystem(), folder, 0
        self.opens: threading.Event | None = None  # a file opens once this is set

    def get_type_name(self) -> str:
        return f"counting {self.folder}"

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return list(self.local.get_file_info(paths))

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return list(self.local.get_file_info(selector))

    def open_input_stream(self, path: str) -> object:
        self.opened += 1
        if self.opens is not None:
            self.opens.wait()
        return self.local.open_input_stream(path)

    open_input_file = open_input_stream

    def normalize_path(self, path: str) -> str:
        return path

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = None
    move = copy_file = open_output_stream = open_append_stream = None


@pytest.fixture
def remote(tmp_path: Path) -> Counting:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.pt").write_text("weights")
    return Counting(tmp_path)


def left() -> list[Path]:
    return list(Path(own_folder()).glob("copy-*"))


def test_readers_of_a_node_share_one_copy_and_leave_nothing(remote: Counting, tmp_path: Path) -> None:
    """They may begin at once, and wait for each other while they read, as ranks do that load shares of one checkpoint."""
    fs, readers = pafs.PyFileSystem(remote), 4
    all_begin, all_read = threading.Barrier(readers), threading.Barrier(readers)
    remote.opens = threading.Event()
    threading.Timer(0.2, remote.opens.set).start()  # the others find no copy yet, whether they are there by then or not

    def read(_: int) -> str:
        all_begin.wait(300.0)
        with local_copy(fs, str(tmp_path / "checkpoint")) as folder:
            text = (folder / "model.pt").read_text()
            all_read.wait(300.0)
            return text

    with ThreadPoolExecutor(readers) as pool:
        assert list(pool.map(read, range(readers))) == ["weights"] * readers
    assert remote.opened == 1
    assert left() == []


def test_a_file_is_copied_without_its_neighbours(remote: Counting, tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "training.pt").write_text("much else")
    with local_copy(pafs.PyFileSystem(remote), str(tmp_path / "checkpoint" / "model.pt")) as file:
        assert (file.name, file.read_text()) == ("model.pt", "weights")
    assert remote.opened == 1
    assert left() == []


def test_a_copy_that_fails_leaves_nothing(remote: Counting, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), local_copy(pafs.PyFileSystem(remote), str(tmp_path / "none")):
        pass
    assert left() == []


def test_a_local_folder_is_read_where_it_is(tmp_path: Path) -> None:
    with local_copy(pafs.LocalFileSystem(), str(tmp_path)) as folder:
        assert folder == tmp_path
