"""What travels to a cluster: one archive with the user's folder and this very version of offload.

Ray unpacks it on each node that runs anything of the job, makes it the working directory there and puts it before all else that
Python imports, so that the version which launched is the version which runs, whatever the nodes have installed. The archive is
the same, byte for byte, for the same files: Ray names it by its content, and what a cluster has already is not sent again.

Where it stops: it is uploaded by :mod:`launchers.ray.client`.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from launchers.files import bytes_of, check_size, files_of, largest, links_left
from offload.errors import ConfigError
from offload.files import read_text

READ_BYTES = 200 << 20
"""Of files, at most: they are packed in memory."""
PACKED_BYTES = 100 << 20
"""Ray's dashboard takes requests below this (``DASHBOARD_CLIENT_MAX_SIZE``)."""
_WHERE_DATA_BELONG = (
    "put data where all nodes read it (a bucket, a shared file system), or move the script to a folder of its own"
)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that the format knows
_OPTION = re.compile(r"(-[rcef]|--(?:requirement|constraint|editable|find-links)(?=[\s=]|$))[\s=]*(.*)")
_OF_VERSION_CONTROL = re.compile(r"(git|hg|svn|bzr)\+(?!file:)[a-z+]+://")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """``script``: the name of the user's script within the archive. ``links_left``: links in the folder that stay at home."""

    archive: bytes
    script: str
    links_left: tuple[str, ...]


def pack(script: Path, working_dir: Path | None = None) -> Bundle:
    """The archive (zip) for a script. ``working_dir``: the folder that travels, by default the script's.

    Raises ConfigError for a script that is not below that folder, files that look like keys, or too many bytes.
    """
    folder = (working_dir or script.parent).resolve()
    if not folder.is_dir():
        raise ConfigError(f"--working-dir {working_dir} is not a folder.")
    if not script.resolve().is_relative_to(folder):
        raise ConfigError(
            f"{script} is not below --working-dir {working_dir}, and so would not travel: pass a folder that both lie in."
        )
    name = script.resolve().relative_to(folder).as_posix()
    files = files_of(
        folder,
        instead_of_keys="let the script fetch what it needs from where the cluster's nodes may read it (a secret store, or a "
        "file on the nodes)",
    )
    if name not in files:
        raise ConfigError(
            f"{script} would not travel: hidden files, links out of the folder, folders called runs, checkpoints, build, dist, "
            "node_modules or *.egg-info, and virtual environments, stay here. Move it elsewhere below --working-dir."
        )
    check_size(folder, files, READ_BYTES, _WHERE_DATA_BELONG)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in sorted(files):
            member = zipfile.ZipInfo(each, _EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = (0o755 if os.access(files[each], os.X_OK) else 0o644) << 16
            archive.writestr(member, bytes_of(files[each]))
    packed = buffer.getvalue()
    if len(packed) >= PACKED_BYTES:
        sizes = {member.filename: member.compress_size for member in archive.infolist()}
        raise ConfigError(
            f"{folder} makes an archive of {len(packed) / 2**20:,.1f} MiB, and Ray's dashboard takes less than "
            f"{PACKED_BYTES >> 20} MiB: {_WHERE_DATA_BELONG}. Largest, packed: {largest(sizes)}."
        )
    return Bundle(archive=packed, script=name, links_left=tuple(links_left(folder)))


def read_requirements(path: Path) -> list[str]:
    """The lines of a pip requirements file, without comments. Raises ConfigError where it cannot be read, or names files: those
    are here, and pip runs on the nodes."""
    text = read_text(path, "--requirements")
    lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines()]
    for line in filter(None, lines):
        if _leads_here(line):
            raise ConfigError(
                f"--requirements {path} has the line {line!r}, which leads to files of this machine, and pip runs on the cluster's "
                "nodes: write the packages into the one file."
            )
    return [line for line in lines if line]


def _leads_here(line: str) -> bool:
    """Whether a line of a requirements file names a file or a folder of this machine."""
    if "file:" in line.lower():
        return True
    if option := _OPTION.match(line):
        name, value = option.groups()
        if name in ("-e", "--editable"):
            return not _OF_VERSION_CONTROL.match(value)
        return not value.startswith(("http://", "https://"))
    what = line.partition(";")[0].strip()
    return "://" not in what and ("/" in what or what.startswith(".") or what.endswith((".whl", ".zip", ".tar.gz")))
