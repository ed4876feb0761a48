"""Confirming: the best trials and the baseline run again on fresh seeds, in fresh processes, in turns.

A search trial's own time is never the claim: the best of many equal configurations looks faster than it is. Runs are taken one
at a time and the arms in turns, so that a machine that slows down slows all of them; two arms are compared by pairs of runs, those of
one round: see ``autotune.comparison``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.comparison import Ratio, RunTime, in_turns, ratio_of_times
from autotune.measurement import Outcome, TrialResult
from autotune.objective import BoundedObjective, Objective
from autotune.report.arms import ArmTimes
from autotune.report.scale import scale_of
from autotune.search.seeds import derived_seed
from autotune.space import Suggestion

BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A configuration to confirm."""

    trial: int
    """Number of the search trial it is from."""
    label: str
    suggestion: Suggestion


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """What confirmation measured."""

    arms: tuple[Arm, ...]
    """The baseline first."""
    runs: Mapping[tuple[int, int], TrialResult]
    """By trial number of the arm and index of the seed."""
    best: Arm | None
    """The arm to export; None where no run reached the target."""
    speed_up: Ratio | None
    """The baseline's mean score over the best arm's, at least that where runs of the baseline did not reach the target; None where
    runs of the best arm did not, or no run of the baseline has a time."""
    times: Mapping[int, ArmTimes]
    """By trial number of the arm."""


def choose_arms(
    baseline_trial: int, baseline: Suggestion, results: Mapping[int, TrialResult], scores: Mapping[int, float], num_candidates: int
) -> tuple[Arm, ...]:
    """The baseline and the trials with the best scores, each configuration once."""
    arms = [Arm(trial=baseline_trial, label=BASELINE, suggestion=baseline)]
    for number in sorted(scores, key=lambda number: scores[number]):
        suggestion = Suggestion(results[number].values)
        if (
            len(arms) <= num_candidates
            and number != baseline_trial
            and all(dict(suggestion.values) != dict(arm.suggestion.values) for arm in arms)
        ):
            arms.append(Arm(trial=number, label=f"trial {number}", suggestion=suggestion))
    return tuple(arms)


def confirmation_order(arms: Sequence[Arm], num_seeds: int) -> list[tuple[Arm, int]]:
    """Arm and index of seed of every run, in turns; each round begins with another arm."""
    return [(arms[number], index) for number, index in in_turns(len(arms), num_seeds)]


def confirmation_seed(study_seed: int, index: int) -> int:
    """The fresh seed of a round: the same for all arms, and no search trial's."""
    return derived_seed(study_seed, f"confirm {index}")


def conclude(arms: tuple[Arm, ...], runs: Mapping[tuple[int, int], TrialResult], objective: Objective) -> Confirmation:
    """Pick the arm with the best confirmed mean: of those that reached the target most often, the fastest."""
    times = {arm.trial: _times(arm, runs, objective) for arm in arms}
    reaching = [arm for arm in arms if times[arm.trial].num_reached > 0]
    best = min(reaching, key=lambda arm: (-times[arm.trial].num_reached, times[arm.trial].mean_seconds or math.inf), default=None)
    speed_up = None
    if best is not None and times[best.trial].all_reached:
        baseline = arms[0].trial
        rounds = sorted(index for trial, index in runs if trial == best.trial and (baseline, index) in runs)
        speed_up = ratio_of_times(
            [run_time(runs[baseline, index], objective) for index in rounds],
            [run_time(runs[best.trial, index], objective) for index in rounds],
        )
    return Confirmation(arms=arms, runs=runs, best=best, speed_up=speed_up, times=times)


def missing_runs(arms: Sequence[Arm], num_seeds: int, known: Mapping[tuple[int, int], TrialResult]) -> list[tuple[Arm, int]]:
    """The runs that are still to be made."""
    return [(arm, index) for arm, index in confirmation_order(arms, num_seeds) if (arm.trial, index) not in known]


def run_time(run: TrialResult, objective: Objective) -> RunTime:
    """The score of a run that reached the target; for any other what it had spent, None where that is not known."""
    seconds = None
    if run.outcome is Outcome.REACHED:
        seconds = objective.score(run)
    elif run.last is not None and isinstance(objective, BoundedObjective):
        seconds = objective.lower_bound(run.last)
    return RunTime(seconds if seconds is not None and math.isfinite(seconds) else None, run.outcome is Outcome.REACHED)


def _times(arm: Arm, runs: Mapping[tuple[int, int], TrialResult], objective: Objective) -> ArmTimes:
    own = [run for (trial, _), run in sorted(runs.items()) if trial == arm.trial]
    return ArmTimes(label=arm.label, runs=[run_time(run, objective) for run in own], scale=scale_of(objective))
