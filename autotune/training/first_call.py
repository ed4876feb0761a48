"""What a process pays once for a user's training function: its imports, and a warm-up call where a process calls it many times.

Usually each training is the only one of its process, which calls the function exactly once. With ``_reuse_process_: true`` a process
calls it for one trial after another. The first call then pays what later ones find there (lazy set-up, caches), and would be slower than
these, which in a study is the baseline. So there the function is called once before the first call that counts, up to its first report.
That call is build phase, as are imports of the user's own modules, and later trainings of the process are charged for both as well.

Imports of installed libraries count as nothing, like torch's own: the first of several forked processes would pay alone for what the
fork server then imports for all others.
"""

import contextlib
import importlib
import importlib.machinery
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from autotune.config.schema import COMMAND_KEY, REUSE_KEY, TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Phase, PhaseClock

MAX_STEP_SECONDS = 10.0
"""Longest time that a warm-up call may take from its first optimizer step to its first report."""


class TrainingEnded(BaseException):
    """Raised inside the user's training function to end it; user code must not catch it."""


@dataclass
class PaidOnce:
    """One-time costs of a training function that this process has paid: its warm-up call and its imports."""

    seconds: float = 0.0
    joules: float | None = 0.0
    """Energy of the one-time costs; None if energy is not measured."""

    @contextlib.contextmanager
    def counting(self, clock: PhaseClock) -> Iterator[None]:
        """Context whose time and energy count into the clock's build phase and into this record."""
        phase, seconds, joules = clock.phase, clock.seconds(Phase.BUILD), clock.joules(Phase.BUILD)
        clock.enter(Phase.BUILD)
        try:
            yield
        finally:
            clock.enter(phase)
            self.seconds += clock.seconds(Phase.BUILD) - seconds
            now = clock.joules(Phase.BUILD)
            self.joules = None if now is None or joules is None or self.joules is None else self.joules + now - joules


_paid: dict[str, PaidOnce] = {}
"""One-time costs of every function that this process has called, by ``_target_``."""


def prepare_call(config: TrialConfig, clock: PhaseClock, warm_up: Callable[[], None], *, is_resumed: bool = False) -> PaidOnce:
    """Charge the one-time costs of the configuration's training function to the clock, after a warm-up call where there is to be one.

    Args:
        config: configuration that names the function.
        clock: clock of the call that counts, in its build phase.
        warm_up: calls the function up to its first report, without counting it, and frees what it leaves.
        is_resumed: whether the call resumes a paused training, which is charged for what its first process paid.

    Raises:
        Exception: the function raised it.
    """
    assert config.training is not None
    name = config.training["_target_"]
    if (paid := _paid.get(name)) is not None:
        clock.add(Phase.BUILD, paid.seconds, paid.joules)
        return paid
    paid = PaidOnce()
    if config.training.get(REUSE_KEY) and not is_resumed:  # what a resumed one sets up does not count before it has loaded its state
        with paid.counting(clock), _same_folder(), _ended_by_a_step():
            warm_up()
    _paid[name] = paid
    return paid


def check_node(training: Mapping[str, Any]) -> None:
    """Check the keys of the ``training`` node that say how processes call the function.

    Raises:
        ConfigError: ``_reuse_process_`` is neither true nor false, or there is a ``_warm_up_``, which earlier versions had.
    """
    if "_warm_up_" in training:
        raise ConfigError(
            f"training._warm_up_: is gone, since a process calls the function only once; accepted is {REUSE_KEY}: true, for a process that "
            f"calls it for one trial after another"
        )
    if not isinstance(training.get(REUSE_KEY, False), bool):
        raise ConfigError(f"training.{REUSE_KEY}: found {training[REUSE_KEY]!r}, accepted are true, false")


def function_node(training: Mapping[str, Any]) -> dict[str, Any]:
    """The ``training`` node without what is no argument of the function."""
    return {key: value for key, value in training.items() if key not in (REUSE_KEY, COMMAND_KEY)}


@contextlib.contextmanager
def imports_are_build(clock: PhaseClock, paid: PaidOnce | None) -> Iterator[None]:
    """Context in which imports of this thread count into the clock's build phase; not while the clock is stopped.

    Imports of installed libraries stop the clock instead.

    Args:
        clock: the clock.
        paid: counts imports as well; None if they are counted already, and the clock is in its build phase.
    """
    thread = threading.get_ident()
    _importers[thread] = importer = (clock, paid)
    setattr(importlib._bootstrap, _HOOK, _timed_import)  # noqa: SLF001  # no public hook is called at the end of an import
    try:
        yield
    finally:
        if _importers.get(thread) is importer:
            del _importers[thread]
        if not _importers:
            setattr(importlib._bootstrap, _HOOK, _import)  # noqa: SLF001


_HOOK = "_find_and_load"
"""Name of the function that importlib calls only for modules that are not yet imported, so that other imports cost nothing."""
_import: Callable[[str, Any], ModuleType] = getattr(importlib._bootstrap, _HOOK)  # noqa: SLF001
_importers: dict[int, tuple[PhaseClock, PaidOnce | None]] = {}
"""Clock and record that count the imports of a thread, by thread identifier; no record while an import is being counted."""


def _timed_import(name: str, import_: Any) -> ModuleType:
    importer = _importers.get(thread := threading.get_ident())
    if importer is None or importer[0].phase is None:
        return _import(name, import_)  # in a thread that is not counted, within a library's import, or while nothing is timed
    clock, paid = importer
    if _is_library(name):
        del _importers[thread]
        counted: contextlib.AbstractContextManager[None] = clock.stopped()
    elif paid is None:
        return _import(name, import_)
    else:
        _importers[thread] = clock, None
        counted = paid.counting(clock)
    try:
        with counted:
            return _import(name, import_)
    finally:
        _importers[thread] = importer


def _is_library(name: str) -> bool:
    """Whether a module belongs to Python or to an installed library, by where the package lies that it is part of."""
    package = name.partition(".")[0]
    if package == _OWN_PACKAGE:
        return True
    spec = getattr(sys.modules.get(package), "__spec__", None)
    if spec is None:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.machinery.PathFinder.find_spec(package)
    return package in sys.builtin_module_names or str(getattr(spec, "origin", None)).startswith(_LIBRARY_FOLDERS)


_OWN_PACKAGE = "autotune"
_LIBRARY_FOLDERS = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib"))


@contextlib.contextmanager
def _same_folder() -> Iterator[None]:
    """Restore the working folder at the end; threads, default dtypes and seeds need not be, they are set for every training."""
    folder = os.getcwd()  # noqa: PTH109
    try:
        yield
    finally:
        os.chdir(folder)


@contextlib.contextmanager
def _ended_by_a_step() -> Iterator[None]:
    """End the training at the first optimizer step that is more than ``MAX_STEP_SECONDS`` after the first step."""
    began: float | None = None

    def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal began
        now = time.monotonic()
        began = now if began is None else began
        if now - began > MAX_STEP_SECONDS:
            raise TrainingEnded

    handle = register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        handle.remove()
