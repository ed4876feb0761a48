"""The plan of a study, complete and checked before a device is used: search space, baseline,
budget and resources.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.config.build import build_partial, call
from autotune.config.compose import Composed, Composer
from autotune.config.schema import ClusterConfig, Config, TrialConfig
from autotune.errors import ConfigError, InvalidTrialError, SearchSpaceError
from autotune.execution.cluster import ClusterSize
from autotune.execution.settings import StudySettings, check_settings
from autotune.hiding import without_secrets_in
from autotune.objective import Objective, check_measured
from autotune.reporting.scores import score_format_of
from autotune.search.outlook import has_costs
from autotune.search.samplers import make_sampler
from autotune.search.stopping import StoppingRule, make_stopping
from autotune.search.study import stored_recording
from autotune.search.warm_start import EarlierStudy, earlier_study
from autotune.space import PowerOfTwo, SearchSpace, Suggestion, override_text
from autotune.tracking.earlier_recordings import earlier_recordings
from autotune.training.capabilities import (
    Capabilities,
    cpus_per_worker,
    describe_device,
    several_kinds,
    unsupported,
    uses_cuda,
)


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """A checked plan of a study."""

    name: str
    folder: Path
    experiment: str
    composer: Composer
    composed: Composed
    space: SearchSpace
    """The search space without the options that these machines cannot run."""
    probes: tuple[tuple[str, Suggestion], ...]
    """Points that together open every branch of the space, each with the option that it opens
    (``key=value``, or empty)."""
    dropped: tuple[str, ...]
    """A line for each option that was removed from the space, with the reason."""
    baseline: Suggestion | None
    """The experiment's own configuration as a point of the space; None if the space does not
    contain it."""
    objective: Objective
    capabilities: Capabilities
    earlier: tuple[EarlierStudy, ...] = ()
    """Earlier studies that this one learns from."""

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
        """Model and data set, such as ``simple_cnn-digits``."""
        return workload_of(self.composed)

    @property
    def trial_deadline_seconds(self) -> float:
        """Wall seconds after which a trial counts as hung."""
        return deadline_seconds(self.composed)

    def resources(self, config: TrialConfig) -> tuple[int, int]:
        """Numbers of CPUs and GPUs that one trial takes: whole GPUs, since the trial is timed."""
        return resources_of(config, self.config.cluster, self.capabilities)

    def unsuitable(self, config: TrialConfig) -> str | None:
        """Why one training cannot run on the study's machines; None if it can."""
        return unsuitable(config, self.config.cluster, self.capabilities)

    @property
    def may_grow(self) -> bool:
        """Whether the cluster may get machines when it is asked for more than it has, since so
        many trials at once were asked for.
        """
        return (
            not self.config.cluster.is_local
            and self.config.search.max_concurrent_trials is not None
        )

    @property
    def max_concurrent_trials(self) -> int | None:
        """Upper limit on trials at a time; None means as many as fit.

        Apple's GPU is one, and Ray counts none.
        """
        return 1 if self.trial.device == "mps" else self.config.search.max_concurrent_trials

    def num_threads(self, config: TrialConfig) -> int:
        """Number of CPU threads of each worker of a trial, unless the trial's configuration sets
        one.
        """
        return cpus_per_worker(config, self.config.cluster, self.capabilities)

    @property
    def has_idle_cpu(self) -> bool:
        """Whether confirmation runs leave a CPU idle, for work beside them: they compute on
        GPUs, or each by itself on some of the CPUs.
        """
        num_cpus, num_gpus = self.resources(self.trial)
        return num_gpus > 0 or num_cpus < self.capabilities.num_cpus

    def definition(self) -> dict[str, Any]:
        """Settings that must be equal for two commands to mean the same study, as plain JSON."""
        trial = {
            key: value
            for key, value in self.trial.as_dict().items()
            if key not in ("seed", "allowed_targets")
        }
        content = {
            "experiment": self.experiment,
            "configuration": trial,
            "search_space": self.space.as_mapping(),
            "objective": self.composed.plain["objective"],
            "seed": self.config.study.seed,
        }
        return dict(json.loads(json.dumps(without_secrets_in(content), default=str)))

    def state_folder(self, trial: int) -> Path:
        """Folder that holds the training state of a trial while the trial is paused."""
        return self.folder / "paused" / f"trial-{trial}"

    def stopping(self) -> StoppingRule:
        """Make a new stopping rule for this study.

        Raises:
            ConfigError: the stopping rule cannot be made, or is no ``StoppingRule``.
        """
        return make_stopping(self.config.stopping, self.trial.allowed_targets, self.objective)

    def sampler(self, seed: int) -> object:
        """Make a new sampler for this study.

        Raises:
            ConfigError: the sampler cannot be made.
        """
        node, allowed = self.config.search.sampler, self.trial.allowed_targets
        return make_sampler(
            node,
            allowed,
            seed=seed,
            space=self.space,
            target=self.trial.target,
            objective=self.objective,
            earlier=self.earlier,
        )


