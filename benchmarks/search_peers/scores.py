"""What is said of a search over a recording, and of many searches by one policy.

The **ratio** after a budget is the best time to target found so far over the best recorded one
(regret is what it is above 1); the time limit counts until a trial has reached the target. The
**cost multiple** is the device seconds until a trial within 10% of the recording's best time to
target has reached it, over that best time: how many of the best possible trainings the search
costs. A search that ended without one, because its policy threw the last one away, is charged for a
plain random search without cap on top of all it spent: someone who still wants the configuration
would have to begin again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.outcome import Outcome
from autotune.recording import Recording
from benchmarks.replay.simulation import Trace, best_seconds

WITHIN = 0.1
"""How far above the best recorded time to target a trial may be to end the search."""
TOP_FRACTION = 0.05
"""Share of a recording's trials, the fastest to the target, whose loss is counted."""
BUDGETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Budgets of the regret curve, in multiples of the best recorded time to target."""
TOLD_BUDGETS = (5, 10, 20, 50, 100)
"""Those of ``BUDGETS`` that the tables tell."""
FULL_BUDGETS = (5, 10, 20, 50)
"""Budgets in full trainings: median seconds of the recorded trials up to the time limit."""
SURROGATES = ("lcbench_", "taskset_")
"""How the names of recordings of small nets begin, most of them a surrogate's; all others are real
trainings."""
RESUME_SECONDS = 0.1
"""Device seconds that taking up a paused trial takes: the median of 31 live ones
(experiment=cnn_smoke, two shared cores), 98 ms."""
DECISION_SECONDS = 0.05
"""Device seconds that a decision takes: freeze-thaw's median with 100 to 2,000 trials behind it
is 38 to 56 ms."""
_NUM_RESAMPLES = 4000
_THROWN_AWAY = (Outcome.CAPPED, Outcome.STOPPED)


@dataclass(frozen=True, kw_only=True)
class SearchScore:
    """One search over one recording."""

    recording: str
    policy: str
    seed: int
    num_workers: int
    cost_multiple: float
    charged_cost_multiple: float
    """With what resuming a paused trial and deciding take besides."""
    num_resumed: int
    """How often a paused trial was taken up again."""
    threw_last_winner_away: bool
    num_top_started: int
    """Trials of the recording's top 5% that were begun."""
    num_top_lost: int
    """Of those, the ones that were stopped although they would have been the best so far."""
    num_trials: int
    best_ratios: tuple[float, ...]
    """Ratio at each of ``BUDGETS``."""
    full_ratios: tuple[float, ...]
    """Ratio at each of ``FULL_BUDGETS``."""
    group: str
    """Kind of the recording, as ``group_of`` tells it."""
    wall_seconds: float
    """Of the computer that replayed it."""


def score_trace(
    recording: Recording,
    trace: Trace,
    random_seconds: float,
    *,
    max_seconds: float = math.inf,
    resume_seconds: float = RESUME_SECONDS,
    decision_seconds: float = DECISION_SECONDS,
) -> dict[str, Any]:
    """The fields of a ``SearchScore`` that follow from a trace, whose search ended when it had
    found a winner.

    Args:
        random_seconds: device seconds of a plain random search without cap; taken only where no
            winner was found.
        max_seconds: seconds on the clock after which the search was ended; what it had spent then
            counts as its cost where it had found no winner.
        resume_seconds, decision_seconds: what resuming a trial and a decision take, for the cost
            multiple with charges.
    """
    best = best_seconds(recording)
    assert best is not None, "a recording in which no trial reaches the target says nothing"
    found = trace.seconds_until(recording, WITHIN)
    spent = max((each.stopped_seconds for each in trace.stretches), default=0.0) * trace.num_workers
    started, lost = top_trials(recording, trace)
    full = full_seconds(recording)
    cost = spent + random_seconds if found is None else found
    return {
        "cost_multiple": cost / best,
        "charged_cost_multiple": (
            (cost + trace.charges(resume_seconds=resume_seconds, decision_seconds=decision_seconds))
            / best
        ),
        "num_resumed": sum(each.from_train_seconds > 0 for each in trace.stretches),
        "threw_last_winner_away": found is None and not trace.lasted(max_seconds),
        "num_top_started": started,
        "num_top_lost": lost,
        "num_trials": len({each.trial for each in trace.stretches}),
        "best_ratios": _ratios(recording, trace, best, [each * best for each in BUDGETS]),
        "full_ratios": _ratios(recording, trace, best, [each * full for each in FULL_BUDGETS]),
    }


