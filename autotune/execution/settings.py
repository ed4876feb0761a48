"""Checks of a study's settings that need neither torch nor a device: a mistake is told before
anything else is imported or started.
"""

import re
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from autotune.config.compose import Composed, Composer
from autotune.config.experiments import dated_name
from autotune.config.schema import Config
from autotune.config.space_files import check_space, read_search_space
from autotune.confirm.race import MIN_PAIRS
from autotune.errors import ConfigError
from autotune.session import refuse_within_training
from autotune.space import SearchSpace


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """A study's settings, composed and checked."""

    name: str
    folder: Path
    composed: Composed
    space: SearchSpace


def check_settings(composer: Composer) -> StudySettings:
    """Read and check what a study is to do; every branch of its search space is composed.

    Raises:
        ConfigError: a setting has a value that is refused, or a branch of the space cannot be
            composed.
    """
    refuse_within_training()
    composed = composer.compose()
    config, target = composed.config, composed.config.target
    if not config.search_space and not composer.sweeps:
        raise ConfigError(
            "search_space: the experiment has none; give a list of files, or sweeps such as"
            " optimizer.lr=interval(1e-3,1)"
        )
    check_limits(config)
    metric = str(config.metric.get("_target_", "")).rpartition(".")[2]
    if config.training is None and metric == "accuracy" and not 0 <= target.value <= 1:
        meant = f" (did you mean {target.value / 100:g}?)" if 1 < target.value <= 100 else ""
        raise ConfigError(
            f"target.value: found {target.value:g}, {metric} is a fraction of 0 to 1{meant}"
        )
    name = study_name(config, composed.choices["experiment"])
    space = read_search_space(config.search_space, composer)
    check_space(space, composer)
    folder = (Path(config.study.folder) / name).absolute()
    return StudySettings(name=name, folder=folder, composed=composed, space=space)


_PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")
_POSITIVE = (
    "search.num_trials",
    "search.time_budget_seconds",
    "search.max_concurrent_trials",
    "search.trial_deadline_seconds",
    "search.max_errors_in_a_row",
    "search.expected_trainings",
    "cluster.cpus_per_worker",
    "confirm.num_candidates",
    "confirm.num_seeds",
    "confirm.budget_fraction",
)
"""Keys whose values, unless null, must be above 0."""


def check_limits(config: Config) -> None:
    """Check the settings of the cluster, and those that limit a search and its confirmation.

    Raises:
        ConfigError: a setting has a value that is refused.
    """
    search, confirm, cluster = config.search, config.confirm, config.cluster
    for key in _POSITIVE:
        value = attrgetter(key)(config)
        if value is not None and not value > 0:
            raise ConfigError(f"{key}: found {value}, must be above 0")
    min_runs = 2 * (confirm.num_seeds or MIN_PAIRS)
    is_given = cluster.num_cpus is not None or cluster.num_gpus is not None
    for is_wrong, message in (
        (
            cluster.placement not in _PLACEMENTS,
            f"cluster.placement: found {cluster.placement!r}, must be one of"
            f" {', '.join(_PLACEMENTS)}",
        ),
        (
            is_given and cluster.address not in (None, "local"),
            "cluster.num_cpus, cluster.num_gpus: must be null with"
            f" cluster.address={cluster.address}: give `ray start` --num-cpus and --num-gpus on"
            " each machine",
        ),
        (
            search.num_trials is None and search.time_budget_seconds is None,
            "search: num_trials and time_budget_seconds are both null; limit one of them",
        ),
        (
            search.stop_when_not_worth and search.expected_trainings is None,
            "search.expected_trainings: search.stop_when_not_worth=true needs the number of"
            " trainings that what is found will be used for",
        ),
        (
            search.max_retries < 0,
            f"search.max_retries: found {search.max_retries}, must be 0 or above",
        ),
        (
            0 != confirm.max_runs < min_runs,
            f"confirm.max_runs: found {confirm.max_runs}, must be from {min_runs} for"
            f" {min_runs // 2} pairs of runs; confirm=none makes none",
        ),
        (
            not 0 <= confirm.min_reach_rate <= 1,
            f"confirm.min_reach_rate: found {confirm.min_reach_rate:g}, must be in 0 to 1",
        ),
    ):
        if is_wrong:
            raise ConfigError(message)


def study_name(config: Config, prefix: str) -> str:
    """The study's name from the configuration, else ``prefix`` and the current time.

    Raises:
        ConfigError: the name has characters that are refused in a folder's name.
    """
    name = config.study.name or dated_name(prefix)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(f"study.name: found {name!r}, use letters, digits, '_', '-' and '.'")
    return name
