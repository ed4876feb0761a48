"""Checks of the settings of a study or a comparison that need neither torch nor a device."""

import re
from operator import attrgetter

from autotune.config.experiments import dated_name
from autotune.config.schema import Config
from autotune.confirm.race import MIN_PAIRS
from autotune.errors import ConfigError, check_choice

_PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")
_POSITIVE = (
    "search.num_trials",
    "search.time_budget_seconds",
    "search.max_concurrent_trials",
    "search.trial_deadline_seconds",
    "search.max_errors_in_a_row",
    "search.expected_trainings",
    "cluster.cpus_per_worker",
    "cluster.trials_per_gpu",
    "cluster.notice_seconds",
    "checkpoint.every_minutes",
    "confirm.num_candidates",
    "confirm.num_seeds",
    "confirm.budget_fraction",
)
"""Keys whose values, unless null, must be above 0."""


def check_limits(config: Config) -> None:
    """Check the target, the settings of the cluster, and those that limit a search and its
    confirmation.

    Raises:
        ConfigError: a setting has a value that is refused.
    """
    search, confirm, cluster = config.search, config.confirm, config.cluster
    for key in _POSITIVE:
        value = attrgetter(key)(config)
        if value is not None and not value > 0:
            raise ConfigError(f"{key}: found {value}, must be above 0")
    check_choice("trials.keep", config.trials.keep, ("best", "all"))
    check_choice("cluster.placement", cluster.placement, _PLACEMENTS)
    target, metric = config.target, str(config.metric.get("_target_", "")).rpartition(".")[2]
    meant = f" (did you mean {target.value / 100:g}?)" if 1 < target.value <= 100 else ""
    min_runs = 2 * (confirm.num_seeds or MIN_PAIRS)
    is_given = cluster.num_cpus is not None or cluster.num_gpus is not None
    for is_wrong, message in (
        (
            config.training is None and metric == "accuracy" and not 0 <= target.value <= 1,
            f"target.value: found {target.value:g}, {metric} is a fraction of 0 to 1{meant}",
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
