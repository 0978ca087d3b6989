"""What travels to the instances: the user's folder, this very version of offload, the entry, and the requirements of both.

The archive is the same, byte for byte, for the same files and token. Where it stops: it is uploaded by others.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import os
import re
import tarfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launchers.files import bytes_of, check_size, files_of
from launchers.sagemaker.images import requirements_of_offload
from launchers.sagemaker.settings import PLAN as PLAN
from launchers.sagemaker.settings import TO_INSTALL
from launchers.sagemaker.settings import TOKEN as TOKEN
from offload.errors import ConfigError

LARGEST_BYTES = 200 << 20
REQUIREMENTS = "requirements.txt"
IN_IMAGE = ("torch", "torchvision")
"""Never installed over an image's own, which fit its CUDA."""
_INCLUDES = re.compile(r"\s*(?:-r|--requirement)[= ]?\s*([^\s#]+)")
_NAMES = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")


def requirements(own: Path | None = None) -> list[str]:
    """What offload needs beside what images hold, in its own ranges, so that whatever a user's stack pins can be installed with it.

    Ray alone is pinned to the version that is installed here: offload uses parts of it that change between releases. Where the
    requirements in the file ``own`` name Ray, they decide, within offload's range.
    """
    named = set() if own is None else names_in(own)
    return [
        f"{_bare(each)}=={importlib.metadata.version('ray')}"
        if each.name == "ray" and "ray" not in named
        else str(each)
        for each in requirements_of_offload()
        if each.name not in IN_IMAGE
    ]


def own_requirements(path: Path) -> str:
    """The text of a user's requirements.txt. Raises ConfigError for one that pip would not take together with offload's."""
    try:
        text = bytes_of(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}.") from None
    if re.search(r"^[^#]*--hash[= ]", text, re.MULTILINE):
        raise ConfigError(
            f"{path} holds hashes (--hash): pip would then demand them of offload's requirements too. Export it without hashes."
        )
    return text


def names_in(path: Path) -> set[str]:
    """The packages that a requirements.txt names, with what it includes (``-r other.txt``)."""
    found: set[str] = set()
    waiting, seen = [path], set[Path]()
    while waiting:
        path = waiting.pop().resolve()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        for line in own_requirements(path).splitlines():
            if more := _INCLUDES.match(line):
                waiting.append(path.parent / more[1])
            elif name := _NAMES.match(line):
                found.add(canonicalize_name(name[1]))
    return found


def pack(script: Path, entry: str, token: str, plan: Path | None = None) -> bytes:
    """The archive (tar.gz) for a script, with its folder and everything below.

    ``entry``: the name under which the container starts; ``token``: that the job's Ray cluster authenticates with; ``plan``: that
    the job was launched from.

    Raises ConfigError for a script that is not there, files that look like keys, or too many bytes.
    """
    script = script.resolve()
    if not script.is_file():
        raise ConfigError(f"there is no script {script}.")
    files = files_of(script.parent, instead_of_keys="let the script fetch what it needs from AWS Secrets Manager")
    files.pop("setup.py", None)  # with it the training toolkit would install the folder as a package, and run that
    check_size(
        script.parent,
        files,
        LARGEST_BYTES,
        "put data into S3 and pass it with --input, or move the script to a folder of its own",
    )
    made = {entry: _ENTRY, TO_INSTALL: _merged(files.pop(REQUIREMENTS, None)), TOKEN: token}
    if plan is not None:
        made[PLAN] = plan.read_text(encoding="utf-8")
    taken = sorted(made.keys() & files.keys())
    if taken:
        raise ConfigError(f"{script.parent} holds {', '.join(taken)}, which the launcher makes itself: rename it.")
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for name in sorted({*files, *made}):
            content = made[name].encode() if name in made else bytes_of(files[name])
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = (
                0o600 if name == TOKEN else 0o755 if name not in made and os.access(files[name], os.X_OK) else 0o644
            )
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


_ENTRY = """\
from launchers.sagemaker.entry import main

if __name__ == "__main__":
    main()
"""


def _merged(own: Path | None) -> str:
    """The user's requirements behind offload's."""
    text = "\n".join(requirements(own)) + "\n"
    return text if own is None else f"{text}\n{own_requirements(own)}"


def _bare(each: Requirement) -> str:
    """Name and extras."""
    return f"{each.name}[{','.join(sorted(each.extras))}]" if each.extras else each.name
