"""Checks of arguments that all launchers share: the script, ``NAME=VALUE`` pairs, secrets.

Where it stops: it recognises a secret only by its name, by a value that no column, path or number looks like, or by the address that
contains it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from offload.errors import ConfigError
from offload.files import is_file

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET = re.compile(
    r"SECRET|\w*(PASSWORD|PASSWD|PASSPHRASE|PWD)|CREDENTIALS?|PAT|(API|ACCESS|PRIVATE|SECRET|AUTH)(KEY|TOKEN|SECRET)"
)
_OF_A_MODEL = re.compile(
    "ANSWER|AUDIO|BLANK|BOS|CLASS|CLS|DIST|END|EOD|EOS|EOT|FIRST|IGNORE|IMAGE|LABEL|LANG|LANGUAGE|LAST|MASK|MASKED|MAX|MIN|NEXT|NUM|PAD|PATCH|PER|"
    "PLACEHOLDER|PREFIX|PROMPT|QUERY|REGISTER|SEP|SOS|SOT|SPECIAL|START|STOP|SUFFIX|TEXT|UNK|UNKNOWN|VIDEO|VISION|"
    "VISUAL|WORD"
)
"""Words before ``TOKEN`` that mean a model's tokens."""
_OF_DATA = re.compile(
    "ATTENTION|AUDIO|BATCH|CACHE|CAPTION|CHECKPOINT|CLASS|COLUMN|CONFIG|DATA|DATASET|DICT|FEATURE|FIELD|FOREIGN|"
    "GROUP|ID|IMAGE|IMG|INDEX|INPUT|JSON|KMS|LABEL|LOSS|MASK|METRIC|MODEL|MONITOR|OBJECT|ORDER|OUTPUT|PARTITION|"
    "PREFIX|PRIMARY|PUBLIC|QUERY|ROW|SAMPLE|SHARD|SORT|SPLIT|STATE|TARGET|TEXT|VIDEO|WEIGHT"
)
"""Words before ``KEY`` that mean a lookup key, not a secret."""
_OF_A_PASS = re.compile("ALL|BACKWARD|BAND|FIRST|FORWARD|FULL|HIGH|LAST|LOW|MULTI|NUM|ONE|PER|SECOND|SINGLE|TWO")
"""Words before ``PASS`` that mean a pass over data, or a filter's."""
_DIRECTORIES = ("PWD", "OLDPWD")  # a shell's variables
_ALWAYS = re.compile("ACCESS|API|AUTH|BEARER|PRIVATE|REFRESH|SECRET|SESSION|SIGNING|SSH")
"""Words before ``KEY`` after which any value is a secret."""
_SWITCH = re.compile("true|false|yes|no|on|off|none|null|[01]", re.IGNORECASE)
_PLAIN = re.compile(r"-?[a-z0-9_.,:/{}*-]*")
_RUN = re.compile(r"[a-z0-9]{16,}")

_OPTION = re.compile(r"--[A-Za-z_].*|-[A-Za-z]", re.DOTALL)
"""An option after a flag. Other texts may be secrets, also those with a dash before them, or ``=`` at their end."""

_LOGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/\s@:?#]*)(:[^/\s@]*)?@", re.IGNORECASE)
_FROM_THERE = re.compile(r"\$\{\w+\}")  # pip fills it in from its environment


