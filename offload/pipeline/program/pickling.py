"""Pickles of what a program sends to other processes, and of what these send back.

cloudpickle sends functions and classes of the script by value, with the globals that they use. It fails on some objects that a forked
process would inherit, or find under their names. Here, these travel, too:

* a module of any class, such as ``torch.backends.cudnn`` or one that loads lazily, by its name;
* a constant without state that a module holds, such as ``dataclasses.MISSING``, by its name, so that ``is`` holds;
* functions and classes of a module that the program has loaded by its path, by value;
* a class that its module holds under another path than its name says, such as a named tuple in the body of a class, by that path;
* functions of the script with a cache, and other objects that pickle would look up in the script, by value;
* an object that cannot be pickled and that an importable module holds, such as a library's console, by its name;
* a memory map, by the name of its file: NumPy would pickle its content, so each process would hold a copy, where forked ones share it.

A process that sends a class back names it, and the program finds its own class object.

Where it stops: :mod:`offload.pipeline.program.pickling_names` knows the objects that travel by name,
:mod:`offload.pipeline.program.pickling_rules` single classes of objects. :mod:`offload.pipeline.preprocessing.unpicklable` names the part
of a value that cannot travel.
"""

from __future__ import annotations

import enum
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np
from cloudpickle import cloudpickle as trackers

from offload.pipeline.program import main_module
from offload.pipeline.program.pickling_names import (
    Rule,
    adopt_loaded_by_path,
    adopt_registrations,
    attribute,
    dispatch_table,
    held,
    held_by_modules,
    place_of_class,
    reduce_module,
    rule_for_constants,
)
from offload.pipeline.program.pickling_rules import RULES, is_scripted, reduce_map, reduce_scripted


def dumps(value: Any, classes: list[type] | None = None) -> bytes:
    """Pickle an object that a program sends, for :func:`loads`. ``classes`` gets the classes that travel by value.

    Raises what pickling raises for objects that cannot be sent.
    """
    try:
        pickler, written = _dumped(value, Pickler)
    except Exception as error:  # the user's classes may raise anything
        try:
            pickler, written = _dumped(value, _NamingPickler)
        except Exception:
            raise error from None
    if classes is not None:
        classes += [sent for sent in pickler.by_value if isinstance(sent, type)]
    main = vars(sys.modules["__main__"])
    named = ((sent.__qualname__, sent) for sent in pickler.by_value)
    script = {name: sent for name, sent in named if name in main and main[name] is sent}
    pickler.dump(script)  # a second pickle, which refers to the objects of the first
    return written.getvalue()


def content_of(value: Any) -> bytes:
    """The pickle of an object without what differs from process to process: each one gives the classes that it pickles random numbers."""
    content = dumps(value)
    numbers = [number.encode() for number in list(trackers._DYNAMIC_CLASS_TRACKER_BY_ID)]
    there = sorted((at, number) for number in numbers if (at := content.find(number)) >= 0)
    for place, (_, number) in enumerate(there):
        content = content.replace(number, b"%032d" % place)
    return content


def loads(content: Any) -> Any:
    """Load an object that a program sent, in another process, and note the classes that came with it.

    Afterwards this process's ``__main__`` holds the script's functions and classes. They can then pickle and load each other's instances
    by name, as ``torch.save`` does.
    """
    known = set(trackers._DYNAMIC_CLASS_TRACKER_BY_ID)
    unpickler = pickle.Unpickler(io.BytesIO(content))
    value = unpickler.load()
    _received.update(set(trackers._DYNAMIC_CLASS_TRACKER_BY_ID) - known)
    _put_into_main(unpickler.load())
    return value


def dumps_back(value: Any) -> bytes:
    """Pickle an object that a process sends on, or back. Raises what pickling raises for objects that cannot be sent."""
    return _dumped(value, PicklerBack)[1].getvalue()


def travels(value: object) -> bool:
    """Return whether ``value`` can be pickled."""
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _dumped(value: Any, kind: Callable[..., Pickler]) -> tuple[Pickler, io.BytesIO]:
    written = io.BytesIO()
    pickler = kind(written)
    pickler.dump(value)
    return pickler, written


