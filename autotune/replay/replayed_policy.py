"""The search policy of a configuration, over a recording instead of a cluster."""

from collections.abc import Sequence

from autotune.config.build import build_partial, call
from autotune.config.compose import Composed
from autotune.objective import check_measured, device_of
from autotune.recording import Recording
from autotune.replay.simulation import replayed_evaluation
from autotune.search.earlier_trials import EarlierStudy, first_points
from autotune.search.factory import make_sampler, make_stopping
from autotune.search.pausing import pausing_sampler
from autotune.search.policy import PointPlacement, SearchPolicy
from autotune.search.seeds import derived_seed
from autotune.search.stopping import StoppingRule
from autotune.search.study import Study, study_in_memory


def replayed_policy(
    recording: Recording,
    composed: Composed,
    *,
    seed: int,
    place: PointPlacement,
    stopping: StoppingRule | None = None,
    study: Study | None = None,
    earlier: Sequence[EarlierStudy] = (),
) -> SearchPolicy:
    """The policy that ``search``, ``stopping`` and ``objective`` name.

    Args:
        stopping: in place of the rule that the configuration names.
        study: of earlier trials, to go on from.
        earlier: studies to learn from.

    Raises:
        ConfigError: a part of it cannot be made.
    """
    config = composed.config
    objective = call(build_partial(config.objective, config.allowed_targets, "objective"), "objective")
    last = [replayed_evaluation(each, len(each.steps) - 1) for each in recording.trials if each.steps]
    check_measured(objective, [device_of(each, "the recording") for each in last])
    baseline = next((each.suggestion for each in recording.trials if each.number == recording.baseline), None)
    sampler = make_sampler(
        config.search.sampler,
        config.allowed_targets,
        seed=derived_seed(seed, "sampler 0"),
        space=recording.space,
        target=recording.target,
        objective=objective,
        earlier=earlier,
    )
    made = study_in_memory(sampler)
    if study is not None:
        study.sampler = made.sampler
    return SearchPolicy(
        study=study or made,
        space=recording.space,
        baseline=baseline if baseline is not None and baseline.values else None,
        has_baseline=baseline is not None,
        first=first_points(earlier, recording.space, seed=seed),
        stopping=stopping or make_stopping(config.stopping, config.allowed_targets, objective),
        objective=objective,
        target=recording.target,
        seed=seed,
        num_trials=config.search.num_trials,
        max_errors_in_a_row=config.search.max_errors_in_a_row,
        pausing=pausing_sampler(sampler),
        place=place,
    )
