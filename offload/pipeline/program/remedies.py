"""The remedy for an error of a data set that comes from what did not travel: a folder of the program, or the settings of its script."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence

from offload.pipeline.program import main_module, surroundings
from offload.pipeline.program.surroundings import Program


def remedy(error: BaseException) -> str:
    """Sentences on what this process lacks of the program that it has entered, and what to do. They begin with a space. Empty if that does
    not explain the error."""
    program = surroundings.entered()
    if program is None:
        return ""
    for cause in _causes(error):
        if isinstance(cause, ModuleNotFoundError) and (said := _of_module(program)):
            return said
        if isinstance(cause, FileNotFoundError) and (said := _of_file(cause, program)):
            return said
    return _of_script(error, program)


def image_remedy() -> str:
    """The same for an image that one of offload's own sources cannot decode."""
    program = surroundings.entered()
    if program is None:
        return ""
    return _of_settings(program, lambda package: package == "PIL" or package.startswith("pillow"))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _of_module(program: Program) -> str:
    missing = [folder for folder in program.own_folders if not os.path.exists(folder)]
    if not missing:
        return ""
    return (
        f" The program on {program.host} also finds modules in {_listed(missing)}, and {_this_node()} has no such "
        f"{'folder' if len(missing) == 1 else 'folders'}. Put the modules beside the script, or give every node the same folders."
    )


def _of_file(error: FileNotFoundError, program: Program) -> str:
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    if not name or os.path.isabs(name) or not program.folder or os.path.isdir(program.folder):
        return ""
    return (
        f" The path is relative to the program's working folder {program.folder}, and {_this_node()} has no such folder: the "
        f"process works in {os.getcwd()}. Pass an absolute path that every node has."
    )


def _of_script(error: BaseException, program: Program) -> str:
    packages = {
        str(frame.f_globals.get("__name__", "")).split(".")[0]
        for cause in _causes(error)
        for frame, _ in traceback.walk_tb(cause.__traceback__)
    }
    # A setting explains an error that comes from the library that it changes.
    return _of_settings(program, lambda package: package in packages - {"offload"})


def _of_settings(program: Program, concerns: Callable[[str], bool]) -> str:
    main = program.main
    if main is None:
        return ""
    if main.is_guarded:
        problem = main_module.problem()
        return f" Before that, {problem}" if problem else ""
    if main.is_here:
        return ""
    related = [setting for setting in main.settings if concerns(setting.module.split(".")[0])]
    if not related:
        return ""
    lines = _listed([f"line {setting.line} ({setting.text})" for setting in related])
    return (
        f' {main.name} does not run in preprocessing processes, since it has no if __name__ == "__main__": around its work. So {lines} had '
        "no effect there. Put the work under that guard, or the setting into worker_init_fn (DataLoader) or setup (Trainer), which every "
        "preprocessing process calls."
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


def _this_node() -> str:
    return f"the node {socket.gethostname()}"