def workload_of(composed: Composed) -> str:
    """Model and data set, such as ``simple_cnn-digits``.

    For a training function of the user's own its ``_target_``.
    """
    if composed.trial.training is not None:
        return str(composed.trial.training["_target_"])
    return f"{composed.choices['model']}-{composed.choices['data']}"


def deadline_seconds(composed: Composed) -> float:
    """Wall seconds after which a training counts as hung."""
    return (
        composed.config.search.trial_deadline_seconds
        or 2 * composed.trial.target.max_train_seconds + 120
    )


def resources_of(
    config: TrialConfig, cluster: ClusterConfig, capabilities: Capabilities
) -> tuple[int, int]:
    """Numbers of CPUs and GPUs that one training takes: whole GPUs, since the training is timed."""
    num_workers = config.num_workers
    # Ray counts Intel's GPUs, too
    num_gpus = num_workers if uses_cuda(config, capabilities) or config.device == "xpu" else 0
    return num_workers * cpus_per_worker(config, cluster, capabilities), num_gpus


def unsuitable(
    config: TrialConfig, cluster: ClusterConfig, capabilities: Capabilities
) -> str | None:
    """Why a training cannot run on these machines, or not with what Ray is given of this machine.

    None if it can.
    """
    reason = unsupported(config, capabilities)
    if reason is not None or not cluster.is_local:
        return reason
    num_gpus = (
        capabilities.other_devices.get("xpu", 0)
        if config.device == "xpu"
        else capabilities.num_gpus
    )
    limits = (cluster.num_cpus, capabilities.num_cpus), (cluster.num_gpus, num_gpus)
    cpus, gpus = (found if limit is None else limit for limit, found in limits)
    shortage = ClusterSize(((cpus, gpus),)).shortage(
        config.num_workers, *resources_of(config, cluster, capabilities), cluster.placement
    )
    return None if shortage is None else f"{shortage} (cluster.num_cpus, cluster.num_gpus)"


def device_lines(config: TrialConfig, capabilities: Capabilities) -> list[str]:
    """What a training runs on and why on nothing better, and a warning of what makes the times
    of trainings incomparable.
    """
    warning = several_kinds(config, capabilities)
    return [describe_device(config, capabilities), *([warning] if warning else [])]


