"""Objects that travel by name: those that a module holds which other processes can import.

A pickle then holds the module's name and the path of an attribute in it, and the other process finds its own object there. Where it stops:
:mod:`offload.pipeline.program.pickling` decides which objects try to travel so.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import operator
import sys
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from offload.errors import RunError
from offload.pipeline.program import main_module

Place = tuple[str, str]
"""The name of a module, and the path of an attribute in it: ``"torch.utils.data", "Dataset"``."""

Rule = Callable[[Any], Any]
"""Reduces an object as ``__reduce__`` does, or returns NotImplemented."""


def adopt_registrations() -> None:
    """Send by value also the modules that somebody has registered with Ray's own copy of cloudpickle, as programs on Ray do."""
    if (rays := sys.modules.get("ray.cloudpickle")) is not None:
        for name in rays.list_registry_pickle_by_value() & sys.modules.keys():
            cloudpickle.register_pickle_by_value(sys.modules[name])


def dispatch_table(own: Mapping[type, Any]) -> Mapping[type, Any]:
    """The reducers of classes, ``own`` before those that Ray registers with its own copy of cloudpickle: of references and of handles of
    actors, which a data set may hold. Those of Ray Serve stay its own: it lets locks travel, as new locks, for the sake of FastAPI's."""
    rays = sys.modules.get("ray.cloudpickle")
    if rays is None:
        return own
    theirs = rays.CloudPickler.dispatch_table
    if "ray.serve" in sys.modules:
        theirs = {kind: reducer for kind, reducer in theirs.items() if not _is_of_serve(reducer)}
    return ChainMap(own, theirs)  # type: ignore[arg-type]


def _is_of_serve(reducer: Any) -> bool:
    """Whether Ray Serve has registered a reducer: what it calls is one of Serve's functions."""
    calls = [cell.cell_contents for cell in getattr(reducer, "__closure__", None) or ()]
    return any((getattr(call, "__module__", None) or "").startswith("ray.serve.") for call in calls)


def adopt_loaded_by_path(name: Any) -> None:
    """Send by value also this module, if the program has loaded it by its path: under its name, other processes would find none."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or module in _looked_up:
        return
    _looked_up.add(module)
    spec = getattr(module, "__spec__", None)
    # A package may give a module a second name, which its import sets up in other processes, too: its specification keeps the first.
    if spec is None or spec.name != name or not spec.has_location or name in ("__main__", main_module.NAME):
        return
    if is_by_value(name):
        return
    found = _found(name)
    # An installed package may be found elsewhere now: Ray brings a psutil of its own, and puts it before the other.
    if found == spec.origin or (found is not None and str(spec.origin).startswith((sys.prefix, sys.base_prefix))):
        return
    cloudpickle.register_pickle_by_value(module)


_looked_up: weakref.WeakSet[types.ModuleType] = weakref.WeakSet()


def _found(name: str) -> str | None:
    """The file of the module that an import of this name would find; None if it would find none."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return None
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # libraries add finders of their own
            spec = finder.find_spec(name, path)
            if spec is not None:
                return spec.origin
    return None


def is_by_value(name: str) -> bool:
    """Return whether functions and classes of this module travel by value, since other processes cannot import it."""
    if name not in sys.modules or name in ("__main__", main_module.NAME):
        return True
    parts = name.split(".")
    by_value: set[str] = cloudpickle.list_registry_pickle_by_value()
    return any(".".join(parts[:end]) in by_value for end in range(1, len(parts) + 1))


def attributes_of(module: Any) -> Mapping[str, Any]:
    """A module's attributes, without loading one that loads lazily."""
    with contextlib.suppress(AttributeError):
        return dict(object.__getattribute__(module, "__dict__"))
    return {}


def importable() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The modules that other processes can import, and their attributes."""
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType) and not is_by_value(name):
            yield name, attributes_of(module)


def attribute(module: str, path: str) -> Any:
    """The object at this path of a module, which is imported if need be."""
    return operator.attrgetter(path)(importlib.import_module(module))


def held(module: str, path: str, kind: str) -> Any:
    """The object that a module holds here, in place of the program's own, which cannot be pickled. Raises RunError if there is none."""
    with contextlib.suppress(AttributeError):
        value = attribute(module, path)
        if type(value).__name__ == kind:
            return value
    raise RunError(
        f"{module}.{path} is a {kind} in the program, which cannot be pickled, and it is not here: the program has set it after the "
        "import. Set it within the function that uses it."
    )


