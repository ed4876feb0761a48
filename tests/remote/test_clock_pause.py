"""Clocks and deadlines stand still while a process waits for another machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autotune.measurement import Phase, PhaseClock
from autotune.remote.clock_pause import paused_while_waiting, waiting


def test_what_was_said_to_pause_does_so_once_and_goes_on_however_waiting_ends() -> None:
    said = []

    @contextmanager
    def pause() -> Iterator[None]:
        said.append("stop")
        try:
            yield
        finally:
            said.append("go")

    with paused_while_waiting(pause):
        with waiting(), waiting():
            said.append("waits")
        with pytest.raises(OSError, match="gone"), waiting():
            raise OSError("gone")
    with waiting():
        pass
    assert said == ["stop", "waits", "go", "stop", "go"]


def test_a_clock_that_is_stopped_goes_on_in_its_phase() -> None:
    clock = PhaseClock()
    clock.enter(Phase.BUILD)
    with paused_while_waiting(clock.stopped):
        with waiting():
            assert clock.phase is None
            before = clock.seconds(Phase.BUILD)
            assert clock.seconds(Phase.BUILD) == before
        assert clock.phase is Phase.BUILD
