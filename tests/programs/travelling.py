"""A script whose functions another process calls, and whose classes come back. It prints what went wrong, as JSON, by the case's name.

``python -m tests.programs.travelling`` runs the cases. The other process is a bare interpreter.
"""

from __future__ import annotations

import abc
import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import importlib.util
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, NewType, ParamSpec, Protocol, TypedDict, TypeVar

import numpy as np
import torch

from offload.pipeline.program import pickling
from tests.programs import class_kinds

OTHER = """
import pickle, sys
from offload.pipeline.program import pickling

def outcome(call):
    try:
        return pickling.dumps_back(pickling.loads(call)())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

calls = pickle.loads(sys.stdin.buffer.read())
sys.stdout.buffer.write(pickle.dumps({name: outcome(call) for name, call in calls.items()}))
"""

# --- what the script's module holds -------------------------------------------------------------------------------------

T = TypeVar("T")
P = ParamSpec("P")
UserId = NewType("UserId", int)
args = argparse.ArgumentParser().parse_args([])
args.lr = 0.1
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
device = torch.device("cpu")
best_acc1 = 0
generator = torch.Generator().manual_seed(3)
logger = logging.getLogger("travelling")
handler = logging.lastResort  # it holds a lock
cudnn = torch.backends.cudnn
backends = torch.backends
relu_op = torch.ops.aten.relu
stderr = sys.__stderr__
missing = dataclasses.MISSING
nothing = class_kinds.NOTHING
pattern = re.compile("a+")
alive: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def lazily(name: str) -> types.ModuleType:
    """A module that loads at its first use, by the standard library's own means."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


lazy = lazily("wave")


@functools.lru_cache(maxsize=8)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def kind_of(value: Any) -> str:
    return "other"


@kind_of.register
def _(value: int) -> str:
    return "int"


@torch.no_grad()
def no_grad(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@contextlib.contextmanager
def managed() -> Iterator[int]:
    yield 3


@dataclasses.dataclass
class Options:
    name: str
    lr: float = 0.1
    tags: list[str] = dataclasses.field(default_factory=list)


class Lazy:
    @functools.cached_property
    def value(self) -> int:
        return 3

    @functools.cache  # noqa: B019
    def power(self, n: int) -> int:
        return 2**n

    @functools.singledispatchmethod
    def name(self, value: Any) -> str:
        return "other"

    @name.register
    def _(self, value: int) -> str:
        return "int"


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> float: ...


class Square(Shape):
    def __init__(self, side: float) -> None:
        super().__init__()
        self.side = side

    def area(self) -> float:
        return self.side**2


class HasArea(Protocol):
    def area(self) -> float: ...


class Record(TypedDict):
    a: int


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


# --- functions, as a training function or a transform of the script ----------------------------------------------------------


def sets_cudnn() -> bool:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.backends.cudnn.benchmark and torch.backends.cudnn is sys.modules["torch.backends.cudnn"]


def holds_modules() -> bool:
    return cudnn is sys.modules["torch.backends.cudnn"] and backends is sys.modules["torch.backends"]


def uses_torch_namespaces() -> bool:
    torch.classes.loaded_libraries  # noqa: B018
    return bool((relu_op(torch.tensor([-1.0])) == 0).all())


def loads_lazily() -> bool:
    return lazy is sys.modules["wave"] and callable(lazy.open)


def uses_a_handler() -> bool:
    return handler is logging.lastResort


def uses_streams() -> bool:
    return stderr is sys.__stderr__


def uses_constants() -> bool:
    fields = {each.name: each for each in dataclasses.fields(Options)}
    assert nothing is class_kinds.NOTHING
    return missing is dataclasses.MISSING and fields["name"].default is missing and Options("a").tags == []


def derives_a_dataclass() -> bool:
    @dataclasses.dataclass
    class More(Options):
        more: int = 3

    return More("a").more == 3


def uses_caches() -> bool:
    assert (Lazy().value, Lazy().power(5), Lazy().name(3), Lazy().name("a")) == (3, 32, "int", "other")
    return (
        fibonacci(20) == 6765 and fibonacci.cache_info().maxsize == 8 and kind_of(3) == "int" and kind_of("") == "other"
    )


def uses_types() -> bool:
    value: HasArea = Square(2.0)
    record: Record = {"a": UserId(3)}
    return value.area() == 4 and record["a"] == 3 and Box[int](3).value == 3 and (T.__name__, P.__name__) == ("T", "P")


def counts_globally() -> bool:
    global best_acc1
    best_acc1 = max(best_acc1, 3)
    return best_acc1 == 3 and args.lr == 0.1 == parser.parse_args([]).lr and device.type == "cpu"


def pickles_its_own() -> bool:
    found = pickle.loads(pickle.dumps([Options("a"), Item(1, torch.ones(1)), Level.HIGH, Counted.Inner()]))
    return [type(each) for each in found] == [Options, Item, Level, Counted.Inner]


def uses_the_rest() -> bool:
    logger.debug("here")
    with managed() as found:
        assert found == 3
    assert pattern.match("aa")
    assert not alive
    assert generator.initial_seed() == 3
    return bool(no_grad(torch.ones(1)) == 2)


# --- classes whose instances come back ---------------------------------------------------------------------------------------


class Item(NamedTuple):
    a: int
    b: torch.Tensor


Old = collections.namedtuple("NewName", ["a", "b"])


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Flags(enum.Flag):
    A = 1
    B = 2


class Text(str):
    pass


class Number(int):
    pass


class Mapping(dict[str, Any]):
    pass


class Slotted:
    __slots__ = ("__b", "a")

    def __init__(self, a: Any) -> None:
        self.a, self.__b = a, a


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int = 3


class Tensor(torch.Tensor):
    pass


class Array(np.ndarray[Any, Any]):
    pass


class WrongError(ValueError):
    def __init__(self, place: str = "?") -> None:
        super().__init__(f"at {place}")
        self.place = place


class Counted:
    made = 0

    class Inner:
        Item = collections.namedtuple("Item", ["a"])


class Meta(type):
    pass


class Metered(metaclass=Meta):
    pass


def local() -> type:
    class Local:
        def whoami(self) -> type:
            return __class__  # type: ignore[name-defined,no-any-return]

    return Local


LOCAL = local()
Lying = type("Lying", (), {"__module__": "json", "__qualname__": "JSONDecoder"})


def misplaced() -> list[Any]:
    """Instances of classes of a module that other processes import by themselves."""
    data = class_kinds.Data
    inner = [data.Inner.Item(1, 2), data.Inner.Level.HIGH]
    return [data.Item(1, 2), data.Typed(1, torch.ones(1)), data.Syntax(1, torch.ones(1)), *inner]


def renamed() -> list[Any]:
    return [class_kinds.Renamed(1, 2), class_kinds._Hidden(1, 2)]


def own() -> list[Any]:
    tensors = [torch.ones(2).as_subclass(Tensor), np.ones(2).view(Array)]
    plain = [Item(1, torch.ones(1)), Old(1, 2), Level.HIGH, Flags.A | Flags.B, Text("a"), Number(3), Mapping(a=3)]
    return [
        *plain,
        Slotted(3),
        Frozen(),
        Metered(),
        LOCAL(),
        Lying(),
        Box(3),
        Lazy(),
        Square(1.0),
        Counted.Inner.Item(3),
        *tensors,
    ]


def an_exception() -> list[Any]:
    return [WrongError("here")]


def classes_themselves() -> list[Any]:
    return [Item, class_kinds.Data.Item, LOCAL, Level]


def changes_its_class() -> list[Any]:
    Counted.made += 7
    return [Counted()]


FUNCTIONS: list[Callable[[], bool]] = [
    sets_cudnn, holds_modules, uses_torch_namespaces, loads_lazily, uses_a_handler, uses_streams, uses_constants, derives_a_dataclass,
    uses_caches, uses_types, counts_globally, pickles_its_own, uses_the_rest,
]  # fmt: skip
RETURNS: list[Callable[[], list[Any]]] = [misplaced, renamed, own, an_exception, classes_themselves]


def main() -> dict[str, str]:
    """What went wrong, by the name of the case."""
    wrong = {}
    calls = {}
    for function in (*FUNCTIONS, *RETURNS, changes_its_class):
        try:
            calls[function.__name__] = pickling.dumps(function)
        except Exception as error:
            wrong[function.__name__] = f"not sent: {type(error).__name__}: {error}"
    process = subprocess.run(
        [sys.executable, "-c", OTHER], input=pickle.dumps(calls), stdout=subprocess.PIPE, check=True
    )
    outcomes = pickle.loads(process.stdout)
    wrong |= {name: text for name, text in outcomes.items() if isinstance(text, str)}
    for function in FUNCTIONS:
        if (name := function.__name__) not in wrong and pickle.loads(outcomes[name]) is not True:
            wrong[name] = "returned False"
    for returns in RETURNS:
        if (name := returns.__name__) not in wrong:
            here, there = returns(), pickle.loads(outcomes[name])
            differ = [type(a).__name__ for a, b in zip(here, there, strict=True) if type(a) is not type(b)]
            differ += [a.__name__ for a, b in zip(here, there, strict=True) if isinstance(a, type) and a is not b]
            if differ:
                wrong[name] = f"other classes: {differ}"
    if "changes_its_class" not in wrong:
        (counted,) = pickle.loads(outcomes["changes_its_class"])
        if (type(counted), Counted.made) != (Counted, 0):
            wrong["changes_its_class"] = f"the program's class has changed: {Counted.made}"
    return wrong


if __name__ == "__main__":
    print(json.dumps(main()))
    sys.stdout.flush()
    os._exit(0)  # torch's namespaces take seconds to end
