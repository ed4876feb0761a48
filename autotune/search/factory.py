"""Sampler and stopping rule as a configuration names them."""

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
    """The sampler that ``search.sampler`` names, given those of seed, space, target, objective and earlier that its signature has.

    Raises:
        ConfigError: it cannot be made.
    """
    quiet_optuna()
    made = build_partial(node, allowed, "search.sampler")
    offered = {"seed": seed, "space": space, "target": target, "objective": objective, "earlier": earlier}
    return call(made, "search.sampler", **accepted_arguments(made, offered))


def make_stopping(node: Mapping[str, Any], allowed: Sequence[str], objective: Objective) -> StoppingRule:
    """The rule that ``stopping`` names.

    Raises:
        ConfigError: it cannot be made, or has no ``observe``.
    """
    made = build_partial(node, allowed, "stopping")
    rule = call(made, "stopping", **accepted_arguments(made, {"objective": objective}))
    if not callable(getattr(rule, "observe", None)):
        raise ConfigError(f"stopping: {node['_target_']} has no observe(trial, evaluation)")
    return rule  # type: ignore[no-any-return]  # has just been asked
