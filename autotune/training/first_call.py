"""What a process pays once for a custom training function: its imports, and a warm-up call where a
process calls it many times.

Usually each training is the only one of its process, which calls the function exactly once. With
``_reuse_process_: true`` a process calls it for one trial after another. The first call then pays
what later ones find there (lazy set-up, caches), and would be slower than these, which in a study
is the baseline. So there the function is called once before the first call that counts, up to its
first report. That call is build phase, as are imports of the user's own modules, and later
trainings of the process are charged for both as well.

Imports of installed libraries count as nothing, like torch's own: the first of several forked
processes would pay alone for what the launcher then imports for all others.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from autotune.config.schema import REUSE_KEY, TrialConfig
from autotune.measurement import Phase, PhaseClock

_LIBRARY_FOLDERS = tuple(
    sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")
)


@dataclass
class PaidOnce:
    """One-time costs of a training function that this process has paid: its warm-up call and its
    imports.
    """

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
            self.joules = (
                None
                if now is None or joules is None or self.joules is None
                else self.joules + now - joules
            )


_paid: dict[str, PaidOnce] = {}
"""One-time costs of every function that this process has called, by ``_target_``."""


def prepare_call(
    config: TrialConfig, clock: PhaseClock, warm_up: Callable[[], None], *, is_resumed: bool = False
) -> PaidOnce:
    """Charge the one-time costs of the configuration's training function to the clock, after a
    warm-up call where there is to be one.

    Args:
        config: configuration that names the function.
        clock: clock of the call that counts, in its build phase.
        warm_up: calls the function up to its first report, without counting it, and frees what it
            leaves.
        is_resumed: whether the call resumes a paused training, which is charged for what its first
            process paid.

    Raises:
        Exception: the function raised it.
    """
    assert config.training is not None
    name = config.training["_target_"]
    if (paid := _paid.get(name)) is not None:
        clock.add(Phase.BUILD, paid.seconds, paid.joules)
        return paid
    paid = PaidOnce()
    # what a resumed one sets up does not count before it has loaded its state
    if config.training.get(REUSE_KEY) and not is_resumed:
        with paid.counting(clock):
            warm_up()
    _paid[name] = paid
    return paid


@contextlib.contextmanager
def imports_are_build(clock: PhaseClock, paid: PaidOnce) -> Iterator[None]:
    """Context in which imports of this thread count into the clock's build phase.

    Those of installed libraries stop the clock.
    """
    finder = _TimedImports(clock, paid)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _TimedImports(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and notes when their code is run."""

    def __init__(self, clock: PhaseClock, paid: PaidOnce) -> None:
        self._clock, self._paid = clock, paid
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, whose loader runs it with the clock in its build phase, or stopped."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if (
            spec is not None
            and spec.loader is not None
            and self._clock.phase is not None
            and threading.get_ident() == self._thread
        ):
            is_library = fullname.partition(".")[0] == "autotune" or str(spec.origin).startswith(
                _LIBRARY_FOLDERS
            )
            run = spec.loader.exec_module

            def timed(module: ModuleType) -> None:
                with self._counted(is_library=is_library):
                    run(module)

            # of this one module's loader
            spec.loader.exec_module = timed  # type: ignore[method-assign]
        return spec

    def _counted(self, *, is_library: bool) -> contextlib.AbstractContextManager[None]:
        if self._clock.phase is None:
            return contextlib.nullcontext()
        if is_library:
            return self._clock.stopped()
        return (
            contextlib.nullcontext()
            if self._clock.phase is Phase.BUILD
            else self._paid.counting(self._clock)
        )
