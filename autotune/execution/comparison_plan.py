"""The plan of a comparison, complete and checked before a device is used: its sides, seeds and resources."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.config.build import build_partial, call
from autotune.config.compose import Composed, Composer, split_overrides
from autotune.config.overrides import override_key
from autotune.config.schema import FIXED_KEYS, Config, TrialConfig
from autotune.config.sources import Source
from autotune.errors import AutotuneError, ConfigError
from autotune.execution.cluster import capabilities_of
from autotune.execution.fork_server import ForkServer, check_in_this_process
from autotune.execution.plan import deadline_seconds, device_lines, resources_of, unsuitable, workload_of
from autotune.execution.settings import check_cluster, study_name
from autotune.hiding import without_secrets
from autotune.measurement import Target
from autotune.objective import Objective, check_measured
from autotune.search.randomness import derived_seed
from autotune.space import Suggestion
from autotune.training.capabilities import Capabilities
from autotune.training.sources import train_missing_sources

SIDE_NAMES = ("a", "b")
VERB_OF_KIND = {"comparison": "compare", "scaling": "scale"}
"""The verb of each kind of plan: the plan's folder name begins with it, and the phase of its tracked runs is called so."""
_SHARED_KEYS = FIXED_KEYS - {"experiment"}
_SAME_VALUES = ("target", "evaluate_every_samples", "objective", "cluster", "tracking", "study")
"""Configuration keys whose values must be the same on both sides of a comparison."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the configurations that a comparison or a scaling runs."""

    name: str
    overrides: tuple[str, ...]
    """Overrides of this side alone, beside those that all sides share."""
    composer: Composer
    composed: Composed
    cap_seconds: float = math.inf
    """Seconds of training after which a run of this side ends."""

    @property
    def trial(self) -> TrialConfig:
        """The configuration that the side's runs train, except for the seed."""
        return self.composed.trial

    @property
    def experiment(self) -> str:
        """Name of the experiment that the side is composed from."""
        return self.composed.choices["experiment"]

    @property
    def values(self) -> Mapping[str, Any]:
        """The side's overrides that say what is trained: group choices and values, by config key."""
        groups, values = split_overrides(self.composer, self.overrides)
        return {**groups, **values}

    def seeded(self, seed: int) -> TrialConfig:
        """The configuration that the run with this seed trains."""
        return self.composer.compose_suggestion(Suggestion({}), seed=seed).trial


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """A checked plan of runs: of two sides, or of one configuration on several numbers of workers."""

    kind: str
    """``comparison`` or ``scaling``."""
    name: str
    folder: Path
    num_seeds: int
    sides: tuple[Side, ...]
    objective: Objective
    capabilities: Capabilities

    @property
    def config(self) -> Config:
        """The configuration of everything that the sides share, such as the cluster and the tracker."""
        return self.sides[0].composed.config

    @property
    def experiment(self) -> str:
        """The experiment's name; all names joined by `` and `` if the sides come from different experiments."""
        return " and ".join(dict.fromkeys(side.experiment for side in self.sides))

    @property
    def workload(self) -> str:
        """Model and data set of the first side, such as ``simple_cnn-digits``."""
        return workload_of(self.sides[0].composed)

    @property
    def target(self) -> Target:
        """The target that all sides train to."""
        return self.sides[0].trial.target

    @property
    def run_deadline_seconds(self) -> float:
        """Wall seconds after which a run of any side counts as hung."""
        return max(deadline_seconds(side.composed) for side in self.sides)

    @property
    def missing_sources(self) -> tuple[Source, ...]:
        """Experiments that must be trained first: a side starts from their checkpoints, which do not exist yet."""
        return tuple(dict.fromkeys(source for side in self.sides for source in side.composer.missing_sources))

    @property
    def device_lines(self) -> list[str]:
        """What the sides run on, see ``plan.device_lines``; a line each where they differ."""
        return list(dict.fromkeys(line for side in self.sides for line in device_lines(side.trial, self.capabilities)))

    def resources(self, config: TrialConfig) -> tuple[int, int]:
        """Numbers of CPUs and GPUs that one run takes: whole GPUs, since the run is timed."""
        return resources_of(config, self.config.cluster, self.capabilities)

    def seed(self, index: int) -> int:
        """The seed that all runs of a round share; a round has one run of each side."""
        return derived_seed(self.config.study.seed, f"compare {index}")


def compose_sides(common: Sequence[str], overrides: Mapping[str, Sequence[str]], config_dirs: Sequence[str]) -> tuple[Side, Side]:
    """Compose the configurations of both sides and check that they can be compared.

    Args:
        common: overrides that both sides share.
        overrides: overrides of each side alone, by the side's name.

    Raises:
        ConfigError: a side cannot be composed, or the two cannot be compared; the message names the side if only one is at fault.
    """
    for name in SIDE_NAMES:
        for override in overrides[name]:
            key = override_key(override, name)
            if key.replace("/", ".").partition(".")[0] in _SHARED_KEYS:
                raise ConfigError(f"{name}: {override}: is shared by both sides; accepted is {key}=... beside a and b")
    one, other = (_side_or_error(name, common, overrides[name], config_dirs) for name in SIDE_NAMES)
    if isinstance(one, ConfigError) and isinstance(other, ConfigError) and str(one) == str(other):
        raise one  # the fault lies in the common overrides
    for name, side in zip(SIDE_NAMES, (one, other), strict=True):
        if isinstance(side, ConfigError):
            raise ConfigError(f"{name}: {side}") from side
    assert isinstance(one, Side)
    assert isinstance(other, Side)
    for key in _SAME_VALUES:
        if one.composed.plain[key] != other.composed.plain[key]:
            found = f"{_difference(one.composed.plain[key], other.composed.plain[key])}"
            raise ConfigError(
                f"{key}: the experiments of a and b differ in it ({found}); accepted is one value for both, set beside a and b"
            )
    if one.trial == other.trial:
        raise ConfigError(f"a and b: {_shown(one)} and {_shown(other)} are the same configuration; accepted are two that differ")
    return one, other


