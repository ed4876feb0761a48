"""Keeps the one-time costs of a user's training function, which its first call in a process pays, out of the measured training time.

The first call in a process imports libraries, sets up devices and fills caches. The process pays this once, and it often takes longer
than the training. In a process that trains several times, only the first trial would show it, which in a study is the baseline. So the
function is called once before the call that counts (unless ``training._warm_up_`` is false), and imports count as build phase in every
call. Later trainings of the process are charged for both costs as well, in their build phase.
"""

import contextlib
import gc
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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


def prepare_call(config: TrialConfig, clock: PhaseClock, throw_away: Callable[[], None], *, is_resumed: bool = False) -> PaidOnce:
    """Warm up the configuration's training function if this process has not called it yet, and charge its one-time costs to the clock.

    Args:
        config: configuration that names the function.
        clock: clock of the call that counts, in its build phase.
        throw_away: makes a warm-up call: calls the function up to its first report, without counting it.
        is_resumed: whether the call resumes a paused training, which is charged for what its first process paid.

    Raises:
        ConfigError: ``training._warm_up_`` is neither true nor false.
        Exception: the function raised it.
    """
    assert config.training is not None
    name, is_warmed_up = config.training["_target_"], warm_up_of(config)
    if (paid := _paid.get(name)) is not None:
        clock.add(Phase.BUILD, paid.seconds, paid.joules)
        paid.how = WARMED_UP if paid.how == WARMED_UP else LATER
        return paid
    if is_resumed:
        is_warmed_up = False  # what the call sets up does not count before it has loaded its state
    paid = PaidOnce(RESUMED if is_resumed else WARMED_UP if is_warmed_up else TIMED)
    if is_warmed_up:
        with paid.counting(clock), _same_folder(), _ended_by_a_step():
            throw_away()
            gc.collect()
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
def imports_are_build(clock: PhaseClock, paid: PaidOnce) -> Iterator[None]:
    """Context in which imports of this thread count into the clock's build phase; not while the clock is stopped."""
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
_importers: dict[int, tuple[PhaseClock, PaidOnce]] = {}
"""Clock and record that count the imports of a thread, by thread identifier."""


def _timed_import(name: str, import_: Any) -> ModuleType:
    importer = _importers.pop(thread := threading.get_ident(), None)
    if importer is None:
        return _import(name, import_)  # in a thread that is not counted, or within another import
    clock, paid = importer
    try:
        with contextlib.nullcontext() if clock.phase is None else paid.counting(clock):
            return _import(name, import_)
    finally:
        _importers[thread] = importer


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
