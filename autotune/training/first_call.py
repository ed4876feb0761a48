"""The first call of a training function of the user's own: what it costs beside training is kept out of the time that counts.

When such a function is first called in a process it imports libraries, sets devices up and fills caches: seconds that the process pays
once, and often more than the training takes. Where a process trains several times, only its first trial would show them, which in a
study is the baseline. So the function is called once before it counts (unless ``training._warm_up_`` is false), and imports are of the
build phase in every call. Later trainings of the process are charged for both as well, in their build phase.
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
"""Beside ``_target_`` in ``training``: whether the function may be called once before it counts. It may where this is not there."""
MOST_STEP_SECONDS = 10.0
"""From its first optimizer step on, what a call that does not count may take to its first report."""

WARMED_UP = "warmed up by a call that did not count"
TIMED = "first call in its process, timed; imports counted as build"
LATER = "later call in its process"


class TrainingEnded(BaseException):
    """Raised in the training function once no more of it is wanted; not for user code to catch."""


@dataclass
class PaidOnce:
    """What calls of one training function have cost this process beside training."""

    how: str
    """The last call was made, for a reader."""
    seconds: float = 0.0
    joules: float | None = 0.0
    """None where energy is not measured."""

    @contextlib.contextmanager
    def counting(self, clock: PhaseClock) -> Iterator[None]:
        """Count what the context takes into a clock's build phase, and here."""
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
"""By the function's ``_target_``."""


def prepare_call(config: TrialConfig, clock: PhaseClock, throw_away: Callable[[], None]) -> PaidOnce:
    """Make the configuration's training function ready for a call that counts.

    Args:
        config: names the function.
        clock: of the call that counts, in its build phase.
        throw_away: calls the function once in a way that does not count, up to its first report.

    Raises:
        ConfigError: ``training._warm_up_`` is neither true nor false.
        Exception: whatever the function raises.
    """
    assert config.training is not None
    name, is_warmed_up = config.training["_target_"], warm_up_of(config)
    if (paid := _paid.get(name)) is not None:
        clock.add(Phase.BUILD, paid.seconds, paid.joules)
        paid.how = WARMED_UP if paid.how == WARMED_UP else LATER
        return paid
    paid = PaidOnce(WARMED_UP if is_warmed_up else TIMED)
    if is_warmed_up:
        with paid.counting(clock), _same_folder(), _ended_by_a_step():
            throw_away()
            gc.collect()
    _paid[name] = paid
    return paid


def how_called(config: TrialConfig) -> str | None:
    """How this process last called the configuration's training function; None for autotune's own loop, and before any call."""
    paid = None if config.training is None else _paid.get(config.training["_target_"])
    return None if paid is None else paid.how


def warm_up_of(config: TrialConfig) -> bool:
    """Whether the configuration's training function may be called once before it counts.

    Raises:
        ConfigError: it says neither true nor false.
    """
    assert config.training is not None
    wanted = config.training.get(WARM_UP_KEY, True)
    if not isinstance(wanted, bool):
        raise ConfigError(f"training.{WARM_UP_KEY}: found {wanted!r}, accepted are true, false")
    return wanted


def function_node(training: Mapping[str, Any]) -> dict[str, Any]:
    """The ``training`` node less what its function is not given."""
    return {key: value for key, value in training.items() if key != WARM_UP_KEY}


@contextlib.contextmanager
def imports_are_build(clock: PhaseClock, paid: PaidOnce) -> Iterator[None]:
    """Count the imports of this thread into the clock's build phase, while that is not stopped."""
    thread = threading.get_ident()
    _importers[thread] = own = (clock, paid)
    setattr(importlib._bootstrap, _HOOK, _timed_import)  # noqa: SLF001  # no public hook sees the end of an import
    try:
        yield
    finally:
        if _importers.get(thread) is own:
            del _importers[thread]
        if not _importers:
            setattr(importlib._bootstrap, _HOOK, _import)  # noqa: SLF001


_HOOK = "_find_and_load"
"""What importlib calls for a module that is not there yet, and for no other: one that is there costs nothing more."""
_import: Callable[[str, Any], ModuleType] = getattr(importlib._bootstrap, _HOOK)  # noqa: SLF001
_importers: dict[int, tuple[PhaseClock, PaidOnce]] = {}
"""Whose imports are counted, by thread."""


def _timed_import(name: str, import_: Any) -> ModuleType:
    importer = _importers.pop(thread := threading.get_ident(), None)
    if importer is None:
        return _import(name, import_)  # of another thread, or within another import
    clock, paid = importer
    try:
        with contextlib.nullcontext() if clock.phase is None else paid.counting(clock):
            return _import(name, import_)
    finally:
        _importers[thread] = importer


@contextlib.contextmanager
def _same_folder() -> Iterator[None]:
    """The working folder as it was; threads, default types and random numbers are set anew for every training."""
    folder = os.getcwd()  # noqa: PTH109
    try:
        yield
    finally:
        os.chdir(folder)


@contextlib.contextmanager
def _ended_by_a_step() -> Iterator[None]:
    """End the training at an optimizer's step once ``MOST_STEP_SECONDS`` have passed since its first one."""
    began: float | None = None

    def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal began
        now = time.monotonic()
        began = now if began is None else began
        if now - began > MOST_STEP_SECONDS:
            raise TrainingEnded

    handle = register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        handle.remove()
