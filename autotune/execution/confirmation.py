"""Confirmation: the best configurations and the baseline are run again on fresh seeds, in fresh processes, in turns.

A search trial's own time is never the claimed result: the best of many equal configurations looks faster than it is. The race
(``autotune.race``) decides which configuration runs next, which one is chosen, and which runs its claim is based on.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any

from autotune.comparison import Ratio, RunScore, ratio_of_expected_scores
from autotune.measurement import TrialResult
from autotune.objective import BoundedObjective, Objective
from autotune.outcome import Outcome
from autotune.race import Entrant, RaceLimits, Run, Standing, standing
from autotune.reporting.scores import ArmScores, score_format_of
from autotune.search.randomness import derived_seed
from autotune.space import Suggestion

BASELINE = "baseline"
_MIN_RUN_SECONDS = 1e-3

Runs = Mapping[tuple[int, int], TrialResult]
"""Confirmation runs, by (trial number of the arm, number of the round)."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A configuration that is confirmed: the baseline or a candidate."""

    trial: int
    """Number of the search trial that the configuration comes from."""
    label: str
    suggestion: Suggestion
    entrant: Entrant


@dataclass(frozen=True, kw_only=True)
class PlannedRace:
    """A race as it is kept in a study's storage: everything that determines its course, except its runs."""

    num_trials: int
    """Number of trials that had ended when the race was planned; a search that has gone on since then needs a new race."""
    first_round: int
    """Number of the race's first round within the study; each race of a study has rounds, and so seeds, of its own."""
    arms: tuple[Arm, ...]
    """The arms that race, the baseline first."""
    train_seconds: float
    """Training time of all search trials together, in seconds."""

    def as_dict(self) -> dict[str, Any]:
        """The race as plain data for the storage; see ``from_dict``."""
        entrants = [{**asdict(arm.entrant), "expected_score": _finite(arm.entrant.expected_score)} for arm in self.arms]
        return {
            "num_trials": self.num_trials,
            "first_round": self.first_round,
            "entrants": entrants,
            "train_seconds": self.train_seconds,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], baseline: Suggestion, results: Mapping[int, TrialResult]) -> "PlannedRace":
        """Restore a race from what ``as_dict`` returned."""
        known = {each.name for each in fields_of(Entrant)}  # an earlier version kept one more

        def entrant_of(kept: Mapping[str, Any]) -> Entrant:
            values: dict[str, Any] = {key: value for key, value in kept.items() if key in known}
            return Entrant(**values | ({"expected_score": math.inf} if values["expected_score"] is None else {}))

        arms = tuple(
            _arm(
                entrant["arm"],
                Suggestion(results[entrant["arm"]].values) if index else baseline,
                entrant_of(entrant),
                is_baseline=index == 0,
            )
            for index, entrant in enumerate(fields["entrants"])
        )
        return cls(num_trials=fields["num_trials"], first_round=fields["first_round"], arms=arms, train_seconds=fields["train_seconds"])

    def standing(self, runs: Runs, limits: RaceLimits, objective: Objective) -> Standing:
        """State of the race after the study's confirmation runs so far; its rounds are numbered from the race's own first round."""
        known = {
            (trial, number - self.first_round): Run(run_score(run, objective), _budget_seconds(run))
            for (trial, number), run in self.runs(runs).items()
        }
        baseline, *candidates = (arm.entrant for arm in self.arms)
        return standing(baseline, candidates, limits, known)

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
    """The arm to export: the chosen arm, or the baseline if that is better; None if no run of either reached the target."""
    speed_up: Ratio | None
    """The baseline's expected score over the chosen arm's, from runs that had no part in choosing it; None if neither reached."""
    scores: Mapping[int, ArmScores]
    """Scores of each arm, by its trial number; for the baseline and the chosen arm only of the runs that the claim is based on."""
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
    first_build_seconds = _build_seconds(results.get(baseline_trial))
    run_seconds = {number: _fresh_seconds(result, first_build_seconds) for number, result in results.items()}
    best_first = sorted(expected_scores, key=lambda number: expected_scores[number])
    first = min((number for number in (baseline_trial, *best_first) if number in results), default=baseline_trial)
    seconds = run_seconds.get(baseline_trial, run_seconds.get(first, 0.0))
    least = run_score(results[baseline_trial], objective).score if baseline_trial in results else None
    expected = expected_scores.get(baseline_trial, math.inf)
    entrant = replace(_entrant(baseline_trial, expected, seconds), least_score=least or 0.0)
    arms = [_arm(baseline_trial, baseline, entrant, is_baseline=True)]
    keys = {number: Suggestion(result.values).key for number, result in results.items()}
    raced_keys = {baseline.key, keys.get(baseline_trial, baseline.key)}  # both forms, such as lr=1, and lr=1.0 in the baseline's trial
    for number in best_first:
        if len(arms) <= num_candidates and number != baseline_trial and keys[number] not in raced_keys:
            raced_keys.add(keys[number])
            entrant = _entrant(number, expected_scores[number], run_seconds[number])
            arms.append(_arm(number, Suggestion(results[number].values), entrant, is_baseline=False))
    total = math.fsum(map(_train_seconds, results.values()))
    return PlannedRace(num_trials=len(results), first_round=first_round, arms=tuple(arms), train_seconds=total)


