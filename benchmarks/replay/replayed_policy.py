"""Makes the search policy that a configuration describes, for a search over a recording instead
of on a cluster.
"""

from collections.abc import Sequence

import optuna

from autotune.config.build import build_partial, call
from autotune.config.compose import Composed
from autotune.objective import check_measured, device_of
from autotune.recording import Recording
from autotune.search.points import derived_seed
from autotune.search.samplers import PausingSampler, make_sampler, optuna_sampler
from autotune.search.scheduler import PointPlacement, Scheduler
from autotune.search.stopping import StoppingRule, make_stopping
from autotune.search.study import Study
from autotune.search.warm_start import EarlierStudy, first_points
from benchmarks.replay.simulation import replayed_evaluation


def replayed_policy(
    recording: Recording,
    composed: Composed,
    *,
    seed: int,
    place: PointPlacement,
    stopping: StoppingRule | None = None,
    study: Study | None = None,
    earlier: Sequence[EarlierStudy] = (),
) -> Scheduler:
    """Make the policy that ``search``, ``stopping`` and ``objective`` of a configuration describe.

    Args:
        place: gives the recorded point in place of each suggestion.
        stopping: stopping rule in place of the configuration's.
        study: Optuna study with earlier trials, which the policy continues; None starts a new
            study.
        earlier: studies that a warm start learns from.

    Raises:
        ConfigError: a part of the policy cannot be made.
    """
    config = composed.config
    objective = call(
        build_partial(config.objective, config.allowed_targets, "objective"), "objective"
    )
    last = [
        replayed_evaluation(trial, len(trial.steps) - 1)
        for trial in recording.trials
        if trial.steps
    ]
    check_measured(objective, [device_of(evaluation, "the recording") for evaluation in last])
    baseline = next(
        (trial.suggestion for trial in recording.trials if trial.number == recording.baseline), None
    )
    sampler = make_sampler(
        config.search.sampler,
        config.allowed_targets,
        seed=derived_seed(seed, "sampler 0"),
        space=recording.space,
        target=recording.target,
        objective=objective,
        earlier=earlier,
    )
    study = study or optuna.create_study()
    study.sampler = optuna_sampler(sampler)
    return Scheduler(
        study=study,
        space=recording.space,
        baseline=baseline,
        first=first_points(earlier, recording.space, seed=seed),
        stopping=stopping or make_stopping(config.stopping, config.allowed_targets, objective),
        objective=objective,
        target=recording.target,
        seed=seed,
        num_trials=config.search.num_trials,
        expected_trainings=config.search.expected_trainings,
        max_errors_in_a_row=config.search.max_errors_in_a_row,
        sampler=sampler if isinstance(sampler, PausingSampler) else None,
        place=place,
    )
