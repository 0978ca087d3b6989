"""All files below a folder, in the order of their paths, one folder at a time, so that millions of names need no memory at once.

The order is that of the sorted paths: a folder counts as its name with a slash, so that ``a-1/`` comes before ``a/``. Names that
begin with a dot (``.ipynb_checkpoints``, ``._a.jpg``) are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import pyarrow.fs as pafs

from offload.pipeline.aside import each_in_order

SEVERAL = 16  # folders; from here on, parallel listing pays
LISTING_THREADS = 8

HandOver = Callable[[list[str], Sequence[pafs.FileInfo] | None], None]
"""Called with the next paths, and with their facts if storage is remote."""


def below(root: str, path: str) -> str:
    """The path of a file relative to a folder above it.

    Some file systems begin paths with a slash, and the root of some has an empty name.
    """
    return path.lstrip("/").removeprefix(root.strip("/")).lstrip("/")


def walk_local(root: str, hand_over: HandOver, visited: Callable[[str], None]) -> None:
    """Hand over the files below a folder of this machine, links to folders included. ``visited`` gets each folder. Raises OSError."""
    files: list[str] = []
    way = [os.path.realpath(root)]  # the real paths of the open folders, since links may lead anywhere
    open_folders = [_entries(root, way)]
    visited(root)
    while open_folders:
        for path in open_folders[-1]:
            if path.endswith("/"):
                if files:
                    hand_over(files, None)
                    files = []
                folder = path[:-1]
                visited(folder)
                linked = os.path.islink(folder)
                way.append(os.path.realpath(folder) if linked else os.path.join(way[-1], os.path.basename(folder)))
                open_folders.append(_entries(folder, way))
                break
            files.append(path)
        else:
            open_folders.pop()
            way.pop()
    if files:
        hand_over(files, None)


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
    """Return whether this folder is a link to a folder on the way to it, or to a parent of one.

    Following such a link would never end.
    """
    if not entry.is_symlink():
        return False
    target = os.path.realpath(entry.path)
    return any(os.path.commonpath((target, folder)) == target for folder in way)


def walk_remote(fs: pafs.FileSystem, root: str, hand_over: HandOver) -> None:
    """Hand over the files below a folder of remote storage. Raises OSError.

    Storage lists a folder page by page, so this lists several folders at once.
    """
    files: list[pafs.FileInfo] = []
    folders = [root]
    # Level by level, until there are enough folders to list them in parallel.
    while 0 < len(folders) < SEVERAL:
        entries = fs.get_file_info(pafs.FileSelector(folders.pop(0)))
        folders += [info.path for info in entries if info.type == pafs.FileType.Directory]
        files += [info for info in entries if info.type == pafs.FileType.File]
    folders = [folder for folder in folders if not _is_hidden(below(root, folder))]
    # The folders to list, in order among the files that are known already.
    parts: list[tuple[str, pafs.FileInfo | None]] = [(info.path, info) for info in files]
    parts = sorted([*parts, *((f"{folder}/", None) for folder in folders)], key=lambda part: part[0])

    def files_of(part: tuple[str, pafs.FileInfo | None]) -> list[pafs.FileInfo]:
        path, info = part
        entries = [info] if info is not None else fs.get_file_info(pafs.FileSelector(path[:-1], recursive=True))
        entries = [f for f in entries if f.type == pafs.FileType.File and not _is_hidden(below(root, f.path))]
        return sorted(entries, key=lambda info: info.path)

    def done(infos: list[pafs.FileInfo]) -> None:
        if infos:
            hand_over([info.path for info in infos], infos)

    # fsspec's file systems hold locks of their own, and some do not support threads.
    each_in_order(files_of, parts, threads=1 if isinstance(fs, pafs.PyFileSystem) else LISTING_THREADS, done=done)


def _is_hidden(path: str) -> bool:
    """Return whether the name of a file, or of a folder on its path, begins with a dot."""
    return any(part.startswith(".") for part in path.split("/"))
