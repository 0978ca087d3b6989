"""The archive for the instances: the user's folder, the installed offload, the entry, and the requirements of both.

The same files and token give the same bytes. Where it stops: :mod:`offload.launch.sagemaker.submit` uploads it.
"""

from __future__ import annotations

from pathlib import Path

from offload.errors import ConfigError, argument
from offload.launch.archives import tarred
from offload.launch.requirements import own_requirements, requirements
from offload.launch.sagemaker.settings import PLAN as PLAN
from offload.launch.sagemaker.settings import TO_INSTALL
from offload.launch.sagemaker.settings import TOKEN as TOKEN
from offload.launch.uploaded_files import FOLDERS_LEFT_OUT, check_size, files_of

LARGEST_BYTES = 200 << 20
REQUIREMENTS = "requirements.txt"


def pack(script: Path, entry: str, token: str, plan: Path | None = None) -> bytes:
    """Pack the archive (tar.gz) for a script, with its folder and everything below.

    ``entry``: the name of the file that the container runs; ``token``: the token of the job's Ray cluster; ``plan``: the job's plan.

    Raises ConfigError for a missing script, files that look like keys, or too many bytes.
    """
    if not script.is_file():
        raise ConfigError(f"there is no script {script}.")
    script = script.parent.resolve() / script.name
    if not script.resolve().is_relative_to(script.parent):
        raise ConfigError(
            f"{script} is a link to {script.resolve()}, outside of its folder, which is uploaded: launch that file, or copy it here."
        )
    files = files_of(script.parent, instead_of_keys="let the script fetch secrets from AWS Secrets Manager")
    files.pop("setup.py", None)  # with it, the training toolkit would install the folder as a package and run that
    if not {script.name, name_of(script)} <= files.keys():
        raise ConfigError(
            f"{script} would not be uploaded: hidden files are left out, folders called {', '.join(FOLDERS_LEFT_OUT)}, and a setup.py, "
            "which the training toolkit would run by itself. Rename or move it."
        )
    check_size(
        script.parent,
        files,
        LARGEST_BYTES,
        f"put data into S3 and pass it with {argument('input', python='channels')}, or move the script to a folder of its own",
    )
    texts = {entry: _ENTRY, TO_INSTALL: _merged(files.pop(REQUIREMENTS, None)), TOKEN: token}
    if plan is not None:
        texts[PLAN] = plan.read_text(encoding="utf-8")
    clashes = sorted(texts.keys() & files.keys())
    if clashes:
        raise ConfigError(f"{script.parent} holds {', '.join(clashes)}, which the launcher makes itself: rename it.")
    return tarred(files, texts, private=[TOKEN])


def name_of(script: Path) -> str:
    """The script's name in the archive. For a link it is that of its target, beside which the script finds its modules."""
    folder, target = script.parent.resolve(), script.resolve()
    return target.relative_to(folder).as_posix() if target.is_relative_to(folder) else script.name


_ENTRY = """\
from offload.launch.sagemaker.container.entry import main

if __name__ == "__main__":
    main()
"""


def _merged(own: Path | None) -> str:
    """Offload's requirements, followed by the user's."""
    text = "\n".join(requirements(own)) + "\n"
    return text if own is None else f"{text}\n{own_requirements(own)}"
