"""Confirming: the best configurations and the baseline run again on fresh seeds, in fresh processes, in turns.

A search trial's own time is never the claim: the best of many equal configurations looks faster than it is. Which configuration runs
next, which one is chosen, and which runs its claim is made of is the race's to say (``autotune.race``).
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autotune.comparison import Ratio, RunScore, ratio_of_expected_scores
from autotune.measurement import TrialResult
from autotune.objective import BoundedObjective, Objective
from autotune.outcome import Outcome
from autotune.race import Entrant, RaceLimits, Run, Standing, standing
from autotune.report.arms import ArmScores
from autotune.report.score_format import score_format_of
from autotune.search.seeds import derived_seed
from autotune.space import Suggestion

BASELINE = "baseline"
_LEAST_RUN_SECONDS = 1e-3

Runs = Mapping[tuple[int, int], TrialResult]
"""Confirmation runs, by trial number of the arm and number of the round."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A configuration to confirm."""

    trial: int
    """Number of the search trial it is from."""
    label: str
    suggestion: Suggestion
    entrant: Entrant


@dataclass(frozen=True, kw_only=True)
class PlannedRace:
    """A race as it is kept in a study's storage: what its course depends on, besides its runs."""

    num_trials: int
    """Trials that had ended when it was planned: a search that has gone on since wants another race."""
    first_round: int
    """Number of its first round in the study: no other race had runs on its seeds."""
    arms: tuple[Arm, ...]
    """The baseline first."""
    train_seconds: float
    """Seconds of training that the search took."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        entrants = [{**asdict(arm.entrant), "expected_score": _finite(arm.entrant.expected_score)} for arm in self.arms]
        return {
            "num_trials": self.num_trials,
            "first_round": self.first_round,
            "entrants": entrants,
            "train_seconds": self.train_seconds,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], baseline: Suggestion, results: Mapping[int, TrialResult]) -> "PlannedRace":
        """The race that ``as_dict`` gave."""
        arms = tuple(
            _arm(
                each["arm"],
                Suggestion(results[each["arm"]].values) if place else baseline,
                Entrant(**{**each, "expected_score": math.inf if each["expected_score"] is None else each["expected_score"]}),
                is_baseline=place == 0,
            )
            for place, each in enumerate(fields["entrants"])
        )
        return cls(num_trials=fields["num_trials"], first_round=fields["first_round"], arms=arms, train_seconds=fields["train_seconds"])

    def standing(self, runs: Runs, limits: RaceLimits, objective: Objective) -> Standing:
        """Where it stands, rounds numbered from its own first one."""
        known = {
            (trial, number - self.first_round): Run(run_score(run, objective), _train_seconds(run))
            for (trial, number), run in self.runs(runs).items()
        }
        baseline, *candidates = (arm.entrant for arm in self.arms)
        return standing(baseline, candidates, limits, known)

    def runs(self, runs: Runs) -> Runs:
        """Those of the study's confirmation runs that are its own."""
        return {key: run for key, run in runs.items() if key[1] >= self.first_round}


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """What confirmation measured."""

    arms: tuple[Arm, ...]
    """The baseline first."""
    runs: Runs
    chosen: Arm | None
    """The candidate that won the race; None where there was none."""
    best: Arm | None
    """The arm to export: the chosen one, or the baseline where that is better; None where no run of either reached the target."""
    speed_up: Ratio | None
    """The baseline's expected score over the chosen arm's, by runs that had no part in choosing it; None where neither reached."""
    scores: Mapping[int, ArmScores]
    """By trial number of the arm: of the baseline and the chosen arm only the runs that the claim is made of."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why the other candidates left the race, by trial number."""

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
    """The baseline and the configurations that the search expects most of, each once."""
    spent = {number: _train_seconds(result) for number, result in results.items()}
    order = sorted(expected_scores, key=lambda number: expected_scores[number])
    first = min((number for number in (baseline_trial, *order) if number in results), default=baseline_trial)
    seconds = spent.get(baseline_trial, spent.get(first, 0.0))
    least = run_score(results[baseline_trial], objective).score if baseline_trial in results else None
    expected = expected_scores.get(baseline_trial, math.inf)
    entrant = replace(_entrant(baseline_trial, expected, seconds), least_score=least or 0.0)
    arms = [_arm(baseline_trial, baseline, entrant, is_baseline=True)]
    keys = {number: Suggestion(result.values).key for number, result in results.items()}
    num_reached = Counter(keys[number] for number, result in results.items() if result.outcome is Outcome.REACHED)
    raced = {baseline.key, keys.get(baseline_trial, baseline.key)}  # lr=1, and lr=1.0 as its trial has it
    for number in order:
        if len(arms) <= num_candidates and number != baseline_trial and keys[number] not in raced:
            raced.add(keys[number])
            entrant = replace(_entrant(number, expected_scores[number], spent[number]), num_runs=num_reached[keys[number]])
            arms.append(_arm(number, Suggestion(results[number].values), entrant, is_baseline=False))
    total = math.fsum(spent.values())
    return PlannedRace(num_trials=len(results), first_round=first_round, arms=tuple(arms), train_seconds=total)


