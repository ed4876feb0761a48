"""What a study is going to do, settled and checked before a device is taken: space, baseline, budget, resources."""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autotune.config.build import build_partial, call
from autotune.config.compose import Composed, Composer
from autotune.config.schema import ClusterConfig, Config, ConfirmConfig, TrialConfig
from autotune.config.space_files import check_space, read_search_space
from autotune.errors import ConfigError, InvalidTrialError, SearchSpaceError
from autotune.objective import Objective, check_measured
from autotune.race import LEAST_PAIRS
from autotune.report.score_format import score_format_of
from autotune.search.earlier_trials import EarlierStudy, earlier_study
from autotune.search.factory import make_sampler, make_stopping
from autotune.search.stopping import StoppingRule
from autotune.space import SearchSpace, Suggestion, override_text
from autotune.tracking.earlier_recordings import earlier_recordings
from autotune.training.device import Capabilities, unsupported, uses_cuda


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """A study, checked."""

    name: str
    folder: Path
    experiment: str
    composer: Composer
    composed: Composed
    space: SearchSpace
    """Less what these machines cannot run."""
    probes: tuple[tuple[str, Suggestion], ...]
    """A point of every branch of the space, with the option it opens."""
    dropped: tuple[str, ...]
    """What was taken out of the space and why, a line each."""
    baseline: Suggestion | None
    """The point that the experiment itself stands for, None where the space does not contain it."""
    objective: Objective
    capabilities: Capabilities
    earlier: tuple[EarlierStudy, ...] = ()
    """Studies that this one learns from."""

    @property
    def config(self) -> Config:
        """The study's whole configuration."""
        return self.composed.config

    @property
    def trial(self) -> TrialConfig:
        """The baseline's configuration."""
        return self.composed.trial

    @property
    def workload(self) -> str:
        """What is trained on what."""
        return workload_of(self.composed)

    @property
    def trial_deadline_seconds(self) -> float:
        """Wall seconds after which a trial counts as hung."""
        return deadline_seconds(self.composed)

    def resources(self, config: TrialConfig) -> tuple[int, int]:
        """CPUs and GPUs of one trial: whole GPUs, since it is timed."""
        return resources_of(config, self.config.cluster, self.capabilities)

    def definition(self) -> dict[str, Any]:
        """What makes two commands the same study, as plain JSON."""
        trial = {key: value for key, value in self.trial.as_dict().items() if key not in ("seed", "allowed_targets")}
        content = {
            "experiment": self.experiment,
            "configuration": trial,
            "search_space": self.space.as_mapping(),
            "objective": self.composed.plain["objective"],
            "seed": self.config.study.seed,
        }
        return dict(json.loads(json.dumps(content, default=str)))

    def state_folder(self, trial: int) -> Path:
        """Where the state of a trial is kept while it is paused."""
        return self.folder / "paused" / f"trial-{trial}"

    def stopping(self) -> StoppingRule:
        """A stopping rule of this study's own.

        Raises:
            ConfigError: it cannot be made, or has no ``observe``.
        """
        return make_stopping(self.config.stopping, self.trial.allowed_targets, self.objective)

    def sampler(self, seed: int) -> object:
        """A sampler of this study's own.

        Raises:
            ConfigError: it cannot be made.
        """
        node, allowed = self.config.search.sampler, self.trial.allowed_targets
        return make_sampler(
            node, allowed, seed=seed, space=self.space, target=self.trial.target, objective=self.objective, earlier=self.earlier
        )


def workload_of(composed: Composed) -> str:
    """What is trained on what, such as ``simple_cnn-digits``."""
    if composed.trial.training is not None:
        return str(composed.trial.training["_target_"])
    return f"{composed.choices['model']}-{composed.choices['data']}"


def deadline_seconds(composed: Composed) -> float:
    """Wall seconds after which a training counts as hung."""
    return composed.config.search.trial_deadline_seconds or 2 * composed.trial.target.max_train_seconds + 120


def resources_of(config: TrialConfig, cluster: ClusterConfig, capabilities: Capabilities) -> tuple[int, int]:
    """CPUs and GPUs of one training: whole GPUs, since it is timed."""
    num_workers = config.parallelism["num_workers"]
    num_gpus = num_workers if uses_cuda(config, capabilities) else 0
    return num_workers * cluster.cpus_per_worker, num_gpus


