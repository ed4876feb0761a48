"""A training function as bytes that other processes load, with all code of the script that it refers to.

cloudpickle writes functions and classes of the script by value, but what a C type wraps, such as ``functools.lru_cache``, as a reference to
the script, which is ``__main__`` in no other process. Such objects are written here as what they are made of, and so is code of modules
that other processes could not import.
"""

import functools
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NewType

import cloudpickle

from autotune.errors import ConfigError


def pickled(training: Callable[..., Any]) -> bytes:
    """The pickled function; of a plain function a pair, whose second part ``load_function`` adds to the function's globals.

    Raises:
        ConfigError: something that the function refers to cannot be pickled; names the variable that holds it.
    """
    try:
        return _dumped((training, _names_in_classes(training)) if isinstance(training, FunctionType) else training)
    except Exception as error:  # whatever the function refers to may refuse
        name = getattr(training, "__name__", type(training).__name__)
        raise ConfigError(
            f"tune({name}): {_culprit(training)}cannot be sent to other processes: {' '.join(str(error).split())}; make it inside a "
            f"function, or in a module that the script imports"
        ) from error


def _dumped(what: Any) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(what)
    finally:
        for module in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.by_value: list[ModuleType] = []
        """Modules that other processes cannot import, which cloudpickle was told to write by value."""
        self._importable: dict[str, bool] = {}

    def reducer_override(self, obj: Any) -> Any:
        """How an object is made anew, as ``__reduce__`` says it; called for all but plain data."""
        if isinstance(obj, functools._lru_cache_wrapper) and not self._is_found(obj):  # noqa: SLF001  # it has no public name
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        functions = getattr(obj, "registry", None) if isinstance(obj, FunctionType) else None  # of functools.singledispatch
        if isinstance(functions, MappingProxyType) and not self._is_found(obj):
            return _dispatching, (dict(functions),)
        if isinstance(obj, NewType) and not self._is_found(obj):
            return NewType, (obj.__name__, obj.__supertype__)
        if isinstance(obj, functools.cached_property):  # which has a lock until Python 3.12
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        owner = obj.__name__ if isinstance(obj, ModuleType) else getattr(obj, "__module__", None)
        if isinstance(owner, str) and not self._is_importable(owner):
            if isinstance(obj, ModuleType | FunctionType | type):
                module = sys.modules.get(owner)
                if module is not None and owner != "__main__" and module not in self.by_value:
                    cloudpickle.register_pickle_by_value(module)
                    self.by_value.append(module)
            elif type(obj) not in self.dispatch_table:
                reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                if isinstance(reduced, str):
                    raise pickle.PicklingError(
                        f"{reduced}, a {type(obj).__name__}, pickles as a name of {owner}, which only the script has"
                    )
                return reduced
        return super().reducer_override(obj)

    def _is_found(self, obj: Any) -> bool:
        """Whether another process finds an object by its module and name."""
        found: Any = sys.modules.get(obj.__module__)
        for name in getattr(obj, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        return found is obj and self._is_importable(obj.__module__)

    def _is_importable(self, module: str) -> bool:
        """Whether another process can import a module of this one; cloudpickle itself asks only whether it was imported."""
        name = module.partition(".")[0]
        if name not in self._importable:
            specs = (finder.find_spec(name, None) for finder in sys.meta_path)
            found, here = next(filter(None, specs), None), sys.modules.get(name)
            own = getattr(here, "__spec__", None)
            is_same = found is not None and (own is None or own.origin in (None, found.origin))
            self._importable[name] = name != "__main__" and (here is None or is_same)
        return self._importable[name]


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


def _dispatching(functions: Mapping[type, Callable[..., Any]]) -> Callable[..., Any]:
    dispatching: Any = functools.singledispatch(functions[object])
    for kind, function in functions.items():
        dispatching.register(kind, function)
    called: Callable[..., Any] = dispatching
    return called


def _culprit(function: Any) -> str:
    """The variables that lead from a function to what cannot be pickled, as the begin of a message; empty if they are not known."""
    path: list[str] = []
    seen: set[int] = set()
    while isinstance(function, FunctionType):
        seen.add(id(function))
        variables = inspect.getclosurevars(function)
        known = {**variables.globals, **variables.nonlocals}
        name = next((name for name, value in known.items() if id(value) not in seen and not _can_be_pickled(value)), None)
        if name is None:
            break
        path.append(name)
        function = getattr(known[name], "__wrapped__", known[name])
    return f"{' -> '.join(path)}: " if path else ""


def _can_be_pickled(value: Any) -> bool:
    try:
        _dumped(value)
    except Exception:  # noqa: BLE001  # as above: the caller tells of it
        return False
    return True


def _names_in_classes(function: FunctionType) -> dict[str, Any]:
    """Globals that bodies of classes within functions read, by name, such as their annotations: cloudpickle does not see these.

    Looked through are the function, and the functions and classes of its own module that it reaches.
    """
    found, seen = {}, set()
    waiting: list[CodeType] = [function.__code__]
    while waiting:
        code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        waiting += [item for item in code.co_consts if isinstance(item, CodeType)]
        for name in set(code.co_names) & function.__globals__.keys():
            value = function.__globals__[name]
            if not code.co_flags & inspect.CO_OPTIMIZED:  # a class body
                found[name] = value
            members = vars(value).values() if isinstance(value, type) and value.__module__ == function.__module__ else [value]
            unwrapped = [getattr(item, "__wrapped__", item) for item in members]
            waiting += [item.__code__ for item in unwrapped if isinstance(item, FunctionType) and item.__globals__ is function.__globals__]
    return found
