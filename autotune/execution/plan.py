"""The plan of a study, complete and checked before a device is used: search space, baseline,
budget and resources.
"""

import json
import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from autotune.config.build import build_partial, call
from autotune.config.command_line import Interrupt
from autotune.config.compose import Composed, Composer
from autotune.config.schema import Config, TrialConfig
from autotune.config.space_files import check_space, read_search_space
from autotune.errors import ConfigError, InvalidTrialError, SearchSpaceError
from autotune.execution.cluster import ClusterSize
from autotune.execution.settings import check_limits, study_name
from autotune.execution.task import TrialTask
from autotune.files import NOTICE_FILE, STATES_FOLDER, make_folder, replace_file
from autotune.mlflow_logs import logs_folder
from autotune.objective import Objective, check_measured
from autotune.redaction import without_secrets, without_secrets_in
from autotune.reporting.scores import ScoreFormat, score_format_of
from autotune.search.outlook import has_costs
from autotune.search.samplers import make_sampler
from autotune.search.stopping import StoppingRule, make_stopping
from autotune.search.study import earlier_recording
from autotune.search.warm_start import EarlierStudy, earlier_study
from autotune.space import Choice, PowerOfTwo, SearchSpace, Suggestion, override_text
from autotune.tracking.tracker import StudyInfo
from autotune.training.capabilities import (
    Capabilities,
    cpus_per_worker,
    describe_device,
    several_kinds,
    unsupported,
    uses_cuda,
)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What the plans of a study and of a comparison have in common: the settings and machines of
    all their trainings.
    """

    name: str
    experiment: str
    folder: Path
    composed: Composed
    """The experiment's own configuration; of a comparison, the first one."""
    objective: Objective
    capabilities: Capabilities
    code_folders: tuple[str, ...] = ()
    """Folders that may hold Python modules of the user's own."""
    command: tuple[str, ...] = ()
    """Command-line arguments that the study or comparison was started with."""
    trials_per_gpu: int = 1
    """Number of trainings that share a GPU."""

    def for_search(self) -> Self:
        """The plan of the trials of a search, which share GPUs if they are to."""
        is_on_gpus = uses_cuda(self.trial, self.capabilities)
        return replace(self, trials_per_gpu=self.config.cluster.trials_per_gpu if is_on_gpus else 1)

    @property
    def config(self) -> Config:
        """The whole configuration."""
        return self.composed.config

    @property
    def trial(self) -> TrialConfig:
        """The configuration that is trained, except for what varies."""
        return self.composed.trial

    @property
    def score_format(self) -> ScoreFormat:
        """The format of the objective's scores."""
        return score_format_of(self.objective)

    @property
    def may_grow(self) -> bool:
        """Whether the cluster may get machines when it is asked for more than it has, since so
        many trials at once were asked for.
        """
        return (
            not self.config.cluster.is_local
            and self.config.search.max_concurrent_trials is not None
        )

    def device_lines(self, *configs: TrialConfig) -> list[str]:
        """What trainings run on and why on nothing better, a line each where that differs, and a
        warning of what makes their times incomparable.
        """
        lines = [describe_device(config, self.capabilities) for config in configs]
        kinds = [several_kinds(config, self.capabilities) for config in configs]
        return list(dict.fromkeys(filter(None, lines + kinds)))

    def num_threads(self, config: TrialConfig) -> int:
        """Number of CPU threads of each worker, unless the trial's configuration sets one."""
        num_cpus = cpus_per_worker(config, self.config.cluster, self.capabilities)
        return max(1, num_cpus // self.trials_per_gpu)

    def resources(self, config: TrialConfig) -> tuple[int, int]:
        """Numbers of CPUs and GPUs that one training takes, or shares with others."""
        num_gpus = config.num_workers * uses_cuda(config, self.capabilities)
        return config.num_workers * self.num_threads(config), num_gpus

    def placed(self, config: TrialConfig) -> tuple[int, int, int, str]:
        """What ``ClusterSize.shortage`` takes of one training."""
        return config.num_workers, *self.resources(config), self.config.cluster.placement

    def unsuitable(self, config: TrialConfig) -> str | None:
        """Why one training cannot run on these machines, or not with what Ray is given of this
        machine.

        None if it can.
        """
        cluster, have = self.config.cluster, self.capabilities
        reason = unsupported(config, have)
        if reason is None and config.num_workers > 1 and self.trials_per_gpu > 1:
            reason = (
                f"{config.num_workers} devices (parallelism.num_workers) need whole GPUs, and"
                f" cluster.trials_per_gpu={self.trials_per_gpu} shares them"
            )
        if reason is not None or not cluster.is_local:
            return reason
        cpus = have.num_cpus if cluster.num_cpus is None else cluster.num_cpus
        gpus = have.num_gpus if cluster.num_gpus is None else cluster.num_gpus
        shortage = ClusterSize(((cpus, gpus * self.trials_per_gpu),)).shortage(
            config.num_workers, *self.resources(config), cluster.placement
        )
        return None if shortage is None else f"{shortage} (cluster.num_cpus, cluster.num_gpus)"

    def task(
        self,
        name: str,
        config: TrialConfig,
        cap_seconds: float = math.inf,
        **fields: Any,
    ) -> TrialTask:
        """The task that a worker needs to run one training."""
        num_cpus, num_gpus = self.resources(config)
        fixed_seconds = self.config.search.trial_deadline_seconds
        every_minutes = self.config.checkpoint.every_minutes
        return TrialTask(
            name=name,
            config=config,
            cap_seconds=cap_seconds,
            num_threads=num_cpus // config.num_workers,
            deadline_seconds=fixed_seconds or 2 * config.target.max_train_seconds + 120,
            is_deadline_fixed=fixed_seconds is not None,
            code_folders=self.code_folders,
            working_folder=str(Path.cwd()),
            hang_folder=str(self.folder),
            logs_folder=logs_folder(self.config.tracking, self.folder),
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            trials_per_gpu=self.trials_per_gpu,
            placement=self.config.cluster.placement.upper(),
            accelerator_type=self.config.cluster.accelerator_type,
            state_folder=str(self.state_folder(name)),
            checkpoint_seconds=math.inf if every_minutes is None else 60 * every_minutes,
            **fields,
        )

    def state_folder(self, run: str) -> Path:
        """Folder for the states of a run that has not ended, by its name."""
        return self.folder / STATES_FOLDER / run

    @contextmanager
    def saved_on_notice(self, interrupt: Interrupt) -> Iterator[None]:
        """Context in which trainings that this study runs are saved before it ends because of a
        signal.
        """
        states = make_folder(self.folder / STATES_FOLDER)
        notice = states / NOTICE_FILE
        notice.unlink(missing_ok=True)
        try:
            with interrupt.saving(
                self.config.cluster.notice_seconds, lambda: replace_file(notice, "")
            ):
                yield
        finally:
            notice.unlink(missing_ok=True)
            self.save_on_hosts(())
            with suppress(OSError):  # it has states
                states.rmdir()

    def save_on_hosts(self, hosts: Collection[str]) -> None:
        """Have trainings saved that run on the machines with these addresses, and on no others."""
        states = self.folder / STATES_FOLDER
        notices = {states / f"{NOTICE_FILE}-{host}" for host in hosts}
        for other in {*states.glob(f"{NOTICE_FILE}-*")} - notices:
            other.unlink(missing_ok=True)
        for notice in notices:
            replace_file(notice, "")

    def resume_command(self) -> str:
        """Command line that continues the study or comparison, without passwords."""
        return self.command_line()

    def definition(self) -> dict[str, Any]:
        """Settings that must be equal for two commands to mean the same study or comparison, as
        plain JSON.
        """
        raise NotImplementedError

    def command_line(
        self, subcommand: Sequence[str] = (), replaced: Mapping[str, object] | None = None
    ) -> str:
        """Command line that resumes the study or comparison, without passwords.

        Args:
            subcommand: what comes before its arguments, such as ``compare``.
            replaced: values of keys that the command line sets anew.
        """
        values = {"study.name": self.name, **(replaced or {})}
        kept = [
            without_secrets(argument)
            for argument in self.command
            if argument.partition("=")[0] not in {*values, "dry_run"}
        ]
        pairs = [f"{key}={value}" for key, value in values.items()]
        return shlex.join(["python", "-m", "autotune", *subcommand, *kept, *pairs])

    def _definition(self, **content: Any) -> dict[str, Any]:
        """A definition, as plain JSON, with what those of studies and comparisons share."""
        shared = {"objective": self.composed.plain["objective"], "seed": self.config.study.seed}
        content = {"experiment": self.experiment, **content, **shared}
        return dict(json.loads(json.dumps(without_secrets_in(content), default=str)))

    def settings(self) -> dict[str, object]:
        """What is trained to which target and scored how, in a few words for people."""
        target = self.trial.target
        return {
            "experiment": self.experiment,
            "target": f"{target.metric} {target.value:g}",
            "max_train_seconds": target.max_train_seconds,
            "objective": self.config.objective["_target_"].rpartition(".")[2],
            "score": self.score_format.description,
            "seed": self.config.study.seed,
        }

    def tracker_info(self, kind: str, **fields: Any) -> StudyInfo:
        """Facts for the tracker; ``kind`` is ``study`` or ``comparison``."""
        own = self.trial.training
        return StudyInfo(
            name=self.name,
            kind=kind,
            workload="{model}-{data}".format_map(self.composed.choices)
            if own is None
            else str(own["_target_"]),
            experiment=self.experiment,
            folder=str(self.folder),
            settings=self.settings(),
            tags={"autotune.device": self.capabilities.device_name},
            **fields,
        )


@dataclass(frozen=True, kw_only=True)
class StudyPlan(TrainingPlan):
    """A checked plan of a study."""

    composer: Composer
    space: SearchSpace
    """The search space without the options that these machines cannot run."""
    dropped: tuple[str, ...] = ()
    """A line for each option that was removed from the space, with the reason."""
    earlier: tuple[EarlierStudy, ...] = ()
    """Earlier studies that this one learns from."""

    @property
    def baseline(self) -> Suggestion | None:
        """The experiment's own configuration as a point of the space.

        None if the space does not contain it.
        """
        return self.space.point_of(self.composed.lookup)

    @property
    def further_command(self) -> str:
        """Command line that continues the search with twice the budget."""
        search, doubled = self.config.search, dict[str, object]()
        if search.num_trials is not None:
            doubled["search.num_trials"] = 2 * search.num_trials
        if search.time_budget_seconds is not None:
            doubled["search.time_budget_seconds"] = f"{2 * search.time_budget_seconds:g}"
        return self.command_line(replaced=doubled)

    def settings(self) -> dict[str, object]:
        """What the study searches for and how, in a few words for people."""
        config = self.config
        return {
            **super().settings(),
            "sampler": config.search.sampler["_target_"].rpartition(".")[2],
            "stopping": config.stopping["_target_"].rpartition(".")[2],
            "num_trials": config.search.num_trials,
            "time_budget_seconds": config.search.time_budget_seconds,
        }

    def definition(self) -> dict[str, Any]:
        """Settings that must be equal for two commands to mean the same study, as plain JSON."""
        return self._definition(
            configuration=defining(self.trial.as_dict()), search_space=self.space.as_mapping()
        )

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
        return make_sampler(
            self.config.search.sampler,
            self.trial.allowed_targets,
            seed=seed,
            space=self.space,
            target=self.trial.target,
            objective=self.objective,
            earlier=self.earlier,
        )


def defining(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a training's configuration that a definition has: what no run changes."""
    return {key: config[key] for key in config if key not in ("seed", "allowed_targets")}


def plan_study(
    composer: Composer,
    capabilities: Capabilities,
    *,
    code_folders: Sequence[str] = (),
    command: Sequence[str] = (),
) -> StudyPlan:
    """Plan a study and check it against the machines that it will run on.

    Args:
        code_folders: folders that may hold Python modules of the user's own.
        command: command-line arguments that started the study, from which the command that resumes
            it is made.

    Raises:
        AutotuneError: the study cannot be run; the message is one line.
    """
    composed = composer.compose()
    config, trial = composed.config, composed.trial
    if not config.search_space and not composer.sweeps:
        raise ConfigError(
            "search_space: the experiment has none; give a list of files, or sweeps such as"
            " optimizer.lr=interval(1e-3,1)"
        )
    check_limits(config)
    name = study_name(config, composed.choices["experiment"])
    space = read_search_space(config.search_space, composer)
    check_space(space, composer)
    studies = Path(config.study.folder)
    plan = StudyPlan(
        name=name,
        experiment=composed.choices["experiment"],
        folder=(studies / name).absolute(),
        composed=composed,
        objective=call(
            build_partial(config.objective, trial.allowed_targets, "objective"), "objective"
        ),
        capabilities=capabilities,
        code_folders=tuple(code_folders),
        command=tuple(command),
        composer=composer,
        space=space,
    )
    if (reason := plan.for_search().unsuitable(trial)) is not None:
        raise ConfigError(f"this experiment's own configuration cannot run here: {reason}")
    space, dropped = _suitable_space(plan.for_search())
    if config.search.expected_trainings is not None and not has_costs(plan.objective):
        raise ConfigError(
            "search.expected_trainings: needs an objective that a training spends, such as"
            " objective=time: the search's own cost is measured in it"
        )
    devices = {point.values.get("device", trial.device) for _, _, point in space.probes()}
    check_measured(
        plan.objective,
        [capabilities.device_of(replace(trial, device=device)) for device in sorted(devices)],
    )
    earlier = [
        earlier_recording(entry, studies=studies, storage_url=config.search.storage)
        for entry in config.warm_start
    ]
    plan = replace(
        plan,
        space=space,
        dropped=tuple(dropped),
        earlier=tuple(earlier_study(name, recording, space) for name, recording in earlier),
    )
    plan.stopping()
    plan.sampler(0)
    return plan


def check_plan(plan: StudyPlan, check_training: Callable[[TrialConfig], None]) -> None:
    """Make the components of the baseline and of one point in each branch of the space, without
    training anything.

    Args:
        check_training: makes the components of one configuration.

    Raises:
        AutotuneError: a component cannot be made, or the data set is missing.
    """
    check_training(plan.trial)
    for option, value, point in plan.space.probes():
        try:
            check_training(plan.composer.compose_suggestion(point, seed=0).trial)
        except InvalidTrialError:
            raise
        except ConfigError as error:
            opened = f"{option}={value}: " if option else ""
            raise SearchSpaceError(f"{plan.space.source}: {opened}{error}") from error


def describe_plan(plan: StudyPlan) -> list[str]:
    """The plan as lines of text for the terminal: space, baseline, budget and resources."""
    search, confirm, target = plan.config.search, plan.config.confirm, plan.trial.target
    have, kind = plan.capabilities, plan.config.cluster.accelerator_type
    limits = [] if search.num_trials is None else [f"{search.num_trials} trials"]
    if search.time_budget_seconds is not None:
        limits.append(f"{search.time_budget_seconds:g} s")
    cpus, gpus = plan.for_search().resources(plan.trial)
    share = f"1/{n}" if (n := plan.for_search().trials_per_gpu) > 1 else gpus
    baseline = plan.baseline and " ".join(plan.baseline.as_overrides())
    width = max(len(name) for name, *_ in plan.space.walk())
    return [
        f"study     {plan.name} -> {plan.folder}",
        f"target    {target}, at most {target.max_train_seconds:g} s of training a trial",
        f"objective {plan.score_format.description}",
        *(
            f"first     {source.experiment} is trained, once, for {source.path}"
            for source in plan.composer.missing_sources
        ),
        "space",
        *(
            f"  {name:<{width}}  {_describe_domain(domain)}"
            for name, _, domain, _ in plan.space.walk()
        ),
        *(f"  left out: {line}" for line in plan.dropped),
        *(f"earlier   {study.summary}" for study in plan.earlier),
        f"baseline  {baseline or 'as the experiment states it (outside the space)'}",
        f"budget    {', '.join(limits)}; to confirm, at most {confirm.max_runs} runs of the best"
        f" {confirm.num_candidates} and the baseline",
        *(f"device    {line}" for line in plan.device_lines(plan.trial)),
        f"resources {cpus} CPU and {share} GPU a trial, of {have.num_cpus} CPU and"
        f" {have.num_gpus} GPU ({have.device_name})"
        f"{f', on machines with {kind} only' if kind else ''}",
    ]


def _describe_domain(domain: Any) -> str:
    """The options of a choice, or the ends of a range and how it is divided."""
    if isinstance(domain, Choice):
        return ", ".join(override_text(value) for value, _ in domain.options)
    scale = ", powers of two" if isinstance(domain, PowerOfTwo) else ", log" if domain.log else ""
    return f"{domain.low} to {domain.high}{scale}"


def _suitable_space(plan: StudyPlan) -> tuple[SearchSpace, list[str]]:
    """The space without what these machines cannot run, and a line on each such option.

    Raises:
        SearchSpaceError: nothing is left of the space, or of a choice.
    """
    trial, cluster, have = plan.trial, plan.config.cluster, plan.capabilities
    space, left_out, on_gpus = plan.space, list[str](), uses_cuda(trial, have)
    if space.gpu_only and not on_gpus:
        left_out.append(f"{', '.join(sorted(space.gpu_only))}: for trainings on GPUs")
        where, space = space.source, space.for_cpus()
        if not space.parameters:
            raise SearchSpaceError(
                f"{where}: all keys are searched on GPUs only, and trainings run on the CPU;"
                " search a further key"
            )
    num_devices = (cluster.num_cpus or have.num_cpus) // (cluster.cpus_per_worker or 1)
    if on_gpus:
        num_devices = cluster.num_gpus or have.num_gpus
    space, uneven = _without_uneven(space, trial.num_workers, num_devices)
    if uneven:
        left_out.append(
            f"parallelism.num_workers={', '.join(map(str, uneven))}: do not divide the"
            f" {num_devices} {'GPUs' if on_gpus else 'CPUs'}"
        )
    dropped = []

    def why_not(point: Suggestion) -> str | None:
        return plan.unsuitable(plan.composer.compose_suggestion(point, seed=0).trial)

    for name, value, point in list(space.probes()):
        # without the point's other values, of which one may be to blame
        branch = [part.partition("=")[0] for part in name.split("/")]
        option = {key: point.values[key] for key in branch if key in point.values}
        outer = {key: option[key] for key in branch[:-1] if key in option}
        reason = why_not(point) if name else None
        if reason and why_not(Suggestion(option)) and not why_not(Suggestion(outer)):
            space = space.without(name, value)
            dropped.append(f"{name}={override_text(value)}: {reason}")
    return space, dropped + left_out


def _without_uneven(
    space: SearchSpace, own: int, num_devices: int
) -> tuple[SearchSpace, list[int]]:
    """The space without numbers of workers that leave devices idle: those that do not divide
    their number, where others do.

    Args:
        own: the experiment's own number of workers, which stays.
    """
    offered: dict[str, list[int]] = {}
    for name, value, _ in space.probes():
        if name.rpartition("/")[2] == "parallelism.num_workers" and isinstance(value, int):
            offered.setdefault(name, []).append(value)
    left_out = set[int]()
    for name, values in offered.items():
        fitting = [value for value in values if value <= num_devices] or [min(values)]
        kept = [value for value in fitting if num_devices % value == 0] or fitting
        for value in set(values) - {*kept, own}:
            space = space.without(name, value)
            left_out.add(value)
    return space, sorted(left_out)
