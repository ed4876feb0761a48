"""A training function as bytes that other processes load, with all code of the script that it
refers to.

cloudpickle writes functions and classes of the script by value, but an ``lru_cache`` of the script
as a reference to ``__main__``, which is another module in every other process. Caches are written
here as the function that they cache.
"""

import functools
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from autotune.errors import ConfigError

_LRU_CACHE = type(functools.cache(len))


def pickled(training: Callable[..., Any]) -> bytes:
    """The pickled function.

    Raises:
        ConfigError: something that the function refers to cannot be pickled; names the variable
            that holds it.
    """
    try:
        return _dumped(training)
    except Exception as error:  # whatever the function refers to may refuse
        name = getattr(training, "__name__", type(training).__name__)
        raise ConfigError(
            f"tune({name}): {_culprit(training)}cannot be sent to other processes:"
            f" {' '.join(str(error).split())}; create it inside a function, or in a module that the"
            " script imports"
        ) from error


def load_function(module: str, folders: Sequence[str]) -> Callable[..., Any]:
    """Load the function that ``autotune.tune`` wrote beside a module, as one of that module's own.

    Args:
        module: path of the module that ``tune`` wrote.
        folders: folders that the function's own imports are found in.
    """
    path = Path(module)
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    # the user's own code, which the user's own process wrote
    training = pickle.loads(path.with_suffix(".pkl").read_bytes())  # noqa: S301

    @functools.wraps(training)
    def function(**arguments: Any) -> Any:
        return training(**arguments)

    function.__module__ = path.stem
    return function


def _dumped(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        """How an object is created again, as ``__reduce__`` says it."""
        if isinstance(obj, _LRU_CACHE) and getattr(obj, "__module__", None) == "__main__":
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


def _culprit(function: Any) -> str:
    """The variable of a function that cannot be pickled, as the beginning of a message.

    Empty if there is none.
    """
    if not inspect.isfunction(function):
        return ""
    variables = inspect.getclosurevars(function)
    for name, value in {**variables.globals, **variables.nonlocals}.items():
        try:
            _dumped(value)
        except Exception:  # noqa: BLE001  # whatever the value refers to may refuse
            return f"{name}: "
    return ""
