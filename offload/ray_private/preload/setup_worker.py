"""The stand-in for Ray's ``setup_worker.py`` on a local Ray: become the worker process without importing Ray.

    python setup_worker.py WORKER [ARGUMENT…] --language=PYTHON --serialized-runtime-env-context=JSON

The raylet starts every worker process with this script. Ray's own script imports Ray only to read the JSON, which takes a quarter of a
second of CPU time. Where it stops: Ray's own script handles everything that this one does not know. It needs only the standard library.
"""

import importlib.util
import json
import os
import shlex
import sys

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
FIELDS = {"command_prefix", "env_vars", "py_executable", "override_worker_entrypoint", "java_jars"}
"""The fields of Ray's context. This script knows the meaning of the first three."""


def main(argv: list[str]) -> None:
    """Become the worker, through the shell as Ray does."""
    worker = worker_of(argv)
    if worker is None:
        os.execv(sys.executable, [sys.executable, rays_own(), *argv])
    command, environment = worker
    os.environ.update(environment)
    os.execvp("bash", ["bash", "-c", command])


def worker_of(argv: list[str]) -> tuple[str, dict[str, str]] | None:
    """The shell command of the worker, and its additional environment; None if Ray's own script must find them."""
    contexts = [text[len(CONTEXT) :] for text in argv if text.startswith(CONTEXT)]
    languages = [text[len(LANGUAGE) :] for text in argv if text.startswith(LANGUAGE)]
    if languages != ["PYTHON"] or len(contexts) > 1:
        return None
    context = json.loads(contexts[0]) if contexts else {}
    if context.keys() - FIELDS or context.get("override_worker_entrypoint") or context.get("java_jars"):
        return None
    environment = context.get("env_vars") or {}
    if any("$" in value for value in environment.values()):  # Ray expands variables
        return None
    arguments = [text for text in argv if not text.startswith((CONTEXT, LANGUAGE))]
    executable = context.get("py_executable") or sys.executable
    command = [*(context.get("command_prefix") or []), "exec", executable, *map(shlex.quote, arguments)]
    return " ".join(command), environment


def rays_own() -> str:
    """The path of Ray's own script."""
    spec = importlib.util.find_spec("ray")  # this imports nothing
    assert spec is not None
    assert spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), "_private", "workers", "setup_worker.py")


if __name__ == "__main__":
    main(sys.argv[1:])