def full_seconds(recording: Recording) -> float:
    """Median over trials of the seconds that training one to its end takes, at most the limit."""
    limit = recording.target.max_train_seconds
    return float(
        np.median([min(each.train_seconds[-1], limit) for each in recording.trials if each.steps])
    )


def group_of(name: str, recording: Recording) -> str:
    """Group that a recording is told in: a surrogate, or a real training, whose schedule's length
    is searched or not.
    """
    if name.startswith(SURROGATES):
        return "surrogate"
    return f"real {'with' if 'epochs' in recording.space.parameters else 'without'} schedule"


def top_trials(recording: Recording, trace: Trace) -> tuple[int, int]:
    """How many of the recording's fastest trials were begun, and how many of those a stop threw
    away.

    Thrown away is a trial that ended CAPPED or STOPPED although its recorded time to target was
    below the best one at that moment. A paused trial is not, nor one that was at work when the
    search ended because another had won.
    """
    times = {
        each.number: seconds
        for each in recording.trials
        if (seconds := each.time_to_target(recording.target)) is not None
    }
    num_top = math.ceil(TOP_FRACTION * len(recording.trials))
    top = set(sorted(times, key=lambda number: times[number])[:num_top])
    enough = (1 + WITHIN) * min(times.values())
    best, started, lost = math.inf, set(), 0
    for each in trace.stretches:
        if each.trial in top:
            started.add(each.trial)
            lost += each.outcome in _THROWN_AWAY and times[each.trial] < best
        if each.outcome == Outcome.REACHED:
            best = min(best, each.train_seconds)
            if best <= enough:
                break  # what was at work then is STOPPED, by nobody's decision
    return len(started), lost


def _ratios(
    recording: Recording, trace: Trace, best: float, budgets: Sequence[float]
) -> tuple[float, ...]:
    """Ratio after each of the budgets, in device seconds."""
    reached = [
        (each.stopped_seconds * trace.num_workers, each.train_seconds)
        for each in trace.stretches
        if each.outcome == Outcome.REACHED
    ]
    none_yet = recording.target.max_train_seconds
    return tuple(
        min((seconds for spent, seconds in reached if spent <= budget), default=none_yet) / best
        for budget in budgets
    )


@dataclass(frozen=True, kw_only=True)
class PolicySummary:
    """All searches by one policy with one number of workers."""

    policy: str
    num_workers: int
    num_recordings: int
    num_searches: int
    geometric_mean: float
    """Of the cost multiples, over recordings and seeds, with its 95% interval."""
    charged_geometric_mean: float
    """Of the cost multiples with resuming and deciding charged."""
    low: float
    high: float
    ninetieth_percentile: float
    """Of the cost multiples of all searches."""
    relative: float
    """Geometric mean over that of random with cap on the same recordings and seeds, with its 95%
    interval."""
    relative_low: float
    relative_high: float
    worst_recording: str
    """Where the geometric mean is highest relative to random with cap."""
    worst_relative: float
    threw_last_winner_away_fraction: float
    lost_winners_fraction: float | None
    """Of the top 5% of trials that were begun; None where none was."""
    regrets: tuple[float, ...]
    """At each of ``BUDGETS``: geometric mean of the best time so far over the best recorded one,
    less 1."""
    wall_seconds: float
    """Median of a search."""


