"""How much each parameter decides whether a trial is among the better trials of a study."""

from collections.abc import Mapping, Sequence
from typing import Any

import optuna

from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.space import SearchSpace, Suggestion

MIN_REACHED = 4
"""Minimum number of trials that reached the target; with fewer, importances are noise."""


def importances(results: Sequence[TrialResult], scores: Mapping[int, float], space: SearchSpace) -> dict[str, float]:
    """Each parameter's importance for being among the better trials, by qualified name; they sum to 1. Empty if too little is known.

    PED-ANOVA uses only which trials are better, so censored trials count as worse than all trials that reached the target, and no
    score has to be made up for them. A parameter beneath a choice is judged among the trials that have it.

    Source: Watanabe et al., "PED-ANOVA" (IJCAI 2023), as optuna.importance.PedAnovaImportanceEvaluator.
    """
    if len(scores) < MIN_REACHED:
        return {}
    from optuna.importance import PedAnovaImportanceEvaluator  # noqa: PLC0415  # a second to import, and only the final report needs it

    highest = max(scores.values())
    worse = highest + abs(highest) + 1
    ranked = optuna.create_study()
    for result in results:
        if result.values and not result.outcome.is_infeasible and result.outcome is not Outcome.ERRORED:
            value = scores.get(result.trial, worse)
            point = Suggestion(result.values)
            params, distributions = _as_optuna(space, point)
            ranked.add_trial(optuna.create_trial(params=params, distributions=distributions, value=value))
    evaluator = PedAnovaImportanceEvaluator()
    shares: dict[str, float] = {}
    for name in {name for trial in ranked.trials for name in trial.params}:
        trials = [trial for trial in ranked.trials if name in trial.params]
        if len(trials) < MIN_REACHED or len({trial.params[name] for trial in trials}) < 2:  # one value decides nothing
            continue
        shares[name] = evaluator.evaluate(ranked, params=[name]).get(name, 0.0)
    total = sum(shares.values())
    return {name: value / total for name, value in sorted(shares.items(), key=lambda item: -item[1])} if total > 0 else {}


def _as_optuna(space: SearchSpace, point: Suggestion) -> tuple[dict[str, Any], dict[str, optuna.distributions.BaseDistribution]]:
    fixed = optuna.trial.FixedTrial(space.params_of(point))
    space.suggest(fixed)
    return fixed.params, fixed.distributions
