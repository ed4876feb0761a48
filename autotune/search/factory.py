"""Makes the sampler and the stopping rule that a configuration names."""

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.build import accepted_arguments, build_partial, call
from autotune.errors import ConfigError
from autotune.measurement import Target
from autotune.objective import Objective
from autotune.search.earlier_trials import EarlierStudy
from autotune.search.stopping import StoppingRule
from autotune.search.study import quiet_optuna
from autotune.space import SearchSpace


def make_sampler(
    node: Mapping[str, Any],
    allowed: Sequence[str],
    *,
    seed: int,
    space: SearchSpace,
    target: Target,
    objective: Objective,
    earlier: Sequence[EarlierStudy] = (),
) -> object:
    """Make the sampler that ``search.sampler`` names; seed, space, target, objective and earlier are passed if its signature has them.

    Raises:
        ConfigError: the sampler cannot be made.
    """
    quiet_optuna()
    make = build_partial(node, allowed, "search.sampler")
    offered = {"seed": seed, "space": space, "target": target, "objective": objective, "earlier": earlier}
    return call(make, "search.sampler", **accepted_arguments(make, offered))


def make_stopping(node: Mapping[str, Any], allowed: Sequence[str], objective: Objective) -> StoppingRule:
    """Make the stopping rule that ``stopping`` names; the objective is passed if its signature has it.

    Raises:
        ConfigError: the rule cannot be made, or has no ``observe``.
    """
    make = build_partial(node, allowed, "stopping")
    rule = call(make, "stopping", **accepted_arguments(make, {"objective": objective}))
    if not callable(getattr(rule, "observe", None)):
        raise ConfigError(f"stopping: {node['_target_']} has no observe(trial, evaluation)")
    return rule  # type: ignore[no-any-return]  # checked just above
