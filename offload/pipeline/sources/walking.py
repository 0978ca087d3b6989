"""All files below a folder, in the order of their paths, a folder's at a time: the names of millions need no memory at once.

The order is that of the sorted paths: a folder counts as its name with a slash, so that ``a-1/`` comes before ``a/``. What begins with a
dot (``.ipynb_checkpoints``, ``._a.jpg``) does not count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import pyarrow.fs as pafs

from offload.pipeline.aside import each_in_order

SEVERAL = 16  # number of folders from which on parallel listing pays
LISTING_THREADS = 8

Take = Callable[[list[str], Sequence[pafs.FileInfo] | None], None]
"""Called with the next paths, and with what remote storage tells of them."""


def below(root: str, path: str) -> str:
    """The path of a file as seen from a folder above it. Some file systems begin paths with a slash, and the root of some has an empty
    name."""
    return path.lstrip("/").removeprefix(root.strip("/")).lstrip("/")


def walk_local(root: str, take: Take, visited: Callable[[str], None]) -> None:
    """Hand over the files below a folder of this machine, links to folders included. ``visited`` gets each folder. Raises OSError."""
    found: list[str] = []
    way = [os.path.realpath(root)]  # where the open folders are: links may lead to any place
    open_folders = [_entries(root, way)]
    visited(root)
    while open_folders:
        for path in open_folders[-1]:
            if path.endswith("/"):
                if found:
                    take(found, None)
                    found = []
                folder = path[:-1]
                visited(folder)
                linked = os.path.islink(folder)
                way.append(os.path.realpath(folder) if linked else os.path.join(way[-1], os.path.basename(folder)))
                open_folders.append(_entries(folder, way))
                break
            found.append(path)
        else:
            open_folders.pop()
            way.pop()
    if found:
        take(found, None)


def _entries(folder: str, way: Sequence[str]) -> Iterator[str]:
    """The files and, with a slash, the folders in a folder, in order. ``way``: the real paths of the folders from the root to this one."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not _is_folder(entry):
                names.append(entry.name)
            elif not _leads_back(entry, way):
                names.append(f"{entry.name}/")
    return (os.path.join(folder, name) for name in sorted(names))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads nowhere
        return False


def _leads_back(entry: os.DirEntry[str], way: Sequence[str]) -> bool:
    """Whether this folder is a link to one on the way to it, or to a parent of one. Folders that link to each other would not end."""
    if not entry.is_symlink():
        return False
    target = os.path.realpath(entry.path)
    return any(os.path.commonpath((target, each)) == target for each in way)


def walk_remote(fs: pafs.FileSystem, root: str, take: Take) -> None:
    """Hand over the files below a folder of remote storage. Raises OSError. Storage lists a folder page by page, so this lists several
    folders at once."""
    files: list[pafs.FileInfo] = []
    folders = [root]
    while 0 < len(folders) < SEVERAL:
        found = fs.get_file_info(pafs.FileSelector(folders.pop(0)))
        folders += [info.path for info in found if info.type == pafs.FileType.Directory]
        files += [info for info in found if info.type == pafs.FileType.File]
    folders = [folder for folder in folders if not _is_hidden(below(root, folder))]
    # What is to be listed, between the files that are known already.
    parts: list[tuple[str, pafs.FileInfo | None]] = [(info.path, info) for info in files]
    parts = sorted([*parts, *((f"{folder}/", None) for folder in folders)], key=lambda part: part[0])

    def files_of(part: tuple[str, pafs.FileInfo | None]) -> list[pafs.FileInfo]:
        path, info = part
        found = [info] if info is not None else fs.get_file_info(pafs.FileSelector(path[:-1], recursive=True))
        found = [f for f in found if f.type == pafs.FileType.File and not _is_hidden(below(root, f.path))]
        return sorted(found, key=lambda info: info.path)

    def done(found: list[pafs.FileInfo]) -> None:
        if found:
            take([info.path for info in found], found)

    # fsspec's file systems hold locks of their own, and some do not support threads.
    each_in_order(files_of, parts, threads=1 if isinstance(fs, pafs.PyFileSystem) else LISTING_THREADS, done=done)


def _is_hidden(path: str) -> bool:
    """Whether the name of a file, or of a folder on its path, begins with a dot."""
    return any(part.startswith(".") for part in path.split("/"))