class Carried:
    """The user's functions, which stay pickled on their way through Ray, whose own pickles carry less.

    Functions that share globals must travel in one object, to share them there, too.
    """

    def __init__(self, value: Any) -> None:
        self._content = dumps(value)

    def opened(self) -> Any:
        """A copy of the value."""
        return loads(self._content)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
    """See :func:`dumps`. It chooses a rule for each class of objects once: a data set may hold millions."""

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> None:
        # Before the base class begins, which looks for it once.
        self.dispatch_table: Any = dispatch_table(cloudpickle.Pickler.dispatch_table)
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        adopt_registrations()
        self._rules: dict[type, Rule] = {}
        self.by_value: list[Any] = []
        """The classes and functions that it has sent by value."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object by the rule of its class."""
        kind = type(obj)
        rule = self._rules.get(kind)
        if rule is None:
            rule = self._rules[kind] = self._rule(kind)
        return rule(obj)

    def _rule(self, kind: type) -> Rule:
        if issubclass(kind, type):
            return self._class
        if kind is types.FunctionType:
            return self._function
        if kind is types.ModuleType:
            return self._module
        if issubclass(kind, types.ModuleType):
            return reduce_module
        if kind is np.memmap:
            return reduce_map
        if is_scripted(kind):
            return reduce_scripted
        return RULES.get(kind) or rule_for_constants(kind)

    def _module(self, obj: types.ModuleType) -> Any:
        adopt_loaded_by_path(obj.__name__)
        return super().reducer_override(obj)

    def _function(self, obj: types.FunctionType) -> Any:
        adopt_loaded_by_path(obj.__module__)
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented:
            self.by_value.append(obj)
        return reduced

    def _class(self, obj: type) -> Any:
        adopt_loaded_by_path(obj.__module__)
        reduced = super().reducer_override(obj)
        if _makes_a_class(reduced) and (place := place_of_class(obj)) is not None:
            return attribute, place
        if _makes_a_class(reduced):
            self.by_value.append(obj)
            _complete(obj, reduced)
        return reduced


class PicklerBack(Pickler):
    """See :func:`dumps_back`. It sends classes of the script by cloudpickle's ids, by which a process finds its own class objects.

    If they travelled by value, each batch would replace the attributes of such a class by copies.

    ``home``: the pickle goes to the process that has sent the classes, so their content need not travel.
    """

    def __init__(
        self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None, *, home: bool = False
    ) -> None:
        super().__init__(file, buffer_callback)
        self._home = home

    def _class(self, obj: type) -> Any:
        reduced = super()._class(obj)
        if not _makes_a_class(reduced):
            return reduced
        tracker_id = reduced[1][-2]
        content = None if self._home and tracker_id in _received else _content_of(obj)
        return _own_class, (tracker_id, obj.__qualname__, content)


class _NamingPickler(Pickler):
    """Sends objects that cannot be pickled, and that an importable module holds, by their names."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._named = {id(value): place for value, place in held_by_modules()}

    def reducer_override(self, obj: Any) -> Any:
        place = self._named.get(id(obj))
        if place is not None and not _travels_by_value(obj):
            return held, (*place, type(obj).__name__)
        return super().reducer_override(obj)


def _travels_by_value(value: object) -> bool:
    try:
        _dumped(value, Pickler)
    except Exception:
        return False
    return True


# --- classes ------------------------------------------------------------------------------------------------------------

_of_the_script: set[str] = set()  # names in this process's __main__
_received: set[str] = set()  # cloudpickle's ids of the classes that came from a program
_contents: weakref.WeakKeyDictionary[type, bytes | None] = weakref.WeakKeyDictionary()  # pickles of classes sent back


def _makes_a_class(reduced: Any) -> bool:
    """Return whether this is how cloudpickle reduces a class that it sends by value: six parts, where a name is text."""
    return isinstance(reduced, tuple) and len(reduced) == 6


def _complete(kind: type, reduced: Any) -> None:
    """Add a class's path and slots to what cloudpickle sends, so that the class made from it has them, too.

    Without slots, its instances would have a dict, which those of the program's own class do not have.
    """
    if isinstance(kind, enum.EnumMeta):
        return
    made_of, attributes = reduced[1][3], reduced[2][0]
    made_of["__qualname__"] = kind.__qualname__
    if slots := vars(kind).get("__slots__"):
        made_of["__slots__"] = slots
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                attributes.pop(f"_{kind.__name__.lstrip('_')}{name}", None)


def _content_of(kind: type) -> bytes | None:
    """The pickle of a class. None if it uses something that cannot be pickled, such as an open file."""
    if kind not in _contents:
        try:
            _contents[kind] = dumps(kind)
        except Exception:
            _contents[kind] = None
    return _contents[kind]


def _put_into_main(script: Mapping[str, Any]) -> None:
    """Give this process's ``__main__`` the script's functions and classes. Names that it has of its own stay, unless it is the script."""
    main = sys.modules["__main__"]
    for name, value in script.items():
        if name in _of_the_script or main.__name__ == main_module.NAME or not hasattr(main, name):
            _of_the_script.add(name)
            setattr(main, name, value)


def _own_class(tracker_id: str, name: str, content: bytes | None) -> Any:
    """This process's own class with this id of cloudpickle's, or else the class that ``content`` pickles."""
    known = trackers._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is None and content is None:
        raise pickle.UnpicklingError(f"the class {name} cannot be pickled, and this process does not have it")
    return known if known is not None else pickle.loads(content or b"")
