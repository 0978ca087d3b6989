"""Pickles of what a program sends to other processes, and of what these send back.

cloudpickle sends functions and classes of the script by value, with the globals that they use. It fails on some objects that a forked
process would inherit, or find under their names. Here, these travel, too:

* a module of any class, such as ``torch.backends.cudnn`` or one that loads lazily, by its name;
* a constant without state that a module holds, such as ``dataclasses.MISSING``, by its name, so that ``is`` holds;
* a class that its module holds under another path than its name says, such as a named tuple in the body of a class, by that path;
* functions of the script with a cache, and other objects that pickle would look up in the script, by value;
* an object that cannot be pickled and that an importable module holds, such as a library's console, by its name;
* a memory map, by the name of its file: NumPy would pickle its content, so each process would hold a copy, where forked ones share it.

A process that sends a class back names it, and the program finds its own class object.

Where it stops: :mod:`offload.pipeline.work.unpicklable` names the part of a value that cannot travel.
"""

from __future__ import annotations

import contextlib
import copyreg
import enum
import functools
import importlib
import io
import mmap
import operator
import os
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from ray import cloudpickle
from ray.cloudpickle import cloudpickle as trackers

from offload.errors import RunError

LARGE_BYTES = 64 << 20  # smaller maps travel with their content: nodes that do not see the file can use them

_Place = tuple[str, Any, int, tuple[int, ...], str]
"""The arguments of :func:`_mapped`."""


def reduced(array: Any) -> Any:
    """Reduce a memory map as ``__reduce__`` does. NotImplemented: its content must travel."""
    place = _place(array)
    return NotImplemented if place is None else (_mapped, place)


def _place(array: Any) -> _Place | None:
    """Where the array lies in its file. None if its content must travel, as that of a writable map, which may differ from the file."""
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    if array.nbytes < LARGE_BYTES or array.mode != "r" or not contiguous or not os.path.isfile(array.filename or ""):
        return None
    # A view knows where the whole map begins in the file, but not where it begins itself.
    begins = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    inside = array.ctypes.data - np.frombuffer(array._mmap, np.uint8).ctypes.data
    order = "C" if array.flags.c_contiguous else "F"
    return str(array.filename), array.dtype, begins + inside, array.shape, order


def _mapped(filename: str, dtype: Any, offset: int, shape: tuple[int, ...], order: Any) -> Any:
    try:
        return np.memmap(filename, dtype, "r", offset, shape, order)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{filename!r}, which the data set maps into memory, cannot be mapped on a preprocessing node: {error}. Every node must see "
            "the file under this path. If they cannot, hold its content instead of the map: numpy.array(map)."
        ) from None


Place = tuple[str, str]
"""The name of a module, and the path of an attribute in it: ``"torch.utils.data", "Dataset"``."""

_Rule = Callable[[Any], Any]
"""Reduces an object as ``__reduce__`` does, or returns NotImplemented."""


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
    pickler.dump(script)  # type: ignore[no-untyped-call]  # a second pickle, which refers to the objects of the first
    return written.getvalue()


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
    pickler.dump(value)  # type: ignore[no-untyped-call]
    return pickler, written


def is_by_value(name: str) -> bool:
    """Return whether functions and classes of this module travel by value, since other processes cannot import it."""
    if name not in sys.modules or name in ("__main__", "__mp_main__"):
        return True
    parts = name.split(".")
    by_value: set[str] = cloudpickle.list_registry_pickle_by_value()  # type: ignore[no-untyped-call]
    return any(".".join(parts[:end]) in by_value for end in range(1, len(parts) + 1))


class Carried:
    """The user's functions, which stay pickled on their way through Ray, whose own pickles carry less.

    Functions that share globals must travel in one object, to share them there, too.
    """

    def __init__(self, value: Any) -> None:
        self._content = dumps(value)

    def opened(self) -> Any:
        """A copy of the value."""
        return loads(self._content)


class Pickler(cloudpickle.Pickler):
    """See :func:`dumps`. It chooses a rule for each class of objects once: a data set may hold millions."""

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)  # type: ignore[no-untyped-call]
        self._rules: dict[type, _Rule] = {}
        self.by_value: list[Any] = []
        """The classes and functions that it has sent by value."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object by the rule of its class."""
        kind = type(obj)
        rule = self._rules.get(kind)
        if rule is None:
            rule = self._rules[kind] = self._rule(kind)
        return rule(obj)

    def _rule(self, kind: type) -> _Rule:
        if issubclass(kind, type):
            return self._class
        if kind is types.FunctionType:
            return self._function
        if kind is not types.ModuleType and issubclass(kind, types.ModuleType):
            return _module
        if kind is np.memmap:
            return reduced
        if _is_scripted(kind):
            return _scripted
        return _RULES.get(kind) or _constants(kind)

    def _function(self, obj: types.FunctionType) -> Any:
        reduced = super().reducer_override(obj)  # type: ignore[no-untyped-call]
        if reduced is not NotImplemented:
            self.by_value.append(obj)
        return reduced

    def _class(self, obj: type) -> Any:
        reduced = super().reducer_override(obj)  # type: ignore[no-untyped-call]
        if _makes_a_class(reduced) and (place := _place_of(obj)) is not None:
            return _attribute, place
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
        self._named = {id(value): place for value, place in _held_by_modules()}

    def reducer_override(self, obj: Any) -> Any:
        place = self._named.get(id(obj))
        if place is not None and not _travels_by_value(obj):
            return _held, (*place, type(obj).__name__)
        return super().reducer_override(obj)