def plan_study(
    composer: Composer, capabilities: Capabilities, settings: StudySettings | None = None
) -> StudyPlan:
    """Plan a study and check it against the machines that it will run on.

    Args:
        settings: what ``check_settings`` made of the composer, if that was called before.

    Raises:
        AutotuneError: the study cannot be run; the message is one line.
    """
    settings = settings or check_settings(composer)
    composed = settings.composed
    config, trial = composed.config, composed.trial
    reason = unsuitable(trial, config.cluster, capabilities)
    if reason is not None:
        raise ConfigError(f"this experiment's own configuration cannot run here: {reason}")

    def why_not(point: Suggestion) -> str | None:
        return unsuitable(
            composer.compose_suggestion(point, seed=0).trial, config.cluster, capabilities
        )

    space, left_out = settings.space, []
    if space.gpu_only and not uses_cuda(trial, capabilities):
        left_out.append(f"{', '.join(sorted(space.gpu_only))}: for trainings on GPUs")
        space = space.for_cpus()
        if not space.parameters:
            where = ", ".join(dict.fromkeys(settings.space.sources.values()))
            raise SearchSpaceError(
                f"{where}: all keys are searched on GPUs only, and trainings run on the CPU;"
                " accepted is a further key"
            )
    space, uneven = _without_uneven(space, trial, *_devices(trial, config.cluster, capabilities))
    left_out += uneven
    space, dropped = _without_unsuitable(
        space, list(space.probes()) if left_out else settings.probes, why_not
    )
    objective = call(
        build_partial(config.objective, trial.allowed_targets, "objective"), "objective"
    )
    if config.search.stop_when_not_worth and not has_costs(objective):
        raise ConfigError(
            "search.stop_when_not_worth: accepted with an objective that a training spends, such as"
            " objective=time: the search's own cost is measured in it"
        )
    devices = dict.fromkeys(
        [
            trial.device,
            *(point.values.get("device", trial.device) for _, _, point in space.probes()),
        ]
    )
    check_measured(
        objective, [capabilities.device_of(replace(trial, device=device)) for device in devices]
    )
    plan = StudyPlan(
        name=settings.name,
        folder=settings.folder,
        experiment=composed.choices["experiment"],
        composer=composer,
        composed=composed,
        space=space,
        probes=tuple(
            (f"{option}={value}" if option else "", point)
            for option, value, point in space.probes()
        ),
        dropped=(*dropped, *left_out),
        baseline=space.point_of(composed.lookup),
        objective=objective,
        capabilities=capabilities,
        earlier=tuple(_earlier(config, space)),
    )
    plan.stopping()
    plan.sampler(0)
    return plan


def _earlier(config: Config, space: SearchSpace) -> Iterator[EarlierStudy]:
    """The earlier studies that ``warm_start`` names, reduced to the trials that fit the search
    space.
    """
    studies = Path(config.study.folder)
    stored = partial(stored_recording, studies=studies, storage_url=config.search.storage)
    for name, recording in earlier_recordings(
        config.warm_start, studies, config.tracking.get("uri"), stored
    ):
        yield earlier_study(name, recording, space)