def plan_study(composer: Composer, capabilities: Capabilities) -> StudyPlan:
    """Settle and check a study; every branch of its space is composed.

    Raises:
        AutotuneError: anything that cannot be run, in one line.
    """
    composed = composer.compose()
    config, trial = composed.config, composed.trial
    if not config.search_space and not composer.sweeps:
        raise ConfigError(
            "search_space: the experiment has none; accepted is a list of files, or sweeps such as optimizer.lr=interval(1e-3,1)"
        )
    _check_budget(config)
    reason = unsupported(trial, capabilities)
    if reason is not None:
        raise ConfigError(f"this experiment's own configuration cannot run here: {reason}")
    space = read_search_space(config.search_space, composer)
    probes = check_space(space, composer)
    space, dropped = _without_unsupported(space, probes, composer, capabilities)
    objective = call(build_partial(config.objective, trial.allowed_targets, "objective"), "objective")
    places = dict.fromkeys([trial.device, *(point.values.get("device", trial.device) for _, _, point in space.probes())])
    check_measured(objective, [capabilities.device_of(replace(trial, device=each)) for each in places])
    name = study_name(config, composed.choices["experiment"])
    plan = StudyPlan(
        name=name,
        folder=(Path(config.study.folder) / name).absolute(),
        experiment=composed.choices["experiment"],
        composer=composer,
        composed=composed,
        space=space,
        probes=tuple((f"{option}={value}" if option else "", point) for option, value, point in space.probes()),
        dropped=tuple(dropped),
        baseline=space.point_of(composed.lookup),
        objective=objective,
        capabilities=capabilities,
        earlier=tuple(_earlier(config, space)),
    )
    plan.stopping()
    plan.sampler(0)
    return plan


def _earlier(config: Config, space: SearchSpace) -> Iterator[EarlierStudy]:
    """The studies that ``warm_start`` names, as far as they fit the space."""
    for name, recording in earlier_recordings(config.warm_start, Path(config.study.folder), config.tracking.get("uri")):
        yield earlier_study(name, recording, space)


def check_plan(plan: StudyPlan, check_training: Callable[[TrialConfig], None]) -> None:
    """Make the baseline's parts, and those of every branch of the space, once, and train nothing.

    Args:
        check_training: makes those of one configuration.

    Raises:
        AutotuneError: a part cannot be made, or the data set is not there.
    """
    check_training(plan.trial)
    for option, point in plan.probes:
        try:
            check_training(plan.composer.compose_suggestion(point, seed=0).trial)
        except InvalidTrialError:
            raise
        except ConfigError as error:
            where = ", ".join(dict.fromkeys(plan.space.sources.values()))
            raise SearchSpaceError(f"{where}: {f'{option}: ' if option else ''}{error}") from error


def describe_plan(plan: StudyPlan) -> list[str]:
    """The plan as lines for a reader: space, baseline, budget, resources."""
    config, target = plan.config, plan.trial.target
    lines = [
        f"study     {plan.name} -> {plan.folder}",
        f"target    {target.metric} {'>=' if target.mode == 'max' else '<='} {target.value}, "
        f"at most {target.max_train_seconds:g} s of training a trial",
        f"objective {score_format_of(plan.objective).description}",
    ]
    lines += [f"first     {source.experiment} is trained, once, for {source.path}" for source in plan.composer.missing_sources]
    lines.append("space")
    width = max(len(name) for name, _, _ in plan.space.items())
    lines += [f"  {name:<{width}}  {_describe_domain(domain)}" for name, _, domain in plan.space.items()]
    lines += [f"  left out: {line}" for line in plan.dropped]
    values = plan.baseline.as_overrides() if plan.baseline else ["as the experiment states it (outside the space)"]
    lines += [f"earlier   {study.summary}" for study in plan.earlier]
    lines.append(f"baseline  {' '.join(values)}")
    limits = [f"{config.search.num_trials} trials"] if config.search.num_trials is not None else []
    limits += [f"{config.search.time_budget_seconds:g} s"] if config.search.time_budget_seconds is not None else []
    confirm = config.confirm
    share = "" if confirm.budget_fraction is None else f", within {confirm.budget_fraction:g} of the search's training time"
    race = f"a race of the best {confirm.num_candidates}, and its winner against the baseline: at most {confirm.max_runs} runs{share}"
    lines.append(f"budget    {', '.join(limits)}; to confirm, {race if confirm.max_runs else 'nothing'}")
    cpus, gpus = plan.resources(plan.trial)
    have = plan.capabilities
    kind = config.cluster.accelerator_type
    only = "" if kind is None else f", on machines with {kind} only"
    lines.append(f"resources {cpus} CPU and {gpus} GPU a trial, of {have.num_cpus} CPU and {have.num_gpus} GPU ({have.device_name}){only}")
    return lines


def _describe_domain(domain: Any) -> str:
    if hasattr(domain, "options"):
        return ", ".join(override_text(value) for value, _ in domain.options)
    settings = {key: value for key, value in asdict(domain).items() if value is not None and value is not False}
    low, high = settings.pop("low"), settings.pop("high")
    rest = [key if value is True else f"{key} {value}" for key, value in settings.items() if not (key == "step" and value == 1)]
    return ", ".join([f"{low} to {high}", *(["powers of two"] if type(domain).__name__ == "PowerOfTwo" else []), *rest])