def confirmation_seed(study_seed: int, number: int) -> int:
    """The seed that all arms share in a round of confirmation; no search trial has that seed."""
    return derived_seed(study_seed, f"confirm {number}")


def conclude(race: PlannedRace, runs: Runs, limits: RaceLimits, objective: Objective) -> Confirmation:
    """The result of a race that is finished or was interrupted."""
    standing_now = race.standing(runs, limits, objective)
    claim_rounds = [number + race.first_round for number in standing_now.claim_rounds]
    baseline = race.arms[0]
    chosen = next((arm for arm in race.arms[1:] if arm.trial == standing_now.winner), None)
    run_scores = {
        arm.trial: [
            run_score(run, objective)
            for (trial, number), run in sorted(race.runs(runs).items())
            if trial == arm.trial and (number in claim_rounds or arm not in (baseline, chosen))
        ]
        for arm in race.arms
    }
    scale = score_format_of(objective)
    scores = {arm.trial: ArmScores(label=arm.label, runs=run_scores[arm.trial], scale=scale) for arm in race.arms}
    speed_up = None
    if chosen is not None:
        rounds = [number for number in claim_rounds if (baseline.trial, number) in runs and (chosen.trial, number) in runs]
        speed_up = ratio_of_expected_scores(
            [run_score(runs[baseline.trial, number], objective) for number in rounds],
            [run_score(runs[chosen.trial, number], objective) for number in rounds],
        )
    reaching = [arm for arm in (chosen, baseline) if arm is not None and scores[arm.trial].num_reached > 0]
    reasons = dict(standing_now.reasons)
    if chosen is not None and (rate := _reach_rate(scores[chosen.trial])) < limits.min_reach_rate and not standing_now.pending:
        reasons[chosen.trial] = f"reached in {rate:.0%} of the runs of its claim, confirm.min_reach_rate is {limits.min_reach_rate:g}"
    is_baseline_better = baseline in reaching and (standing_now.is_baseline_better or (chosen is not None and chosen.trial in reasons))
    best = baseline if is_baseline_better else next(iter(reaching), None)
    return Confirmation(arms=race.arms, runs=race.runs(runs), chosen=chosen, best=best, speed_up=speed_up, scores=scores, reasons=reasons)


def run_score(run: TrialResult, objective: Objective) -> RunScore:
    """The score of a run if it reached the target, else the lower bound of its score: what it had spent, None if that is unknown."""
    score = None
    if run.outcome is Outcome.REACHED:
        score = objective.score(run)
    elif run.last is not None and isinstance(objective, BoundedObjective):
        score = objective.lower_bound(run.last)
    return RunScore(score if score is not None and math.isfinite(score) else None, run.outcome is Outcome.REACHED)


def _arm(trial: int, suggestion: Suggestion, entrant: Entrant, *, is_baseline: bool) -> Arm:
    return Arm(trial=trial, label=BASELINE if is_baseline else f"trial {trial}", suggestion=suggestion, entrant=entrant)


def _entrant(trial: int, expected_score: float, run_seconds: float) -> Entrant:
    return Entrant(arm=trial, expected_score=expected_score, run_seconds=max(run_seconds, _MIN_RUN_SECONDS))


def _train_seconds(run: TrialResult) -> float:
    return run.last.train_seconds if run.last is not None else 0.0


def _build_seconds(run: TrialResult | None) -> float:
    return run.last.build_seconds if run is not None and run.last is not None else 0.0


def _budget_seconds(run: TrialResult) -> float:
    """Seconds that a run takes from ``confirm.budget_fraction``: of training, or on a GPU all that it took.

    A GPU's context and warm-up take seconds in each fresh process, and a training on a GPU may be shorter than these.
    """
    return max(_train_seconds(run), run.stopped_at - run.started_at) if _is_on_gpu(run) else _train_seconds(run)


def _fresh_seconds(trial: TrialResult, first_build_seconds: float) -> float:
    """Seconds that a run of a trial's configuration is expected to take from the budget.

    Args:
        first_build_seconds: what the baseline's trial took to build, as the first one of its process: a later one found the GPU warm. A
            trial's wall seconds would include those for which it was paused.
    """
    if trial.last is None or not _is_on_gpu(trial):
        return _train_seconds(trial)
    return max(trial.last.build_seconds, first_build_seconds) + trial.last.warm_seconds + trial.last.evaluate_seconds


def _is_on_gpu(run: TrialResult) -> bool:
    return bool(run.fingerprint.get("device_type", "cpu") != "cpu")


def _reach_rate(scores: ArmScores) -> float:
    return scores.num_reached / scores.num_runs if scores.num_runs else 1.0


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None
