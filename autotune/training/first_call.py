"""Keeps the one-time costs of a user's training function, which its first call in a process pays, out of the measured training time.

The first call in a process imports libraries, sets up devices and fills caches. The process pays this once, and it often takes longer
than the training. In a process that trains several times, only the first trial would show it, which in a study is the baseline. So the
function is called once before the call that counts (unless ``training._warm_up_`` is false), and imports count as build phase in every
call. Later trainings of the process are charged for both costs as well, in their build phase: for what the call took longer than the one
that counts, up to the same report, since the rest was training.

Imports of installed libraries count as nothing, like torch's own: the first of several forked processes would pay alone for what the
fork server then imports for all others.
"""

import contextlib
import importlib
import importlib.machinery
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Phase, PhaseClock

WARM_UP_KEY = "_warm_up_"
"""Key beside ``_target_`` in ``training``: whether the function may be called once before the call that counts; true if absent."""
MAX_STEP_SECONDS = 10.0
"""Longest time that a warm-up call may take from its first optimizer step to its first report."""

WARMED_UP = "warmed up by a call that did not count"
TIMED = "first call in its process, timed; imports counted as build"
LATER = "later call in its process"
RESUMED = "first call in its process, resumed after a pause"


class TrainingEnded(BaseException):
    """Raised inside the user's training function to end it; user code must not catch it."""


@dataclass
class PaidOnce:
    """One-time costs of a training function that this process has paid: its warm-up call and its imports."""

    how: str
    """How the function was last called, for a reader: ``WARMED_UP``, ``TIMED``, ``LATER`` or ``RESUMED``."""
    seconds: float = 0.0
    joules: float | None = 0.0
    """Energy of the one-time costs; None if energy is not measured."""
    warm_up: "_Costs | None" = None
    """What the warm-up call took, until the call that counts has come as far."""
    _after_warm_up: "_Costs" = field(default_factory=lambda: _Costs(0.0, 0.0))
    """What the clock had counted when the warm-up call ended."""

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

    def warmed_up(self, clock: PhaseClock) -> None:
        """Note that the warm-up call has come to its first report, and that the call that counts begins."""
        self.warm_up, self._after_warm_up = _Costs(self.seconds, self.joules), _Costs.of(clock)

    def came_to_report(self, clock: PhaseClock) -> None:
        """Take out of the costs what the call that counts has taken as well up to its first report, where it is now."""
        if self.warm_up is None:
            return
        imports = _Costs(self.seconds, self.joules) - self.warm_up  # of the call that counts
        again = (_Costs.of(clock) - self._after_warm_up - imports).at_most(self.warm_up)
        self.warm_up = None
        clock.add(Phase.BUILD, -again.seconds, None if again.joules is None else -again.joules)
        left = _Costs(self.seconds, self.joules) - again
        self.seconds, self.joules = left.seconds, left.joules


class _Costs(NamedTuple):
    seconds: float
    joules: float | None

    @classmethod
    def of(cls, clock: PhaseClock) -> "_Costs":
        return cls(math.fsum(clock.seconds(phase) for phase in Phase), clock.joules(*Phase))

    def __sub__(self, other: "_Costs") -> "_Costs":
        joules = None if self.joules is None or other.joules is None else self.joules - other.joules
        return _Costs(self.seconds - other.seconds, joules)

    def at_most(self, limit: "_Costs") -> "_Costs":
        joules = None if self.joules is None or limit.joules is None else max(0.0, min(self.joules, limit.joules))
        return _Costs(max(0.0, min(self.seconds, limit.seconds)), joules)


_paid: dict[str, PaidOnce] = {}
"""One-time costs of every function that this process has called, by ``_target_``."""


def prepare_call(config: TrialConfig, clock: PhaseClock, throw_away: Callable[[], None], *, is_resumed: bool = False) -> PaidOnce:
    """Warm up the configuration's training function if this process has not called it yet, and charge its one-time costs to the clock.

    Args:
        config: configuration that names the function.
        clock: clock of the call that counts, in its build phase.
        throw_away: makes a warm-up call: calls the function up to its first report, without counting it, and frees what it leaves.
        is_resumed: whether the call resumes a paused training, which is charged for what its first process paid.

    Raises:
        ConfigError: ``training._warm_up_`` is neither true nor false.
        Exception: the function raised it.
    """
    assert config.training is not None
    name, is_warmed_up = config.training["_target_"], warm_up_of(config)
    if (paid := _paid.get(name)) is not None:
        paid.warm_up = None  # the training that was warmed up never came to a report
        clock.add(Phase.BUILD, paid.seconds, paid.joules)
        paid.how = WARMED_UP if paid.how == WARMED_UP else LATER
        return paid
    if is_resumed:
        is_warmed_up = False  # what the call sets up does not count before it has loaded its state
    paid = PaidOnce(RESUMED if is_resumed else WARMED_UP if is_warmed_up else TIMED)
    if is_warmed_up:
        with paid.counting(clock), _same_folder(), _ended_by_a_step() as is_ended:
            throw_away()
        if not is_ended():
            paid.warmed_up(clock)
    _paid[name] = paid
    return paid


def how_called(config: TrialConfig) -> str | None:
    """How this process last called the configuration's training function; None before any call, and for autotune's own loop."""
    paid = None if config.training is None else _paid.get(config.training["_target_"])
    return None if paid is None else paid.how


def warm_up_of(config: TrialConfig) -> bool:
    """Whether the configuration's training function may be called once before the call that counts.

    Raises:
        ConfigError: ``training._warm_up_`` is neither true nor false.
    """
    assert config.training is not None
    may_warm_up = config.training.get(WARM_UP_KEY, True)
    if not isinstance(may_warm_up, bool):
        raise ConfigError(f"training.{WARM_UP_KEY}: found {may_warm_up!r}, accepted are true, false")
    return may_warm_up


def function_node(training: Mapping[str, Any]) -> dict[str, Any]:
    """The ``training`` node without ``_warm_up_``, which is not an argument of the function."""
    return {key: value for key, value in training.items() if key != WARM_UP_KEY}


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
def _ended_by_a_step() -> Iterator[Callable[[], bool]]:
    """End the training at the first optimizer step that is more than ``MAX_STEP_SECONDS`` after the first step.

    Yields:
        Whether it was ended so.
    """
    began: float | None = None
    is_ended = False

    def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal began, is_ended
        now = time.monotonic()
        began = now if began is None else began
        if now - began > MAX_STEP_SECONDS:
            is_ended = True
            raise TrainingEnded

    handle = register_optimizer_step_post_hook(end)
    try:
        yield lambda: is_ended
    finally:
        handle.remove()