def held_by_modules() -> Iterator[tuple[Any, Place]]:
    """The objects that importable modules hold under public names, except classes, functions, modules and plain data.

    Private names are left out: a module may set them only at a first use. A script that runs again in other processes counts with the names
    that it sets before its guard. It comes first, since of several places the last one counts.
    """
    plain = (type, types.FunctionType, int, float, str, bytes, tuple, list, dict, set, type(None))
    script = main_module.of_this_process()
    for key in () if script is None else script.names:
        value = attributes_of(main_module.script_module()).get(key)
        if not issubclass(type(value), (*plain, types.ModuleType)):
            yield value, ("__main__", key)
    for name, attributes in importable():
        for key, value in attributes.items():
            if key.startswith("_") and not key.endswith("__"):
                continue
            kind = type(value)  # isinstance asks the object, and a proxy may load a library then
            if issubclass(kind, types.ModuleType):
                if kind is not types.ModuleType and f"{name}.{key}" not in sys.modules:
                    for path, inner in attributes_of(value).items():
                        yield inner, (name, f"{key}.{path}")
            elif not issubclass(kind, plain):
                yield value, (name, key)


def reduce_module(module: types.ModuleType) -> Any:
    """Reduce a module of a class of its own."""
    name = attributes_of(module).get("__name__")
    if not isinstance(name, str) or sys.modules.get(name) is not module:
        name = next((key for key, loaded in list(sys.modules.items()) if loaded is module), name)
    if not isinstance(name, str):
        return NotImplemented
    if sys.modules.get(name) is module:
        return NotImplemented if is_by_value(name) else (cloudpickle.subimport, (name,))
    parent, _, last = name.rpartition(".")  # a namespace such as torch.ops.aten
    if not is_by_value(parent) and attributes_of(sys.modules[parent]).get(last) is module:
        return attribute, (parent, last)
    return NotImplemented


def rule_for_constants(kind: type) -> Rule:
    """The rule for objects of a class. Those without state travel by name if the module of the class holds them."""
    if kind in cloudpickle.Pickler.dispatch_table:  # it has a reducer of its own
        return _as_usual
    if kind is object:
        return _by_name({id(value): place for value, place in _bare_objects()})
    if kind not in _constant_rules:  # each batch has a pickler of its own
        places: dict[int, Place] = {}
        if not is_by_value(kind.__module__):
            attributes = attributes_of(sys.modules[kind.__module__])
            places = {id(value): (kind.__module__, name) for name, value in attributes.items() if type(value) is kind}
        _constant_rules[kind] = _by_name(places) if places else _as_usual
    return _constant_rules[kind]


_constant_rules: weakref.WeakKeyDictionary[type, Rule] = weakref.WeakKeyDictionary()


def _bare_objects() -> Iterator[tuple[object, Place]]:
    for module, attributes in importable():
        yield from ((value, (module, name)) for name, value in attributes.items() if type(value) is object)


def _by_name(places: Mapping[int, Place]) -> Rule:
    """The rule for objects that modules hold at these places, by the objects' ids."""

    def reduce(obj: Any) -> Any:
        place = places.get(id(obj))
        if place is None or not _is_without_state(obj):
            return NotImplemented
        module, name = place
        # The module may hold another object by now.
        return (attribute, place) if attributes_of(sys.modules.get(module)).get(name) is obj else NotImplemented

    return reduce


def _is_without_state(obj: Any) -> bool:
    """Return whether a pickle of this object would only name its class, so that the other process's own object can stand for it."""
    try:
        reduced = obj.__reduce_ex__(5)
    except Exception:
        return False
    return (
        isinstance(reduced, tuple)
        and reduced[:2] == (copyreg.__newobj__, (type(obj),))  # type: ignore[attr-defined]
        and not any(reduced[2:])
    )


def _as_usual(obj: Any) -> Any:
    return NotImplemented


_places: weakref.WeakKeyDictionary[type, Place | None] = weakref.WeakKeyDictionary()  # of all classes looked up so far


def place_of_class(kind: type) -> Place | None:
    """Where an importable module holds a class under another path than its name. None if none does."""
    own = sys.modules.get(kind.__module__)
    if own is not None and is_by_value(kind.__module__):
        return None
    if kind not in _places:
        path = None if own is None else _path_to_class(kind, attributes_of(own), kind.__module__)
        if path is not None:
            _places[kind] = kind.__module__, path
        else:
            for module, attributes in importable():
                name = next((name for name, value in attributes.items() if value is kind), None)
                if name is not None:
                    _places[kind] = module, name
                    break
        _places.setdefault(kind, None)  # each batch has a pickler of its own, and would look again
    return _places.get(kind)


def _path_to_class(
    kind: type, attributes: Mapping[str, Any], module: str, seen: frozenset[type] = frozenset()
) -> str | None:
    """The path to a class among these attributes, and among those of the module's classes in them."""
    inner = []
    for name, value in attributes.items():
        if value is kind:
            return name
        if isinstance(value, type) and value.__module__ == module and value not in seen:
            inner.append((name, value))
    for name, value in inner:
        path = _path_to_class(kind, vars(value), module, seen | {value})
        if path is not None:
            return f"{name}.{path}"
    return None
