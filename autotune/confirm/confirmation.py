"""Confirmation: the best configurations and the baseline are run again on fresh seeds, in fresh
processes, in turns.

A search trial's own time is never the claimed result: the best of many equal configurations looks
faster than it is. The race (``autotune.confirm.race``) decides which configuration runs next, which
one is chosen, and which runs its claim is based on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.confirm.race import Configuration, RaceLimits, RaceState, race_state
from autotune.confirm.statistics import Ratio, RunScore, ratio_of_pairs
from autotune.measurement import TrialResult
from autotune.objective import Objective
from autotune.outcome import Outcome
from autotune.reporting.scores import ConfigurationScores, run_score, score_format_of
from autotune.search.points import derived_seed
from autotune.space import Suggestion

BASELINE = "baseline"
_MIN_RUN_SECONDS = 1e-3

Runs = Mapping[tuple[int, int], TrialResult]
"""Confirmation runs, by trial and number of the round."""


@dataclass(frozen=True, kw_only=True)
class PlannedRace:
    """A race as a study's storage keeps it: everything that determines its course but its runs."""

    num_trials: int
    """Number of trials that had ended when the race was planned; if the search has continued since
    then, its new candidates join."""
    configurations: tuple[Configuration, ...]
    """The configurations that race, the baseline first."""
    train_seconds: float
    """Training time of all search trials together, in seconds."""
    max_train_seconds: float | None = None
    """Limit of the target on the training seconds of each run; None if it is not known."""
    first_round: int = 0
    """Number of the race's first round within the study, above 0 where earlier versions of autotune
    began a new race after each search."""

    def as_dict(self) -> dict[str, Any]:
        """The race as plain data for the storage; see ``from_dict``."""
        entrants = [
            {
                "arm": each.trial,
                "expected_score": each.expected_score,
                "run_seconds": each.run_seconds,
                "least_score": each.least_score,
                "claim_round": each.claim_round,
                "search_runs": [[run.score, run.reached] for run in each.search_runs],
            }
            for each in self.configurations
        ]
        return {
            "num_trials": self.num_trials,
            "first_round": self.first_round,
            "entrants": entrants,
            "train_seconds": self.train_seconds,
            "max_train_seconds": self.max_train_seconds,
        }

    @classmethod
    def from_dict(
        cls, fields: Mapping[str, Any], baseline: Suggestion, results: Mapping[int, TrialResult]
    ) -> "PlannedRace":
        """Restore a race from what ``as_dict`` returned."""
        configurations = tuple(
            Configuration(
                trial=(trial := kept["arm"]),
                label=f"trial {trial}" if index else BASELINE,
                suggestion=Suggestion(results[trial].values) if index else baseline,
                expected_score=kept["expected_score"],
                run_seconds=kept["run_seconds"],
                least_score=kept["least_score"],
                claim_round=kept.get("claim_round", 0),
                search_runs=tuple(RunScore(*run) for run in kept.get("search_runs", ())),
            )
            for index, kept in enumerate(fields["entrants"])
        )
        return cls(
            num_trials=fields["num_trials"],
            first_round=fields["first_round"],
            configurations=configurations,
            train_seconds=fields["train_seconds"],
            max_train_seconds=fields.get("max_train_seconds"),
        )

    def joining(
        self, earlier: "PlannedRace", runs: Runs, limits: RaceLimits, objective: Objective
    ) -> "PlannedRace":
        """The race as it continues an earlier one of the study, all of whose runs are kept.

        Candidates of both keep their trials, and so their runs; those that are only in this race
        join in the first round. Without any, the earlier race stays as it was planned. A claim that
        was begun continues if its winner wins again, unless one of its runs timed out and the limit
        has been raised since, or a claim begun later was of a candidate that is displaced now; any
        other claim takes rounds without a run.

        Args:
            runs: confirmation runs of the study so far.
            limits: those of the earlier race.
        """
        claims = earlier.state(runs, limits, objective).first_claim_rounds
        first_free = max((number + 1 for _, number in runs), default=earlier.first_round)
        first_free -= earlier.first_round
        first_claim = min(claims.values(), default=first_free) + earlier.first_round
        is_raised = (self.max_train_seconds or 0) > (earlier.max_train_seconds or math.inf)
        is_outdated = is_raised and any(
            run.outcome is Outcome.TIMED_OUT and number >= first_claim
            for (_, number), run in earlier.runs(runs).items()
        )
        raced = {each.suggestion: each for each in earlier.configurations}
        race = replace(self, first_round=earlier.first_round)
        if all(each.suggestion in raced for each in self.configurations):
            race = replace(
                earlier, num_trials=self.num_trials, max_train_seconds=self.max_train_seconds
            )
            if not is_outdated:
                return race
        known_ones = [raced.get(each.suggestion, each) for each in race.configurations]
        displaced = claims.keys() - {known.trial for known in known_ones}
        first_kept = max((claims[trial] for trial in displaced), default=0)
        joined = []
        for each, known in zip(race.configurations, known_ones, strict=True):
            first = claims.get(known.trial, first_free)
            if is_outdated or first < first_kept:
                first = first_free
            joined.append(replace(each, trial=known.trial, label=known.label, claim_round=first))
        return replace(race, configurations=tuple(joined))

    def state(self, runs: Runs, limits: RaceLimits, objective: Objective) -> RaceState:
        """State of the race after the study's confirmation runs so far; its rounds count from 0."""
        known = {
            (trial, number - self.first_round): (
                run_score(run, objective)._replace(seconds=_budget_seconds(run))
            )
            for (trial, number), run in self.runs(runs).items()
        }
        return race_state(self.configurations, limits, known)

    def runs(self, runs: Runs) -> Runs:
        """The runs of this race, out of all confirmation runs of the study."""
        trials = {each.trial for each in self.configurations}
        return {
            (trial, number): run
            for (trial, number), run in runs.items()
            if trial in trials and number >= self.first_round
        }


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The result of a confirmation race."""

    configurations: tuple[Configuration, ...]
    """The configurations that raced, the baseline first."""
    runs: Runs
    chosen: Configuration | None
    """The candidate that won the race; None if no candidate has won."""
    best: Configuration | None
    """What to export: the chosen candidate, or the baseline if that is better; None if no run of
    either reached the target."""
    speed_up: Ratio | None
    """The baseline's expected score over the chosen candidate's, from runs that had no part in
    choosing it; None if neither reached."""
    scores: Mapping[int, ConfigurationScores]
    """Scores of each configuration, by its trial; for the baseline and the chosen candidate only of
    the runs that the claim is based on."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why candidates left the race or were not exported, by trial."""

    @property
    def is_baseline_best(self) -> bool:
        """Whether no candidate is better than the baseline."""
        return self.best is self.configurations[0]


