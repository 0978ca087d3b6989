"""What travels to the instances: the user's folder, this very version of offload, the entry, and pinned requirements.

The archive is the same, byte for byte, for the same files and token. Where it stops: it is uploaded by others.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import os
import tarfile
from pathlib import Path

from launchers.files import bytes_of, check_size, files_of
from offload.errors import ConfigError

LARGEST_BYTES = 200 << 20
TOKEN = ".offload-token"
PLAN = ".offload-plan.json"
IN_IMAGE = ("torch", "torchvision")
"""Never installed over an image's own, which fit its CUDA."""


def requirements() -> list[str]:
    """What offload needs beside what images hold, at the versions that are installed here."""
    found = []
    for line in importlib.metadata.requires("offload") or []:
        name = line.split(";")[0].strip()
        if "extra ==" in line:
            continue
        package = name.split(">")[0].split("=")[0].split("[")[0].strip()
        if package in IN_IMAGE:
            continue
        extras = name[name.index("[") : name.index("]") + 1] if "[" in name else ""
        found.append(f"{package}{extras}=={importlib.metadata.version(package)}")
    return sorted(found)


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
    made = {entry: _ENTRY, "requirements.txt": _merged(files.pop("requirements.txt", None)), TOKEN: token}
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
import os
import sys

try:
    from launchers.sagemaker.entry import main
except ImportError as error:
    text = f"{error}: what requirements.txt names is not installed on this host. Without a network take an image that holds it."
    with open(os.path.join(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "output", "failure"), "w") as file:
        file.write(text)
    sys.exit(text)

if __name__ == "__main__":
    main()
"""


def _merged(own: Path | None) -> str:
    """The user's requirements behind offload's."""
    text = "\n".join(requirements()) + "\n"
    try:
        return text if own is None else f"{text}\n{bytes_of(own).decode()}"
    except UnicodeDecodeError as error:
        raise ConfigError(f"{own} is not UTF-8 text: {error.reason}.") from None
