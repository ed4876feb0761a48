"""Checks of a study's settings that need neither torch nor a device: a mistake is told before
anything else is imported or started.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.config.compose import Composed, Composer
from autotune.config.experiments import dated_name
from autotune.config.schema import ClusterConfig, Config, ConfirmConfig
from autotune.config.space_files import check_space, read_search_space
from autotune.confirm.race import MIN_PAIRS
from autotune.errors import ConfigError
from autotune.session import refuse_within_training
from autotune.space import SearchSpace, Suggestion


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """A study's settings, composed and checked."""

    name: str
    folder: Path
    composed: Composed
    space: SearchSpace
    probes: list[tuple[str, Any, Suggestion]]
    """For each option of a choice a point that opens it, each of which composes: the option's
    key, its value and the point."""


def check_settings(composer: Composer) -> StudySettings:
    """Read and check what a study is to do; every branch of its search space is composed.

    Raises:
        ConfigError: a setting has a value that is not accepted, or a branch of the space cannot be
            composed.
    """
    refuse_within_training()
    composed = composer.compose()
    config = composed.config
    if not config.search_space and not composer.sweeps:
        raise ConfigError(
            "search_space: the experiment has none; accepted is a list of files, or sweeps such as"
            " optimizer.lr=interval(1e-3,1)"
        )
    check_budget(config)
    _check_target(config)
    name = study_name(config, composed.choices["experiment"])
    space = read_search_space(config.search_space, composer)
    folder = (Path(config.study.folder) / name).absolute()
    return StudySettings(
        name=name,
        folder=folder,
        composed=composed,
        space=space,
        probes=check_space(space, composer),
    )


def check_cluster(cluster: ClusterConfig) -> None:
    """Check the ``cluster`` settings: the placement is one that Ray knows, and CPUs and GPUs are
    set only for a local Ray.

    Raises:
        ConfigError: a setting has a value that is not accepted.
    """
    if cluster.placement not in _PLACEMENTS:
        raise ConfigError(
            f"cluster.placement: found {cluster.placement!r}, accepted are {', '.join(_PLACEMENTS)}"
        )
    for key, value in (("num_cpus", cluster.num_cpus), ("num_gpus", cluster.num_gpus)):
        if value is not None and cluster.address not in (None, "local"):
            raise ConfigError(
                f"cluster.{key}: found {value}, accepted with cluster.address={cluster.address} is"
                " null: what a machine of a running cluster gives is said there, by ray start"
                f" --{key.replace('_', '-')}"
            )


_PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")


def _check_target(config: Config) -> None:
    target, metric = config.target, str(config.metric.get("_target_", "")).rpartition(".")[2]
    if config.training is None and metric in _FRACTIONS and not 0 <= target.value <= 1:
        meant = f" (did you mean {target.value / 100:g}?)" if 1 < target.value <= 100 else ""
        raise ConfigError(
            f"target.value: found {target.value:g}, accepted is 0 to 1: {metric} is a"
            f" fraction{meant}"
        )


_FRACTIONS = ("accuracy",)
"""Metrics of autotune's own whose values lie in 0 to 1."""


def check_budget(config: Config) -> None:
    """Check the settings that limit a search, its confirmation and what each run takes.

    Raises:
        ConfigError: a setting has a value that is not accepted.
    """
    search, confirm = config.search, config.confirm
    check_cluster(config.cluster)
    if search.num_trials is None and search.time_budget_seconds is None:
        raise ConfigError(
            "search: num_trials and time_budget_seconds are both null; accepted is a limit on one"
            " of them"
        )
    for key, value in (
        ("search.num_trials", search.num_trials),
        ("search.time_budget_seconds", search.time_budget_seconds),
        ("search.max_concurrent_trials", search.max_concurrent_trials),
        ("search.trial_deadline_seconds", search.trial_deadline_seconds),
        ("search.max_errors_in_a_row", search.max_errors_in_a_row),
        ("search.expected_trainings", search.expected_trainings),
        ("cluster.cpus_per_worker", config.cluster.cpus_per_worker),
    ):
        if value is not None and not value > 0:
            raise ConfigError(f"{key}: found {value}, accepted is above 0")
    if search.stop_when_not_worth and search.expected_trainings is None:
        raise ConfigError(
            "search.expected_trainings: found null, accepted with search.stop_when_not_worth=true"
            " is the number of trainings that what is found will be used for"
        )
    if search.max_retries < 0:
        raise ConfigError(
            f"search.max_retries: found {search.max_retries}, accepted is a whole number from 0"
        )
    if confirm.max_runs:
        _check_confirm(confirm)


def _check_confirm(confirm: ConfirmConfig) -> None:
    for key, value in (
        ("num_candidates", confirm.num_candidates),
        ("num_seeds", confirm.num_seeds),
    ):
        if value is not None and value < 1:
            raise ConfigError(
                f"confirm.{key}: found {value}, accepted is a whole number from 1, or confirm=none"
            )
    least = 2 * (confirm.num_seeds or MIN_PAIRS)
    if confirm.max_runs < least:
        pairs = "num_seeds" if confirm.num_seeds else f"{MIN_PAIRS}"
        raise ConfigError(
            f"confirm.max_runs: found {confirm.max_runs}, accepted is from {least}: {pairs} pairs"
            " of runs, or confirm=none"
        )
    if confirm.budget_fraction is not None and not confirm.budget_fraction > 0:
        raise ConfigError(
            f"confirm.budget_fraction: found {confirm.budget_fraction:g}, accepted is above 0, or"
            " null for no such limit"
        )
    if not 0 <= confirm.min_reach_rate <= 1:
        raise ConfigError(
            f"confirm.min_reach_rate: found {confirm.min_reach_rate:g}, accepted is 0 to 1"
        )


def study_name(config: Config, prefix: str) -> str:
    """The study's name from the configuration, else ``prefix`` and the current time.

    Raises:
        ConfigError: the name has characters that are not accepted in a folder's name.
    """
    name = config.study.name or dated_name(prefix)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(
            f"study.name: found {name!r}, accepted are letters, digits, '_', '-' and '.'"
        )
    return name