def confirmation_seed(study_seed: int, number: int) -> int:
    """The fresh seed of a round: the same for all arms, and no search trial's."""
    return derived_seed(study_seed, f"confirm {number}")


def conclude(race: PlannedRace, runs: Runs, limits: RaceLimits, objective: Objective) -> Confirmation:
    """What a race says, finished or interrupted."""
    now = race.standing(runs, limits, objective)
    claim = [number + race.first_round for number in now.claim_rounds]
    baseline = race.arms[0]
    chosen = next((arm for arm in race.arms[1:] if arm.trial == now.winner), None)
    own = {
        arm.trial: [
            run
            for (trial, number), run in sorted(race.runs(runs).items())
            if trial == arm.trial and (number in claim or arm not in (baseline, chosen))
        ]
        for arm in race.arms
    }
    scale = score_format_of(objective)
    scores = {
        arm.trial: ArmScores(label=arm.label, runs=[run_score(run, objective) for run in own[arm.trial]], scale=scale) for arm in race.arms
    }
    speed_up = None
    if chosen is not None:
        rounds = [number for number in claim if (baseline.trial, number) in runs and (chosen.trial, number) in runs]
        speed_up = ratio_of_expected_scores(
            [run_score(runs[baseline.trial, number], objective) for number in rounds],
            [run_score(runs[chosen.trial, number], objective) for number in rounds],
        )
    reaching = [arm for arm in (chosen, baseline) if arm is not None and scores[arm.trial].num_reached > 0]
    reasons = dict(now.reasons)
    if chosen is not None and (rate := _reach_rate(scores[chosen.trial])) < limits.min_reach_rate and not now.pending:
        reasons[chosen.trial] = f"reached in {rate:.0%} of the runs of its claim, confirm.min_reach_rate is {limits.min_reach_rate:g}"
    is_baseline_better = baseline in reaching and (now.is_baseline_better or (chosen is not None and chosen.trial in reasons))
    best = baseline if is_baseline_better else next(iter(reaching), None)
    return Confirmation(arms=race.arms, runs=race.runs(runs), chosen=chosen, best=best, speed_up=speed_up, scores=scores, reasons=reasons)


def run_score(run: TrialResult, objective: Objective) -> RunScore:
    """The score of a run that reached the target; for any other what it had spent, None where that is not known."""
    score = None
    if run.outcome is Outcome.REACHED:
        score = objective.score(run)
    elif run.last is not None and isinstance(objective, BoundedObjective):
        score = objective.lower_bound(run.last)
    return RunScore(score if score is not None and math.isfinite(score) else None, run.outcome is Outcome.REACHED)


def _arm(trial: int, suggestion: Suggestion, entrant: Entrant, *, is_baseline: bool) -> Arm:
    return Arm(trial=trial, label=BASELINE if is_baseline else f"trial {trial}", suggestion=suggestion, entrant=entrant)


def _entrant(trial: int, expected_score: float, run_seconds: float) -> Entrant:
    return Entrant(arm=trial, expected_score=expected_score, run_seconds=max(run_seconds, _LEAST_RUN_SECONDS))


def _train_seconds(run: TrialResult) -> float:
    return run.last.train_seconds if run.last is not None else 0.0


def _reach_rate(scores: ArmScores) -> float:
    return scores.num_reached / scores.num_runs if scores.num_runs else 1.0


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None