def compose_side(
    name: str, common: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[str], *, cap_seconds: float = math.inf
) -> Side:
    """Compose the configuration of one side.

    Raises:
        ConfigError: the configuration cannot be composed.
    """
    composer = Composer([*common, *overrides], config_dirs)
    composer.refuse_sweeps()
    composed = composer.compose()
    _ = composed.trial
    return Side(name=name, overrides=tuple(overrides), composer=composer, composed=composed, cap_seconds=cap_seconds)


def _side_or_error(name: str, common: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[str]) -> Side | ConfigError:
    try:
        return compose_side(name, common, overrides, config_dirs)
    except ConfigError as error:
        return error


def plan_comparison(
    sides: tuple[Side, ...], *, num_seeds: int, kind: str = "comparison", fork_server: ForkServer | None = None
) -> ComparisonPlan:
    """Plan the runs of the sides and check the settings and machines that they need.

    Args:
        fork_server: what finds out what this machine has, in place of this process, which would then hold memory of its GPU.

    Raises:
        AutotuneError: these machines cannot run a side, or a setting has a value that is not accepted.
    """
    cluster = sides[0].composed.config.cluster
    capabilities = capabilities_of(cluster, fork_server)
    config, allowed = sides[0].composed.config, sides[0].trial.allowed_targets
    for key, value in (
        ("search.trial_deadline_seconds", config.search.trial_deadline_seconds),
        ("search.max_errors_in_a_row", config.search.max_errors_in_a_row),
        ("cluster.cpus_per_worker", config.cluster.cpus_per_worker),
    ):
        if value is not None and not value > 0:
            raise ConfigError(f"{key}: found {value}, accepted is above 0")
    check_cluster(config.cluster)
    for side in sides:
        reason = unsuitable(side.trial, cluster, capabilities)
        if reason is not None:
            raise ConfigError(f"{side.name}: cannot run here: {reason}")
    experiments = "-and-".join(dict.fromkeys(side.experiment for side in sides))
    name = study_name(config, f"{VERB_OF_KIND[kind]}-{experiments}")
    folder = (Path(config.study.folder) / name).absolute()
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"study.name: {folder} holds files already; accepted is another name, or none")
    objective = call(build_partial(config.objective, allowed, "objective"), "objective")
    check_measured(objective, [capabilities.device_of(side.trial) for side in sides])
    return ComparisonPlan(
        kind=kind, name=name, folder=folder, num_seeds=num_seeds, sides=sides, objective=objective, capabilities=capabilities
    )


def check_comparison(plan: ComparisonPlan, say: Callable[[str], None], fork_server: ForkServer | None = None) -> None:
    """Train the checkpoints that a side starts from and that do not exist yet; then make the components of every side once, as a check.

    Args:
        say: called with a line of text when a checkpoint is trained.
        fork_server: what makes the components, in place of this process.

    Raises:
        AutotuneError: a component cannot be made, the data set is missing, or a checkpoint cannot be trained.
    """
    check = check_in_this_process if fork_server is None else fork_server.check
    for side in plan.sides:
        try:
            train_missing_sources(side.composer, say)
            if plan.config.cluster.is_local:  # with a remote cluster, this machine need not have the data set
                check(side.trial)
        except AutotuneError as error:
            raise type(error)(f"{side.name}: {error}") from error


def describe_comparison(plan: ComparisonPlan) -> list[str]:
    """The plan as lines of text for the terminal: sides, target, runs and resources."""
    target, capabilities = plan.target, plan.capabilities
    lines = [
        f"{plan.kind:<10} {plan.name} -> {plan.folder}",
        f"target     {target}, at most {target.max_train_seconds:g} s of training a run",
    ]
    for side in plan.sides:
        cpus, gpus = plan.resources(side.trial)
        lines.append(f"{side.name:<10} {_shown(side)}: {cpus} CPU and {gpus} GPU a run")
    lines.append(f"runs       {plan.num_seeds} of each side, in turns, each in a fresh process; those of a round share their seed")
    lines += [f"first      {source.experiment} is trained, once, for {source.path}" for source in plan.missing_sources]
    lines.append(f"machines   {capabilities.num_cpus} CPU and {capabilities.num_gpus} GPU ({capabilities.device_name})")
    return [*lines, *(f"device     {line}" for line in plan.device_lines)]


def _shown(side: Side) -> str:
    return f"[{', '.join(map(without_secrets, side.overrides))}]"


def _difference(one: Any, other: Any, where: str = "") -> str:
    """The first value in which two configurations differ, as text: its keys and both values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
        return _difference(one.get(key), other.get(key), f"{where}{key} ")
    return f"{where}{one!r} and {other!r}"
