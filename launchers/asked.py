"""What a user asks of any launcher, checked before any call: the script, ``NAME=VALUE`` pairs, names that are secrets'."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from offload.errors import ConfigError

_SECRET = re.compile(
    r"(?:^|[_-])(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)[_-]?(?:KEY|TOKEN))(?:$|[_-](?:ID|KEY)$)",
    re.IGNORECASE,
)


def names_a_secret(name: str) -> bool:
    """Whether a variable or an option of this name would hold what nobody else is to read."""
    return bool(_SECRET.search(name))


def options_in(args: Sequence[str]) -> list[str]:
    """The names of the options among a script's arguments."""
    return [arg.removeprefix("--").partition("=")[0] for arg in args if arg.startswith("--")]


def pairs_of(texts: Sequence[str], option: str) -> dict[str, str]:
    """``NAME=VALUE`` texts. Raises ConfigError for one without ``=``, and for a name that is given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} is NAME=VALUE, found {text!r}.")
        if name in found:
            raise ConfigError(f"{option} {name} is given twice.")
        found[name] = value
    return found


def check_script(script: Path) -> None:
    """Raise ConfigError for what would fail on machines that are waited or paid for. Nothing of the script is run: it may need
    what only they have."""
    if not script.is_file():
        raise ConfigError(f"there is no script {script}.")
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{script} is not Python: {error}.") from None
    names = {
        name
        for node in tree.body
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else [alias.asname or alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else [target.id for target in node.targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign)
            else []
        )
    }
    if not names & {"build", "*"}:
        raise ConfigError(f"{script} defines no build(). Add one that returns an offload.Trainer.")
