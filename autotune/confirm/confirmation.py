"""Confirmation: the best configurations and the baseline are run again on fresh seeds, in fresh
processes, in turns.

A search trial's own time is never the claimed result: the best of many equal configurations looks
faster than it is. The race (``autotune.confirm.race``) decides which configuration runs next, which
one is chosen, and which runs its claim is based on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.confirm.race import Arm, RaceLimits, Standing, standing
from autotune.confirm.statistics import Ratio, ratio_of_expected_scores
from autotune.measurement import TrialResult
from autotune.objective import Objective
from autotune.reporting.scores import ArmScores, run_score, score_format_of
from autotune.search.randomness import derived_seed
from autotune.space import Suggestion

BASELINE = "baseline"
_MIN_RUN_SECONDS = 1e-3

Runs = Mapping[tuple[int, int], TrialResult]
"""Confirmation runs, by (trial number of the arm, number of the round)."""


@dataclass(frozen=True, kw_only=True)
class PlannedRace:
    """A race as a study's storage keeps it: everything that determines its course but its runs."""

    num_trials: int
    """Number of trials that had ended when the race was planned; a search that has gone on since
    then needs a new race."""
    first_round: int
    """Number of the race's first round within the study; each race of a study has rounds, and so
    seeds, of its own."""
    arms: tuple[Arm, ...]
    """The arms that race, the baseline first."""
    train_seconds: float
    """Training time of all search trials together, in seconds."""

    def as_dict(self) -> dict[str, Any]:
        """The race as plain data for the storage; see ``from_dict``."""
        entrants = [
            {
                "arm": arm.trial,
                "expected_score": arm.expected_score if math.isfinite(arm.expected_score) else None,
                "run_seconds": arm.run_seconds,
                "least_score": arm.least_score,
            }
            for arm in self.arms
        ]
        return {
            "num_trials": self.num_trials,
            "first_round": self.first_round,
            "entrants": entrants,
            "train_seconds": self.train_seconds,
        }

    @classmethod
    def from_dict(
        cls, fields: Mapping[str, Any], baseline: Suggestion, results: Mapping[int, TrialResult]
    ) -> "PlannedRace":
        """Restore a race from what ``as_dict`` returned."""
        arms: list[Arm] = []
        for kept in fields["entrants"]:
            trial, expected_score = kept["arm"], kept["expected_score"]
            arms.append(
                Arm(
                    trial=trial,
                    label=f"trial {trial}" if arms else BASELINE,
                    suggestion=Suggestion(results[trial].values) if arms else baseline,
                    expected_score=math.inf if expected_score is None else expected_score,
                    run_seconds=kept["run_seconds"],
                    least_score=kept["least_score"],
                )
            )
        return cls(
            num_trials=fields["num_trials"],
            first_round=fields["first_round"],
            arms=tuple(arms),
            train_seconds=fields["train_seconds"],
        )

    def standing(self, runs: Runs, limits: RaceLimits, objective: Objective) -> Standing:
        """State of the race after the study's confirmation runs so far; its rounds count from 0."""
        known = {
            (trial, number - self.first_round): (
                run_score(run, objective)._replace(seconds=_budget_seconds(run))
            )
            for (trial, number), run in self.runs(runs).items()
        }
        return standing(self.arms[0], self.arms[1:], limits, known)

    def runs(self, runs: Runs) -> Runs:
        """The runs of this race, out of all confirmation runs of the study."""
        return {key: run for key, run in runs.items() if key[1] >= self.first_round}


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The result of a confirmation race."""

    arms: tuple[Arm, ...]
    """The arms that raced, the baseline first."""
    runs: Runs
    chosen: Arm | None
    """The candidate that won the race; None if no candidate has won."""
    best: Arm | None
    """The arm to export: the chosen arm, or the baseline if that is better; None if no run of
    either reached the target."""
    speed_up: Ratio | None
    """The baseline's expected score over the chosen arm's, from runs that had no part in
    choosing it; None if neither reached."""
    scores: Mapping[int, ArmScores]
    """Scores of each arm, by its trial number; for the baseline and the chosen arm only of the
    runs that the claim is based on."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why candidates left the race or were not exported, by trial number."""

    @property
    def is_baseline_best(self) -> bool:
        """Whether no candidate is better than the baseline."""
        return self.best is self.arms[0]


