"""How long a short piece of work takes: repeated in rounds, the median round counts."""

import statistics
import time
from collections.abc import Callable

from autotune.training.parallel.ranks import ALONE, Ranks

_ROUND_SECONDS = 0.02
"""Long against waiting for a device and reading the clock, short against what else a machine does from time to time."""
_MOST_RUNS = 1000
"""In one round."""


def seconds_a_run(
    run: Callable[[], object], wait: Callable[[], None], *, limit_seconds: float, at_once: int | None = None, ranks: Ranks = ALONE
) -> float:
    """The seconds that one run takes: the median over rounds, of many runs each where they are short.

    Args:
        run: the work; called once more beforehand, so that what it sets up lazily is there.
        wait: returns when the device has done all it was given.
        limit_seconds: no round begins later; the first one always does.
        at_once: runs of a round; None for as many as make it long enough.
        ranks: those that run it together; they make equally many runs, as a run of one waits for the others.
    """
    until = time.perf_counter() + limit_seconds
    run()
    num_runs = at_once or ranks.agreed(max(1, min(_MOST_RUNS, round(_ROUND_SECONDS / max(1e-9, _seconds_of(run, wait, 1))))))
    rounds: list[float] = []
    while ranks.agreed(not rounds or time.perf_counter() < until):
        rounds.append(_seconds_of(run, wait, num_runs) / num_runs)
    return statistics.median(rounds)


def _seconds_of(run: Callable[[], object], wait: Callable[[], None], num_runs: int) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(num_runs):
        run()
    wait()
    return time.perf_counter() - start