def check_plan(plan: StudyPlan, check_training: Callable[[TrialConfig], None]) -> None:
    """Make the components of the baseline and of one point in each branch of the space, without
    training anything.

    Args:
        check_training: makes the components of one configuration.

    Raises:
        AutotuneError: a component cannot be made, or the data set is missing.
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
    """The plan as lines of text for the terminal: space, baseline, budget and resources."""
    config, target = plan.config, plan.trial.target
    lines = [
        f"study     {plan.name} -> {plan.folder}",
        f"target    {target}, at most {target.max_train_seconds:g} s of training a trial",
        f"objective {score_format_of(plan.objective).description}",
    ]
    lines += [
        f"first     {source.experiment} is trained, once, for {source.path}"
        for source in plan.composer.missing_sources
    ]
    lines.append("space")
    width = max(len(name) for name, _, _ in plan.space.items())
    lines += [
        f"  {name:<{width}}  {_describe_domain(domain)}" for name, _, domain in plan.space.items()
    ]
    lines += [f"  left out: {line}" for line in plan.dropped]
    values = (
        plan.baseline.as_overrides()
        if plan.baseline
        else ["as the experiment states it (outside the space)"]
    )
    lines += [f"earlier   {study.summary}" for study in plan.earlier]
    lines.append(f"baseline  {' '.join(values)}")
    limits = [f"{config.search.num_trials} trials"] if config.search.num_trials is not None else []
    limits += (
        [f"{config.search.time_budget_seconds:g} s"]
        if config.search.time_budget_seconds is not None
        else []
    )
    confirm = config.confirm
    time_limit = (
        ""
        if confirm.budget_fraction is None
        else f", within {confirm.budget_fraction:g} of the search's training time"
    )
    race = (
        f"a race of the best {confirm.num_candidates}, and its winner against the baseline: at most"
        f" {confirm.max_runs} runs{time_limit}"
    )
    lines.append(
        f"budget    {', '.join(limits)}; to confirm, {race if confirm.max_runs else 'nothing'}"
    )
    cpus, gpus = plan.resources(plan.trial)
    have = plan.capabilities
    kind = config.cluster.accelerator_type
    only = "" if kind is None else f", on machines with {kind} only"
    num_gpus = have.other_devices.get(plan.trial.device, have.num_gpus)
    lines += [f"device    {line}" for line in device_lines(plan.trial, have)]
    lines.append(
        f"resources {cpus} CPU and {gpus} GPU a trial, of {have.num_cpus} CPU and {num_gpus} GPU"
        f" ({have.device_name}){only}"
    )
    return lines


def _describe_domain(domain: Any) -> str:
    if hasattr(domain, "options"):
        return ", ".join(override_text(value) for value, _ in domain.options)
    settings = {
        key: value
        for key, value in vars(domain).items()
        if value is not None and value is not False
    }
    low, high = settings.pop("low"), settings.pop("high")
    if isinstance(domain, PowerOfTwo):
        return f"{low} to {high}, powers of two"
    shown = [
        key if value is True else f"{key} {value}"
        for key, value in settings.items()
        if not (key == "step" and value == 1)
    ]
    return ", ".join([f"{low} to {high}", *shown])


def _devices(
    trial: TrialConfig, cluster: ClusterConfig, capabilities: Capabilities
) -> tuple[int, str]:
    """How many workers of a training the devices hold that a study uses, and what they are."""
    if uses_cuda(trial, capabilities):
        return cluster.num_gpus or capabilities.num_gpus, "GPUs"
    return (cluster.num_cpus or capabilities.num_cpus) // (cluster.cpus_per_worker or 1), "CPUs"


def _without_uneven(
    space: SearchSpace, trial: TrialConfig, num_devices: int, devices: str
) -> tuple[SearchSpace, list[str]]:
    """The space without numbers of workers that leave devices idle: those that do not divide
    their number, where others do.
    """
    offered: dict[str, list[int]] = {}
    for name, value, _ in space.probes():
        if name.rpartition("/")[2] == "parallelism.num_workers" and isinstance(value, int):
            offered.setdefault(name, []).append(value)
    left_out: dict[int, None] = {}
    for name, values in offered.items():
        fitting = [value for value in values if value <= num_devices] or [min(values)]
        kept = [value for value in fitting if num_devices % value == 0] or fitting
        for value in values:
            if value not in kept and value != trial.num_workers:
                space = space.without(name, value)
                left_out[value] = None
    numbers = ", ".join(map(str, sorted(left_out)))
    return space, (
        [f"parallelism.num_workers={numbers}: accepted are divisors of the {num_devices} {devices}"]
        if left_out
        else []
    )


def _without_unsuitable(
    space: SearchSpace,
    probes: list[tuple[str, Any, Suggestion]],
    why_not: Callable[[Suggestion], str | None],
) -> tuple[SearchSpace, list[str]]:
    dropped: list[str] = []
    for name, value, point in probes:
        reason = why_not(point) if name else None
        if reason is not None and _is_to_blame(name, value, point, probes, why_not):
            space = space.without(name, value)
            dropped.append(f"{name}={override_text(value)}: {reason}")
    return space, dropped


def _is_to_blame(
    name: str,
    value: Any,
    point: Suggestion,
    probes: list[tuple[str, Any, Suggestion]],
    why_not: Callable[[Suggestion], str | None],
) -> bool:
    """Whether an option itself cannot run, rather than another choice's first option, which the
    option's probe also contains.
    """
    key = name.rpartition("/")[2]
    for other_name, other_value, other_point in probes:
        if other_name == name and other_value != value:
            values = {
                opened: point.values.get(opened, default)
                for opened, default in other_point.values.items()
            }
            swapped = replace(point, values={**values, key: other_point.values[key]})
            if why_not(swapped) is None:
                return True
    return False