def plan_race(
    *,
    baseline_trial: int,
    baseline: Suggestion,
    results: Mapping[int, TrialResult],
    expected_scores: Mapping[int, float],
    objective: Objective,
    num_candidates: int,
    first_round: int,
) -> PlannedRace:
    """Plan a race of the baseline and the distinct configurations with the best expected scores."""
    first = results.get(baseline_trial)
    first_build_seconds = first.last.build_seconds if first is not None and first.last else 0.0
    run_seconds = {
        number: max(_fresh_seconds(result, first_build_seconds), _MIN_RUN_SECONDS)
        for number, result in results.items()
    }
    best_first = sorted(expected_scores, key=expected_scores.__getitem__)
    fallback = run_seconds.get(min(expected_scores, default=baseline_trial), _MIN_RUN_SECONDS)
    arms = [
        Arm(
            trial=baseline_trial,
            label=BASELINE,
            suggestion=baseline,
            expected_score=expected_scores.get(baseline_trial, math.inf),
            run_seconds=run_seconds.get(baseline_trial, fallback),
            least_score=(run_score(first, objective).score if first is not None else None) or 0.0,
        )
    ]
    raced_keys = {baseline.key}
    if first is not None:  # lr=1 of the baseline is lr=1.0 in its trial
        raced_keys.add(Suggestion(first.values).key)
    for number in best_first:
        suggestion = Suggestion(results[number].values)
        if (
            len(arms) <= num_candidates
            and number != baseline_trial
            and suggestion.key not in raced_keys
        ):
            raced_keys.add(suggestion.key)
            arms.append(
                Arm(
                    trial=number,
                    label=f"trial {number}",
                    suggestion=suggestion,
                    expected_score=expected_scores[number],
                    run_seconds=run_seconds[number],
                )
            )
    return PlannedRace(
        num_trials=len(results),
        first_round=first_round,
        arms=tuple(arms),
        train_seconds=math.fsum(map(_train_seconds, results.values())),
    )


def confirmation_seed(study_seed: int, number: int) -> int:
    """The seed that all arms share in a round of confirmation; no search trial has that seed."""
    return derived_seed(study_seed, f"confirm {number}")


def conclude(
    race: PlannedRace, runs: Runs, limits: RaceLimits, objective: Objective
) -> Confirmation:
    """The result of a race that is finished or was interrupted."""
    now, runs = race.standing(runs, limits, objective), race.runs(runs)
    claim_rounds = [number + race.first_round for number in now.claim_rounds]
    baseline, *candidates = race.arms
    chosen = next((arm for arm in candidates if arm.trial == now.winner), None)
    run_scores = {key: run_score(run, objective) for key, run in sorted(runs.items())}
    scores = {
        arm.trial: ArmScores(
            label=arm.label,
            runs=[
                score
                for (trial, number), score in run_scores.items()
                if trial == arm.trial and (number in claim_rounds or arm not in (baseline, chosen))
            ],
            scale=score_format_of(objective),
        )
        for arm in race.arms
    }
    speed_up, reasons, is_baseline_better = None, dict(now.reasons), now.is_baseline_better
    if chosen is not None:
        pairs = [
            (run_scores[baseline.trial, number], run_scores[chosen.trial, number])
            for number in claim_rounds
            if {(baseline.trial, number), (chosen.trial, number)} <= runs.keys()
        ]
        speed_up = ratio_of_expected_scores(
            [one for one, _ in pairs], [other for _, other in pairs]
        )
        of_chosen = scores[chosen.trial]
        rate = of_chosen.num_reached / of_chosen.num_runs if of_chosen.runs else 1.0
        if rate < limits.min_reach_rate and not now.pending:
            least = f"confirm.min_reach_rate is {limits.min_reach_rate:g}"
            reasons[chosen.trial] = f"reached in {rate:.0%} of the runs of its claim, {least}"
            is_baseline_better = True
    order = (baseline, chosen) if is_baseline_better else (chosen, baseline)
    best = next((arm for arm in order if arm and scores[arm.trial].num_reached), None)
    return Confirmation(
        arms=race.arms,
        runs=runs,
        chosen=chosen,
        best=best,
        speed_up=speed_up,
        scores=scores,
        reasons=reasons,
    )


def _train_seconds(run: TrialResult) -> float:
    return run.last.train_seconds if run.last is not None else 0.0


def _budget_seconds(run: TrialResult) -> float:
    """Seconds that a run takes from ``confirm.budget_fraction``.

    These are seconds of training, or on a GPU all that it took: a GPU's context and warm-up take
    seconds in each fresh process, and a training on a GPU may be shorter than these.
    """
    seconds = _train_seconds(run)
    return max(seconds, run.stopped_at - run.started_at) if _is_on_gpu(run) else seconds


def _fresh_seconds(trial: TrialResult, first_build_seconds: float) -> float:
    """Seconds that a run of a trial's configuration is expected to take from the budget.

    Args:
        first_build_seconds: what the baseline's trial took to build, as the first one of its
            process: a later one found the GPU warm. A trial's wall seconds would include its
            pauses.
    """
    if trial.last is None or not _is_on_gpu(trial):
        return _train_seconds(trial)
    build_seconds = max(trial.last.build_seconds, first_build_seconds)
    return build_seconds + trial.last.warm_seconds + trial.last.evaluate_seconds


def _is_on_gpu(run: TrialResult) -> bool:
    return bool(run.fingerprint.get("device_type", "cpu") != "cpu")
