"""The search policy of a configuration, over a recording instead of a cluster."""

from autotune.config.build import accepted_arguments, build_partial, call
from autotune.config.compose import Composed
from autotune.errors import ConfigError
from autotune.objective import AmortisedTime
from autotune.recording import Recording
from autotune.search.policy import Place, SearchPolicy
from autotune.search.seeds import derived_seed
from autotune.search.study import pausing_sampler, quiet_optuna, study_in_memory


def replayed_policy(recording: Recording, composed: Composed, *, seed: int, place: Place) -> SearchPolicy:
    """The policy that ``search`` and ``stopping`` name, minimising recorded seconds to target.

    Raises:
        ConfigError: a part of it cannot be made.
    """
    quiet_optuna()
    config = composed.config
    objective = AmortisedTime(num_trainings=1)  # a recording has no build time
    made = build_partial(config.search.sampler, config.allowed_targets, "search.sampler")
    offered = {"seed": derived_seed(seed, "sampler 0"), "space": recording.space, "target": recording.target, "objective": objective}
    sampler = call(made, "search.sampler", **accepted_arguments(made, offered))
    made = build_partial(config.stopping, config.allowed_targets, "stopping")
    stopping = call(made, "stopping", **accepted_arguments(made, {"objective": objective}))
    if not callable(getattr(stopping, "observe", None)):
        raise ConfigError(f"stopping: {config.stopping['_target_']} has no observe(trial, evaluation)")
    return SearchPolicy(
        study=study_in_memory(sampler),
        space=recording.space,
        baseline=None,
        has_baseline=False,
        stopping=stopping,
        objective=objective,
        target=recording.target,
        seed=seed,
        num_trials=config.search.num_trials,
        max_errors_in_a_row=config.search.max_errors_in_a_row,
        pausing=pausing_sampler(sampler),
        place=place,
    )