def summarise(scores: Sequence[SearchScore], reference: Sequence[SearchScore]) -> PolicySummary:
    """What is said of a policy.

    Args:
        scores: of one policy with one number of workers, every recording with the same seeds.
        reference: of random with cap, for the same recordings and seeds.
    """
    logs, names = _logs(scores)
    differences = logs - _logs(reference)[0]
    by_recording = differences.mean(axis=1)
    worst = int(by_recording.argmax())
    low, high = interval(logs)
    relative_low, relative_high = interval(differences)
    started = sum(each.num_top_started for each in scores)
    return PolicySummary(
        policy=scores[0].policy,
        num_workers=scores[0].num_workers,
        num_recordings=len(names),
        num_searches=len(scores),
        geometric_mean=float(np.exp(logs.mean())),
        charged_geometric_mean=float(
            np.exp(np.mean([math.log(each.charged_cost_multiple) for each in scores]))
        ),
        low=low,
        high=high,
        ninetieth_percentile=float(np.exp(np.quantile(logs, 0.9))),
        relative=float(np.exp(differences.mean())),
        relative_low=relative_low,
        relative_high=relative_high,
        worst_recording=names[worst],
        worst_relative=float(np.exp(by_recording[worst])),
        threw_last_winner_away_fraction=float(
            np.mean([each.threw_last_winner_away for each in scores])
        ),
        lost_winners_fraction=(
            sum(each.num_top_lost for each in scores) / started if started else None
        ),
        regrets=tuple(
            float(each)
            for each in np.exp(np.log([each.best_ratios for each in scores]).mean(axis=0)) - 1
        ),
        wall_seconds=float(np.median([each.wall_seconds for each in scores])),
    )


def mean_ratios(scores: Sequence[SearchScore]) -> tuple[list[float], list[float]]:
    """Geometric means over recordings and seeds of the ratios at ``TOLD_BUDGETS``, and at
    ``FULL_BUDGETS``.
    """
    told = [BUDGETS.index(each) for each in TOLD_BUDGETS]
    ratios = np.log([each.best_ratios for each in scores])[:, told]
    full = np.log([each.full_ratios for each in scores])
    return np.exp(ratios.mean(axis=0)).tolist(), np.exp(full.mean(axis=0)).tolist()


def geometric_means(scores: Sequence[SearchScore]) -> Mapping[str, float]:
    """Geometric mean of the cost multiples over seeds, by recording."""
    logs, names = _logs(scores)
    return {
        name: float(value) for name, value in zip(names, np.exp(logs.mean(axis=1)), strict=True)
    }


def interval(logs: np.ndarray) -> tuple[float, float]:
    """95% interval of the exponential of a mean of ``[recordings, seeds]``, by the bootstrap.

    Recordings are resampled, and seeds within each: both would be others another time. One search
    alone has no upper end.

    Source: Davison and Hinkley, "Bootstrap Methods and their Application" (1997), section 3.8, on
    two stages.
    """
    if logs.size == 1:
        return 0.0, math.inf
    rng = np.random.default_rng(0)
    num_recordings, num_seeds = logs.shape
    recordings = rng.integers(num_recordings, size=(_NUM_RESAMPLES, num_recordings, 1))
    seeds = rng.integers(num_seeds, size=(_NUM_RESAMPLES, num_recordings, num_seeds))
    low, high = np.exp(np.quantile(logs[recordings, seeds].mean(axis=(1, 2)), [0.025, 0.975]))
    return float(low), float(high)


def _logs(scores: Sequence[SearchScore]) -> tuple[np.ndarray, list[str]]:
    """Logarithms of the cost multiples ``[recordings, seeds]``, and the recordings' names."""
    names = sorted({each.recording for each in scores})
    by_place = {(each.recording, each.seed): math.log(each.cost_multiple) for each in scores}
    seeds = sorted({each.seed for each in scores})
    return np.array([[by_place[name, seed] for seed in seeds] for name in names]), names
