"""The archive that is uploaded to a cluster: the user's folder and the installed offload.

Ray unpacks it on each node that runs a part of the job, makes it the working directory and puts it first on Python's path. The job
therefore runs the version of offload that launched it, whatever the nodes have installed. The same files give the same bytes: Ray
names an archive by its content, and does not upload it twice.

Where it stops: :mod:`offload.launch.ray.job_api` uploads it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError, argument
from offload.files import read_text
from offload.launch.archives import packed_sizes, zipped
from offload.launch.requirements import local_target
from offload.launch.uploaded_files import check_size, files_of, largest, left_behind

READ_BYTES = 200 << 20
"""The most bytes of files: the launcher packs them in memory."""
PACKED_BYTES = 100 << 20
"""The size limit of requests to Ray's dashboard (``DASHBOARD_CLIENT_MAX_SIZE``)."""
_WHERE_DATA_BELONG = (
    "put data where all nodes read it (a bucket, a shared file system), or move the script to a folder of its own"
)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An archive. ``script``: the name of the user's script within it; ``left_behind``: what the user may miss in it, in words."""

    archive: bytes
    script: str
    left_behind: tuple[str, ...]


def pack(script: Path, working_dir: Path | None = None) -> Bundle:
    """Pack the archive (zip) for a script. ``working_dir``: the folder to upload, by default the script's.

    Raises ConfigError for a script that is not below that folder, files that look like keys, or too many bytes.
    """
    folder = (working_dir or script.parent).resolve()
    if not os.path.isdir(folder):
        raise ConfigError(f"{argument('working_dir')} {working_dir} is not a folder.")
    if not script.resolve().is_relative_to(folder):
        raise ConfigError(
            f"{script} {_leads(script)}is not below {working_dir or folder}, and would not be uploaded: pass a folder with both as "
            f"{argument('working_dir')}."
        )
    name = script.resolve().relative_to(folder).as_posix()
    files = files_of(
        folder,
        instead_of_keys="let the script fetch secrets from a place that the cluster's nodes may read (a secret store, or a "
        "file on the nodes)",
    )
    if name not in files:
        raise ConfigError(
            f"{script} would not be uploaded: hidden files, links out of the folder, folders called runs, checkpoints, build, dist, "
            f"node_modules or *.egg-info, and virtual environments are left out. Move it elsewhere below {argument('working_dir')}."
        )
    check_size(folder, files, READ_BYTES, _WHERE_DATA_BELONG)
    packed = zipped(files)
    if len(packed) >= PACKED_BYTES:
        raise ConfigError(
            f"{folder} makes an archive of {len(packed) / 2**20:,.1f} MiB, and Ray's dashboard takes less than "
            f"{PACKED_BYTES >> 20} MiB: {_WHERE_DATA_BELONG}. Largest, packed: {largest(packed_sizes(packed))}."
        )
    return Bundle(archive=packed, script=name, left_behind=tuple(left_behind(folder)))


def _leads(script: Path) -> str:
    return f"is a link to {script.resolve()}, which " if script.is_symlink() else ""


def read_requirements(path: Path) -> list[str]:
    """The lines of a pip requirements file, without comments. Raises ConfigError if it cannot be read, or if it names files of this
    machine, since pip runs on the nodes."""
    text = read_text(path, argument("requirements"))
    lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines()]
    for line in filter(None, lines):
        if local_target(line) is not None:
            raise ConfigError(
                f"{argument('requirements')} {path} has the line {line!r}, which refers to files of this machine, but pip runs on "
                "the cluster's nodes: write all packages into this one file."
            )
    return [line for line in lines if line]