def check_cluster(cluster: ClusterConfig) -> None:
    """Refuse a layout of workers that Ray does not know, and a size for machines that are there already.

    Raises:
        ConfigError: with what was found.
    """
    if cluster.placement not in _PLACEMENTS:
        raise ConfigError(f"cluster.placement: found {cluster.placement!r}, accepted are {', '.join(_PLACEMENTS)}")
    for key, value in (("num_cpus", cluster.num_cpus), ("num_gpus", cluster.num_gpus)):
        if value is not None and cluster.address not in (None, "local"):
            raise ConfigError(
                f"cluster.{key}: found {value}, accepted with cluster.address={cluster.address} is null: what a machine of a running "
                f"cluster gives is said there, by ray start --{key.replace('_', '-')}"
            )


_PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")


def _check_budget(config: Config) -> None:
    search, confirm = config.search, config.confirm
    check_cluster(config.cluster)
    if search.num_trials is None and search.time_budget_seconds is None:
        raise ConfigError("search: num_trials and time_budget_seconds are both null; accepted is a limit on one of them")
    for key, value in (
        ("search.num_trials", search.num_trials),
        ("search.time_budget_seconds", search.time_budget_seconds),
        ("search.max_concurrent_trials", search.max_concurrent_trials),
        ("search.trial_deadline_seconds", search.trial_deadline_seconds),
        ("search.max_errors_in_a_row", search.max_errors_in_a_row),
        ("cluster.cpus_per_worker", config.cluster.cpus_per_worker),
    ):
        if value is not None and not value > 0:
            raise ConfigError(f"{key}: found {value}, accepted is above 0")
    if search.max_retries < 0:
        raise ConfigError(f"search.max_retries: found {search.max_retries}, accepted is a whole number from 0")
    if confirm.max_runs:
        _check_confirm(confirm)


def _check_confirm(confirm: ConfirmConfig) -> None:
    for key, value in (("num_candidates", confirm.num_candidates), ("num_seeds", confirm.num_seeds)):
        if value is not None and value < 1:
            raise ConfigError(f"confirm.{key}: found {value}, accepted is a whole number from 1, or confirm=none")
    least = 2 * (confirm.num_seeds or LEAST_PAIRS)
    if confirm.max_runs < least:
        pairs = "num_seeds" if confirm.num_seeds else f"{LEAST_PAIRS}"
        raise ConfigError(f"confirm.max_runs: found {confirm.max_runs}, accepted is from {least}: {pairs} pairs of runs, or confirm=none")
    if confirm.budget_fraction is not None and not confirm.budget_fraction > 0:
        raise ConfigError(f"confirm.budget_fraction: found {confirm.budget_fraction:g}, accepted is above 0, or null for no such limit")
    if not 0 <= confirm.min_reach_rate <= 1:
        raise ConfigError(f"confirm.min_reach_rate: found {confirm.min_reach_rate:g}, accepted is 0 to 1")


def _without_unsupported(
    space: SearchSpace, probes: list[tuple[str, Any, Suggestion]], composer: Composer, capabilities: Capabilities
) -> tuple[SearchSpace, list[str]]:
    dropped: list[str] = []
    for name, value, point in probes:
        reason = unsupported(composer.compose_suggestion(point, seed=0).trial, capabilities) if name else None
        alone = reason and _is_to_blame(name, value, point, probes, composer, capabilities)
        if reason is not None and alone:
            space = space.without(name, value)
            dropped.append(f"{name}={override_text(value)}: {reason}")
    return space, dropped


def _is_to_blame(
    name: str, value: Any, point: Suggestion, probes: list[tuple[str, Any, Suggestion]], composer: Composer, capabilities: Capabilities
) -> bool:
    """Whether an option is what cannot run, and not another choice's first option that its probe merely carries."""
    key = name.rpartition("/")[2]
    for other, another, alternative in probes:
        if other == name and another != value:
            values = {each: point.values.get(each, value) for each, value in alternative.values.items()}  # those that the other opens
            swapped = replace(point, values={**values, key: alternative.values[key]})
            if unsupported(composer.compose_suggestion(swapped, seed=0).trial, capabilities) is None:
                return True
    return False


def study_name(config: Config, prefix: str) -> str:
    """The name that was given, else one of ``prefix`` and the time.

    Raises:
        ConfigError: a name that is no folder's.
    """
    name = config.study.name or f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(f"study.name: found {name!r}, accepted are letters, digits, '_', '-' and '.'")
    return name
