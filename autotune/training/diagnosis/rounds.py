"""Timing of a short piece of work: it is repeated in rounds, and the median round counts."""

import statistics
import time
from collections.abc import Callable

from autotune.training.parallel.ranks import ALONE, Ranks

_ROUND_SECONDS = 0.02
"""Length of a round aimed for: long against waiting for a device and reading the clock, short against a machine's occasional other work."""
_MAX_RUNS = 1000
"""Upper limit on the runs of one round."""


def median_run_seconds(
    run: Callable[[], object], wait: Callable[[], None], *, limit_seconds: float, at_once: int | None = None, ranks: Ranks = ALONE
) -> float:
    """Seconds of one run: the median over rounds, where a round has many runs if they are short.

    Args:
        run: the work; called once beforehand, so that its lazy set-up is not timed.
        wait: returns when the device has done all its work.
        limit_seconds: seconds after which no further round begins; one round is always made.
        at_once: number of runs in a round; None for as many as make it long enough.
        ranks: the ranks that run the work together; all of them make equally many runs, since a run of one rank waits for the others.
    """
    deadline = time.perf_counter() + limit_seconds
    run()
    num_runs = at_once or ranks.broadcast_from_first(max(1, min(_MAX_RUNS, round(_ROUND_SECONDS / max(1e-9, _seconds_of(run, wait, 1))))))
    rounds: list[float] = []
    while ranks.broadcast_from_first(not rounds or time.perf_counter() < deadline):
        rounds.append(_seconds_of(run, wait, num_runs) / num_runs)
    return statistics.median(rounds)


def _seconds_of(run: Callable[[], object], wait: Callable[[], None], num_runs: int) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(num_runs):
        run()
    wait()
    return time.perf_counter() - start