def names_a_secret(name: str) -> bool:
    """Return whether a variable or an option of this name probably holds a secret."""
    if name in _DIRECTORIES:
        return False
    words = [word.upper() for word in _WORDS.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    *before, last = words or [""]
    if last == "ID" and before:
        *before, last = before
        if last == "KEY":
            return before[-1:] in (["API"], ["ACCESS"], ["PRIVATE"], ["SECRET"])
    of = before[-1] if before else ""
    match last:
        case "TOKEN":
            return not _OF_A_MODEL.fullmatch(of)
        case "KEY":
            return bool(of) and not _OF_DATA.fullmatch(of)
        case "PASS":
            return bool(of) and not _OF_A_PASS.fullmatch(of)
        case "STRING":
            return of == "CONNECTION"
        case _:
            return _SECRET.fullmatch(last) is not None


def secrets_in(environment: Mapping[str, str], args: Sequence[str]) -> list[str]:
    """The names of variables and of a script's arguments that probably hold secrets.

    ``prompt_key=question`` and ``S3_KEY=data/train.tar`` do not: a name that ends in ``KEY`` may also mean a column, a path or a
    number, and then its value looks like one.
    """
    values = [*environment.items(), *_named_values(args)]
    return [name for name, value in values if names_a_secret(name) and not _is_harmless(name, value)]


def _is_harmless(name: str, value: str) -> bool:
    if not value or _SWITCH.fullmatch(value):  # without a value, it is a flag
        return True
    words = [word.upper() for word in _WORDS.findall(name) if not word.isdigit()]
    if len(words) < 2 or words[-1] != "KEY" or _ALWAYS.fullmatch(words[-2]):
        return False
    runs = _RUN.findall(value)
    return bool(_PLAIN.fullmatch(value)) and not any(re.search(r"\d", run) for run in runs)


def _named_values(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names that a script's arguments set, with their values: ``--name value``, ``--name=value``, ``name=value``."""
    for number, arg in enumerate(args):
        if not (names := options_in([arg])):
            continue
        _, equals, value = arg.partition("=")
        after = args[number + 1] if number + 1 < len(args) else ""
        yield names[0], value if equals else "" if _OPTION.fullmatch(after) else after


def login_in(texts: Iterable[tuple[str, str]]) -> str | None:
    """The name of the first of these (name, text) whose text has an address with a password or a token in it."""
    return next((name for name, text in texts if holds_a_login(text)), None)


def holds_a_login(text: str) -> bool:
    """Return whether an address within a text contains a password or a token (``https://user:password@host``, ``https://token@host``).

    A user name alone is not a secret if it only identifies a user or a container (``git@``, ``ssh://``, ``abfs://``), and neither is
    ``${NAME}``.
    """
    for scheme, user, password in _LOGIN.findall(text):
        if password not in ("", ":"):
            secret = password[1:]
        elif scheme.lower().rpartition("+")[2] in ("http", "https") and user != "git":
            secret = user
        else:
            continue
        if secret and not _FROM_THERE.fullmatch(secret):
            return True
    return False


def options_in(args: Sequence[str]) -> list[str]:
    """The names that a script's arguments set: ``--name``, ``-name``, ``name=value``, with or without a ``+`` before them."""
    matches = (re.fullmatch(r"(-{1,2}|\+{0,2})([A-Za-z_][\w.-]*)(=.*)?", arg, re.DOTALL) for arg in args)
    return [match[2] for match in matches if match is not None and (match[1].startswith("-") or match[3])]


def pairs_of(texts: Sequence[str], option: str) -> dict[str, str]:
    """``NAME=VALUE`` texts as a dict. Raises ConfigError for a text without ``=``, or a repeated name."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} must be NAME=VALUE, found {text!r}.")
        if name in values:
            raise ConfigError(f"{option} {name} is given twice.")
        values[name] = value
    return values


def check_script(script: Path) -> None:
    """Raise ConfigError for a script that would fail on the other machines, which cost time and money. The script does not run here:
    it may need resources of those machines."""
    if not is_file(script, "the script"):
        raise ConfigError(f"there is no script {script}.")
    if script.resolve().suffix != ".py":  # `offload run` would not load it
        raise ConfigError(f"{script} is not Python: the name of a script ends in .py.")
    try:
        tree = ast.parse(
            script.read_bytes(), filename=script.name
        )  # bytes: they may begin with a byte order mark, or declare an encoding
    except OSError as error:
        raise ConfigError(f"{script} cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{script} is not Python: {error}.") from None
    if not {"build", "*"} & {*_bound(tree)}:
        raise ConfigError(f"{script} defines no build(). Add one that returns an offload.Trainer.")


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a module gives to functions and values at its top level, also within ``if``, ``try`` and other blocks."""
    for inner in ast.iter_child_nodes(node):
        match inner:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Import() | ast.Lambda():
                pass  # a module cannot be called
            case _:
                yield from _bound(inner)