def _travels_by_value(value: object) -> bool:
    try:
        _dumped(value, Pickler)
    except Exception:
        return False
    return True


# --- modules and what they hold -----------------------------------------------------------------------------------------


def _attributes(module: Any) -> Mapping[str, Any]:
    """A module's attributes, without loading one that loads lazily."""
    with contextlib.suppress(AttributeError):
        return dict(object.__getattribute__(module, "__dict__"))
    return {}


def _module(module: types.ModuleType) -> Any:
    """Reduce a module of a class of its own."""
    name = _attributes(module).get("__name__")
    if not isinstance(name, str) or sys.modules.get(name) is not module:
        name = next((key for key, loaded in list(sys.modules.items()) if loaded is module), name)
    if not isinstance(name, str):
        return NotImplemented
    if sys.modules.get(name) is module:
        return NotImplemented if is_by_value(name) else (cloudpickle.subimport, (name,))
    parent, _, last = name.rpartition(".")  # a namespace such as torch.ops.aten
    if not is_by_value(parent) and _attributes(sys.modules[parent]).get(last) is module:
        return _attribute, (parent, last)
    return NotImplemented


def _importable() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The modules that other processes can import, and their attributes."""
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType) and not is_by_value(name):
            yield name, _attributes(module)


def _held_by_modules() -> Iterator[tuple[Any, Place]]:
    """The objects that importable modules hold under public names, except classes, functions, modules and plain data.

    Private names are left out: a module may set them only at a first use.
    """
    plain = (type, types.FunctionType, int, float, str, bytes, tuple, list, dict, set, type(None))
    for name, attributes in _importable():
        for attribute, value in attributes.items():
            if attribute.startswith("_") and not attribute.endswith("__"):
                continue
            kind = type(value)  # isinstance asks the object, and a proxy may load a library then
            if issubclass(kind, types.ModuleType):
                if kind is not types.ModuleType and f"{name}.{attribute}" not in sys.modules:
                    for path, inner in _attributes(value).items():
                        yield inner, (name, f"{attribute}.{path}")
            elif not issubclass(kind, plain):
                yield value, (name, attribute)


def _constants(kind: type) -> _Rule:
    """The rule for objects of a class. Those without state travel by name if the module of the class holds them."""
    if kind in cloudpickle.Pickler.dispatch_table:  # it has a reducer of its own
        return _as_usual
    if kind is object:
        return _by_name({id(value): place for value, place in _bare_objects()})
    if kind not in _constant_rules:  # each batch has a pickler of its own
        places: dict[int, Place] = {}
        if not is_by_value(kind.__module__):
            held = _attributes(sys.modules[kind.__module__])
            places = {id(value): (kind.__module__, name) for name, value in held.items() if type(value) is kind}
        _constant_rules[kind] = _by_name(places) if places else _as_usual
    return _constant_rules[kind]


_constant_rules: weakref.WeakKeyDictionary[type, _Rule] = weakref.WeakKeyDictionary()


def _bare_objects() -> Iterator[tuple[object, Place]]:
    for module, attributes in _importable():
        yield from ((value, (module, name)) for name, value in attributes.items() if type(value) is object)


def _by_name(places: Mapping[int, Place]) -> _Rule:
    def reduce(obj: Any) -> Any:
        place = places.get(id(obj))
        if place is None or not _is_without_state(obj):
            return NotImplemented
        module, name = place
        # The module may hold another object by now.
        return (_attribute, place) if _attributes(sys.modules.get(module)).get(name) is obj else NotImplemented

    return reduce


def _is_without_state(obj: Any) -> bool:
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


def _attribute(module: str, path: str) -> Any:
    return operator.attrgetter(path)(importlib.import_module(module))


def _held(module: str, path: str, kind: str) -> Any:
    """The object that a module holds here, in place of the program's own, which cannot be pickled. Raises RunError if there is none."""
    with contextlib.suppress(AttributeError):
        held = _attribute(module, path)
        if type(held).__name__ == kind:
            return held
    raise RunError(
        f"{module}.{path} is a {kind} in the program, which cannot be pickled, and it is not here: the program has set it after the "
        "import. Set it within the function that uses it."
    )


# --- classes ------------------------------------------------------------------------------------------------------------

_of_the_script: set[str] = set()  # names in this process's __main__
_received: set[str] = set()  # cloudpickle's ids of the classes that came from a program
_contents: weakref.WeakKeyDictionary[type, bytes | None] = weakref.WeakKeyDictionary()  # pickles of classes sent back
_places: weakref.WeakKeyDictionary[type, Place | None] = weakref.WeakKeyDictionary()  # those looked for so far