def plan_race(
    *,
    baseline_trial: int,
    baseline: Suggestion,
    results: Mapping[int, TrialResult],
    expected_scores: Mapping[int, float],
    objective: Objective,
    num_candidates: int,
    max_train_seconds: float | None = None,
) -> PlannedRace:
    """Plan a race of the baseline and the distinct configurations with the best expected scores."""
    search_runs: dict[Suggestion, list[RunScore]] = {}
    for result in results.values():
        if result.outcome is Outcome.REACHED:
            runs = search_runs.setdefault(Suggestion(result.values), [])
            runs.append(run_score(result, objective))
    first = results.get(baseline_trial)
    first_build_seconds = first.last.build_seconds if first is not None and first.last else 0.0
    run_seconds = {
        number: max(_fresh_seconds(result, first_build_seconds), _MIN_RUN_SECONDS)
        for number, result in results.items()
    }
    fallback = run_seconds.get(min(expected_scores, default=baseline_trial), _MIN_RUN_SECONDS)
    configurations = [
        Configuration(
            trial=baseline_trial,
            label=BASELINE,
            suggestion=baseline,
            expected_score=expected_scores.get(baseline_trial),
            run_seconds=run_seconds.get(baseline_trial, fallback),
            search_runs=tuple(search_runs.get(Suggestion(first.values), ())) if first else (),
            least_score=(run_score(first, objective).score if first is not None else None) or 0.0,
        )
    ]
    raced = {baseline}
    if first is not None:  # lr=1 of the baseline is lr=1.0 in its trial
        raced.add(Suggestion(first.values))
    for number in sorted(expected_scores, key=expected_scores.__getitem__):
        suggestion = Suggestion(results[number].values)
        if number == baseline_trial or suggestion in raced:
            continue
        raced.add(suggestion)
        configurations.append(
            Configuration(
                trial=number,
                label=f"trial {number}",
                suggestion=suggestion,
                expected_score=expected_scores[number],
                run_seconds=run_seconds[number],
                search_runs=tuple(search_runs.get(suggestion, ())),
            )
        )
    return PlannedRace(
        num_trials=len(results),
        configurations=tuple(configurations[: num_candidates + 1]),
        train_seconds=math.fsum(map(_train_seconds, results.values())),
        max_train_seconds=max_train_seconds,
    )


def confirmation_seed(study_seed: int, number: int) -> int:
    """The seed of all runs of a confirmation round; no search trial has it."""
    return derived_seed(study_seed, f"confirm {number}")


def conclude(
    race: PlannedRace, runs: Runs, limits: RaceLimits, objective: Objective
) -> Confirmation:
    """The result of a race that is finished or was interrupted."""
    state, runs = race.state(runs, limits, objective), race.runs(runs)
    claim_rounds = {number + race.first_round for number in state.claim_rounds}
    baseline, *candidates = race.configurations
    chosen = next((each for each in candidates if each.trial == state.winner), None)
    known = {each.trial: dict[int, RunScore]() for each in race.configurations}
    for (trial, number), run in sorted(runs.items()):
        if number in claim_rounds or trial not in (baseline.trial, state.winner):
            known[trial][number] = run_score(run, objective)
    scores = {
        each.trial: ConfigurationScores(
            label=each.label,
            runs=list(known[each.trial].values()),
            scale=score_format_of(objective),
        )
        for each in race.configurations
    }
    speed_up, reasons, is_baseline_better = None, dict(state.reasons), state.is_baseline_better
    if chosen is not None:
        speed_up = state.speed_up or ratio_of_pairs(known[baseline.trial], known[chosen.trial])
        of_chosen = scores[chosen.trial]
        rate = of_chosen.num_reached / of_chosen.num_runs if of_chosen.runs else 1.0
        if rate < limits.min_reach_rate and not state.pending:
            least = f"confirm.min_reach_rate is {limits.min_reach_rate:g}"
            reasons[chosen.trial] = f"reached in {rate:.0%} of the runs of its claim, {least}"
            is_baseline_better = True
    order = (baseline, chosen) if is_baseline_better else (chosen, baseline)
    best = next((each for each in order if each and scores[each.trial].num_reached), None)
    return Confirmation(
        configurations=race.configurations,
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