def _makes_a_class(reduced: Any) -> bool:
    """Return whether cloudpickle would send a class by value."""
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


def _place_of(kind: type) -> Place | None:
    """Where an importable module holds a class under another path than its name. None if none does."""
    own = sys.modules.get(kind.__module__)
    if own is not None and is_by_value(kind.__module__):
        return None
    if kind not in _places:
        path = None if own is None else _path_to(kind, _attributes(own), kind.__module__)
        if path is not None:
            _places[kind] = kind.__module__, path
        else:
            for module, attributes in _importable():
                name = next((name for name, value in attributes.items() if value is kind), None)
                if name is not None:
                    _places[kind] = module, name
                    break
        _places.setdefault(kind, None)  # each batch has a pickler of its own, and would look again
    return _places.get(kind)


def _path_to(kind: type, attributes: Mapping[str, Any], module: str, seen: frozenset[type] = frozenset()) -> str | None:
    """The path to a class among these attributes, and among those of the module's classes in them."""
    inner = []
    for name, value in attributes.items():
        if value is kind:
            return name
        if isinstance(value, type) and value.__module__ == module and value not in seen:
            inner.append((name, value))
    for name, value in inner:
        path = _path_to(kind, vars(value), module, seen | {value})
        if path is not None:
            return f"{name}.{path}"
    return None


def _content_of(kind: type) -> bytes | None:
    """The pickle of a class. None if it uses something that cannot be pickled, such as an open file."""
    if kind not in _contents:
        try:
            _contents[kind] = dumps(kind)
        except Exception:
            _contents[kind] = None
    return _contents[kind]


def _put_into_main(script: Mapping[str, Any]) -> None:
    """Give this process's ``__main__`` the script's functions and classes. Names that it has of its own stay."""
    main = sys.modules["__main__"]
    for name, value in script.items():
        if name in _of_the_script or not hasattr(main, name):
            _of_the_script.add(name)
            setattr(main, name, value)


def _own_class(tracker_id: str, name: str, content: bytes | None) -> Any:
    """This process's own class with this id of cloudpickle's, or else the class that ``content`` pickles."""
    known = trackers._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is None and content is None:
        raise pickle.UnpicklingError(f"the class {name} cannot be pickled, and this process does not have it")
    return known if known is not None else pickle.loads(content or b"")


# --- what pickle would look up in the script ----------------------------------------------------------------------------


def _unless_found(reduce: _Rule) -> _Rule:
    """Make a rule for objects that pickle sends by name: ``reduce`` them if only the script holds that name."""

    def rule(obj: Any) -> Any:
        module, path = getattr(obj, "__module__", None), getattr(obj, "__qualname__", obj.__name__)
        if module is not None and not is_by_value(module):
            with contextlib.suppress(AttributeError):
                if _attribute(module, path) is obj:
                    return NotImplemented
        return reduce(obj)

    return rule


def _cached(cache: Any) -> Any:
    parameters = cache.cache_parameters()
    state = (cache.__wrapped__, vars(cache))
    return _empty_cache, (parameters["maxsize"], parameters["typed"]), state, None, None, _fill_cache


def _empty_cache(maxsize: int | None, typed: bool) -> Any:
    """A cache around a function that comes later: a recursive function refers to its cache."""

    @functools.lru_cache(maxsize, typed)
    def cache(*args: Any, **kwargs: Any) -> Any:
        return cache.__wrapped__(*args, **kwargs)

    return cache


def _fill_cache(cache: Any, state: tuple[Any, dict[str, Any]]) -> None:
    function, attributes = state
    functools.update_wrapper(cache, function)
    cache.__dict__.update(attributes)


def _cached_property(prop: Any) -> Any:
    return functools.cached_property, (prop.func,), {"attrname": prop.attrname}


def _new_type(kind: Any) -> Any:
    return typing.NewType, (kind.__name__, kind.__supertype__), dict(vars(kind))


def _param_spec(spec: Any) -> Any:
    return typing.ParamSpec, (spec.__name__,)


def _weak(mapping: Any) -> Any:
    return type(mapping), (), None, None, iter(list(mapping.items()))


_RULES: dict[type, _Rule] = {
    functools._lru_cache_wrapper: _unless_found(_cached),
    functools.cached_property: _cached_property,  # it holds a lock, in Python 3.11
    typing.NewType: _unless_found(_new_type),
    typing.ParamSpec: _unless_found(_param_spec),
    weakref.WeakKeyDictionary: _weak,  # functools.singledispatch uses one
    weakref.WeakValueDictionary: _weak,
}


# --- scripted modules of torch ------------------------------------------------------------------------------------------


def _is_scripted(kind: type) -> bool:
    jit = sys.modules.get("torch.jit")
    return jit is not None and issubclass(kind, (jit.ScriptModule, jit.ScriptFunction))


def _scripted(obj: Any) -> Any:
    written = io.BytesIO()
    sys.modules["torch.jit"].save(obj, written)
    return _loaded, (written.getvalue(),)


def _loaded(content: bytes) -> Any:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises to export programs instead
        return torch.jit.load(io.BytesIO(content))  # type: ignore[no-untyped-call]
