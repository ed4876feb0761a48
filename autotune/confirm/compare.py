"""Comparing given configurations: sides that run in turns, in fresh processes, as in confirmation.

A comparison has no storage to resume from, but all results are written to disk after each run.
"""

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path

from rich.console import Console

from autotune.config.build import build_partial, call
from autotune.config.compose import Composed, Composer, Source, split_overrides
from autotune.config.schema import Config, TrialConfig
from autotune.confirm.runs import Lanes, PairedRun, run_in_turns
from autotune.confirm.statistics import in_turns
from autotune.errors import AutotuneError, ClusterError, ConfigError, WorkerError
from autotune.execution.cluster import RayConnection, capabilities_of, check_can_start
from autotune.execution.interrupt import interruptible
from autotune.execution.launcher import CHECK_TRAINING, Launcher, calling
from autotune.execution.plan import (
    deadline_seconds,
    device_lines,
    resources_of,
    unsuitable,
    workload_of,
)
from autotune.execution.settings import check_budget, study_name
from autotune.execution.study_folder import log_file, shown_path, sole_user
from autotune.execution.task import TrialTask
from autotune.hiding import without_secrets
from autotune.measurement import TrialResult
from autotune.mlflow_logs import logs_folder
from autotune.objective import Objective, check_measured
from autotune.outcome import Outcome
from autotune.reporting.compared import ComparedSide, Comparison, write_comparison
from autotune.reporting.comparison_terminal import ComparisonDisplay, print_comparison
from autotune.reporting.scores import run_score, score_format_of
from autotune.search.randomness import derived_seed
from autotune.space import Suggestion
from autotune.tracking.tracker import FinishedRun, StudyInfo, TrackedTrial
from autotune.tracking.writer import TrackerWriter
from autotune.training.capabilities import Capabilities, versions
from autotune.training.sources import train_missing_sources

_SAME = ("target", "evaluate_every_samples", "objective", "cluster", "tracking", "study", "seed")
"""Configuration keys whose values must be the same for all sides."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the configurations that a comparison runs."""

    name: str
    overrides: tuple[str, ...]
    """Overrides of this side alone, beside those that all sides share."""
    composer: Composer
    composed: Composed

    @property
    def trial(self) -> TrialConfig:
        """The configuration that the side's runs train, except for the seed."""
        return self.composed.trial

    @property
    def experiment(self) -> str:
        """Name of the experiment that the side is composed from."""
        return self.composed.choices["experiment"]

    @property
    def shown(self) -> str:
        """The side's overrides for the terminal."""
        return f"[{', '.join(map(without_secrets, self.overrides))}]"


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """A checked plan of a comparison."""

    name: str
    folder: Path
    num_seeds: int
    sides: tuple[Side, ...]
    objective: Objective
    capabilities: Capabilities

    @property
    def config(self) -> Config:
        """The configuration of everything that the sides share, such as cluster and tracker."""
        return self.sides[0].composed.config

    @property
    def missing_sources(self) -> tuple[Source, ...]:
        """Experiments to train first: a side starts from their checkpoints, which do not exist
        yet.
        """
        sources = [source for side in self.sides for source in side.composer.missing_sources]
        return tuple(dict.fromkeys(sources))

    @property
    def device_lines(self) -> list[str]:
        """What the sides run on, see ``plan.device_lines``; a line each where they differ."""
        lines = (
            line for side in self.sides for line in device_lines(side.trial, self.capabilities)
        )
        return list(dict.fromkeys(lines))

    def resources(self, config: TrialConfig) -> tuple[int, int]:
        """Numbers of CPUs and whole GPUs that one run takes."""
        return resources_of(config, self.config.cluster, self.capabilities)

    def seed(self, number: int) -> int:
        """The seed that all runs of a round share; a round has one run of each side."""
        return derived_seed(self.config.study.seed, f"compare {number}")

    def comparison(self) -> Comparison:
        """The comparison before its first run."""
        return Comparison(
            name=self.name,
            experiment=" and ".join(dict.fromkeys(side.experiment for side in self.sides)),
            target=self.sides[0].trial.target,
            num_seeds=self.num_seeds,
            sides=tuple(
                ComparedSide(
                    name=side.name,
                    overrides=side.overrides,
                    config=side.trial.as_dict(),
                    objective=self.objective,
                )
                for side in self.sides
            ),
        )

    def run(self, index: int, number: int, code_folders: Sequence[str]) -> PairedRun:
        """The run of a side in a round, to be made in a fresh process."""
        side, seed = self.sides[index], self.seed(number)
        config = side.composer.compose_suggestion(Suggestion({}), seed=seed).trial
        num_cpus, num_gpus = self.resources(config)
        groups, values = split_overrides(side.composer, side.overrides)
        return PairedRun(
            arm=index,
            number=number,
            task=TrialTask(
                name=f"{side.name}-{number}",
                config=config,
                cap_seconds=math.inf,
                num_threads=num_cpus // config.num_workers,
                deadline_seconds=max(deadline_seconds(each.composed) for each in self.sides),
                code_folders=tuple(code_folders),
                working_folder=str(Path.cwd()),
                hang_folder=str(self.folder),
                logs_folder=logs_folder(self.config.tracking, self.folder),
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                placement=self.config.cluster.placement.upper(),
                accelerator_type=self.config.cluster.accelerator_type,
                score_test=True,
            ),
            tracked=TrackedTrial(
                name=f"{side.name}-{number}",
                phase="compare",
                trial=number,
                values={"side": side.name, **groups, **values},
                overrides=side.overrides,
                make_config=config.as_dict,
                seed=seed,
                started_at=0.0,
            ),
        )


def compose_sides(
    common: Sequence[str], overrides: Mapping[str, Sequence[str]], config_dirs: Sequence[str]
) -> tuple[Side, ...]:
    """Compose the configurations of all sides and check that they can be compared.

    Args:
        common: overrides that all sides share.
        overrides: overrides of each side alone, by the side's name.

    Raises:
        ConfigError: a side cannot be composed, or two cannot be compared; the message names them.
    """
    sides = [
        _composed(name, [*common, *each], each, config_dirs) for name, each in overrides.items()
    ]
    for one, other in itertools.combinations(sides, 2):
        if key := next(
            (key for key in _SAME if one.composed.plain[key] != other.composed.plain[key]), None
        ):
            names = f"{one.name} and {other.name}"
            raise ConfigError(f"{key}: {names} differ in it; set it for both, beside {names}")
        if one.trial == other.trial:
            raise ConfigError(
                f"{one.name} and {other.name}: {one.shown} and {other.shown} are the same"
                " configuration"
            )
    return tuple(sides)


def _composed(
    name: str, overrides: Sequence[str], own: Sequence[str], config_dirs: Sequence[str]
) -> Side:
    try:
        composer = Composer(overrides, config_dirs)
        composer.refuse_sweeps()
        composed = composer.compose()
        _ = composed.trial  # checks it
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return Side(name=name, overrides=tuple(own), composer=composer, composed=composed)


def plan_comparison(
    sides: tuple[Side, ...], *, num_seeds: int, launcher: Launcher | None = None
) -> ComparisonPlan:
    """Plan the runs of the sides and check the settings and machines that they need.

    Args:
        launcher: what finds out what this machine has, in place of this process, which would
            then hold memory of its GPU.

    Raises:
        AutotuneError: these machines cannot run a side, or a setting has a value that is refused.
    """
    config, trial = sides[0].composed.config, sides[0].trial
    capabilities = capabilities_of(config.cluster, launcher)
    check_budget(config)
    for side in sides:
        if (reason := unsuitable(side.trial, config.cluster, capabilities)) is not None:
            raise ConfigError(f"{side.name}: cannot run here: {reason}")
    experiments = "-and-".join(dict.fromkeys(side.experiment for side in sides))
    name = study_name(config, f"compare-{experiments}")
    folder = (Path(config.study.folder) / name).absolute()
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"study.name: {folder} holds files already; give another name, or none")
    objective = call(
        build_partial(config.objective, trial.allowed_targets, "objective"), "objective"
    )
    check_measured(objective, [capabilities.device_of(side.trial) for side in sides])
    return ComparisonPlan(
        name=name,
        folder=folder,
        num_seeds=num_seeds,
        sides=sides,
        objective=objective,
        capabilities=capabilities,
    )


def check_comparison(
    plan: ComparisonPlan, say: Callable[[str], None], launcher: Launcher | None
) -> None:
    """Train the checkpoints that sides start from, then make the components of every side once.

    Args:
        say: called with a line of text when a checkpoint is trained.
        launcher: what makes the components, in place of this process.

    Raises:
        AutotuneError: a component cannot be made, data is missing, or a checkpoint cannot be
            trained.
    """
    with calling(launcher) as call_there:
        for side in plan.sides:
            try:
                train_missing_sources(side.composer, say)
                if plan.config.cluster.is_local:  # a remote cluster may have data that is not here
                    call_there(CHECK_TRAINING, side.trial)
            except AutotuneError as error:
                raise type(error)(f"{side.name}: {error}") from error


def describe_comparison(plan: ComparisonPlan) -> list[str]:
    """The plan as lines of text for the terminal: sides, target, runs and resources."""
    target, machines = plan.sides[0].trial.target, plan.capabilities
    lines = [
        f"comparison {plan.name} -> {plan.folder}",
        f"target     {target}, at most {target.max_train_seconds:g} s of training a run",
    ]
    for side in plan.sides:
        cpus, gpus = plan.resources(side.trial)
        lines.append(f"{side.name:<10} {side.shown}: {cpus} CPU and {gpus} GPU a run")
    return [
        *lines,
        f"runs       {plan.num_seeds} of each side, in turns, each in a fresh process",
        *(f"first      {each.experiment} is trained, once" for each in plan.missing_sources),
        f"machines   {machines.num_cpus} CPU and {machines.num_gpus} GPU ({machines.device_name})",
        *(f"device     {line}" for line in plan.device_lines),
    ]


def run_comparison(
    plan: ComparisonPlan,
    *,
    command: Sequence[str],
    code_folders: Sequence[str],
    console: Console,
    launcher: Launcher | None = None,
) -> Comparison:
    """Run a planned comparison, then write, track and print its result.

    The first Ctrl-C ends the comparison without a further run, and the runs so far are reported.

    Args:
        command: command-line arguments that started the comparison, kept in its files.
        code_folders: folders that may hold Python modules of the user's own.
        launcher: the driver's own launcher, for runs on this machine.

    Raises:
        AutotuneError: the comparison cannot be run; the message is one line.
        WorkerError: several runs of a side in a row failed in the user's own code.
    """
    comparison = plan.comparison()
    facts = {
        "command": list(map(without_secrets, command)),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
    }

    def write() -> list[Path]:
        runs = [run for side in comparison.sides for run in side.runs.values()]
        device = next((run.fingerprint.get("device") for run in runs if run.fingerprint), None)
        return write_comparison(plan.folder, comparison, {**facts, "device": device})

    with interruptible() as interrupt, _opened(plan, comparison, console) as tracker:
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C ends the runs at once
            _make_runs(plan, comparison, tracker, interrupt, write, code_folders, console, launcher)
        # Plotly
        from autotune.reporting.comparison_charts import comparison_charts  # noqa: PLC0415
        from autotune.reporting.drawing import write_charts  # noqa: PLC0415  # Plotly

        figures = write_charts(plan.folder / "figures", comparison_charts(comparison))
        tracker.close(
            status="FINISHED" if comparison.is_complete else "KILLED",
            metrics=_metrics(comparison),
            tags={},
            artifacts=[*write(), *figures],
        )
    print_comparison(console, comparison, folder=shown_path(plan.folder))
    return comparison


def _metrics(comparison: Comparison) -> dict[str, float]:
    """The comparison's metrics for a tracker, such as ``b_time_to_target_ratio``."""
    metrics: dict[str, float] = {}
    for side in comparison.sides[1:]:
        for name, ratio in comparison.ratios(side).items():
            if ratio is not None:
                prefix = f"{side.name}_{name}_ratio"
                metrics |= {prefix: ratio.ratio, f"{prefix}_low": ratio.low}
                metrics |= {f"{prefix}_high": ratio.high}
    return metrics


def _make_runs(
    plan: ComparisonPlan,
    comparison: Comparison,
    tracker: TrackerWriter,
    interrupt: threading.Event,
    write: Callable[[], object],
    code_folders: Sequence[str],
    console: Console,
    launcher: Launcher | None,
) -> None:
    """Make the runs of all sides in turns, and add each to the comparison as soon as it has
    ended.
    """
    connection = RayConnection(plan.config.cluster)
    with contextlib.closing(connection), contextlib.ExitStack() as stack:
        with console.status("starting Ray"):
            size = connection.size(interrupt)
            for side in plan.sides:
                what, workers = f"a run of {side.name}", side.trial.num_workers
                resources = plan.resources(side.trial)
                check_can_start(what, size, plan.config.cluster, workers, *resources)
            tracker.wait()
        display = ComparisonDisplay(comparison, console)
        stack.enter_context(display.status)
        for line in plan.device_lines:
            console.print(f"  device: {line}", markup=False, highlight=False, soft_wrap=True)
        first_runs = [plan.run(index, 0, code_folders) for index in range(len(plan.sides))]
        lanes = Lanes.of([run.task for run in first_runs], plan.capabilities)

        def batches() -> Iterator[list[list[PairedRun]]]:
            turns = in_turns(len(plan.sides), plan.num_seeds)
            rounds = itertools.groupby(turns, key=itemgetter(1))
            units = ([run(*turn) for turn in turns] for _, turns in rounds)
            while batch := list(itertools.islice(units, lanes.number)):
                yield batch

        def run(index: int, number: int) -> PairedRun:
            started = partial(display.run_started, comparison.sides[index], plan.seed(number))
            made = plan.run(index, number, code_folders)
            return replace(made, on_start=started, on_evaluation=display.evaluated)

        def on_end(run: PairedRun, result: TrialResult) -> None:
            side = comparison.sides[run.arm]
            side.runs[run.number] = result
            display.run_finished(side, run.number)
            write()
            check_failures(side, plan.config.search.max_errors_in_a_row)

        def make() -> None:
            run_in_turns(
                batches(),
                lanes=lanes,
                size=size,
                tracker=tracker,
                objective=plan.objective,
                interrupt=interrupt,
                max_retakes=plan.config.search.max_retakes,
                check_ray=connection.check,
                launcher=launcher,
                on_end=on_end,
            )

        try:
            connection.run(make, interrupt)
        except ClusterError as error:
            if not connection.is_lost:
                raise
            tracker.close_if_open(is_interrupt=False)  # before the connection, which may hang now
            kept = f"the runs so far are in {shown_path(plan.folder)}"
            raise ClusterError(f"{error}; {kept}") from error


def check_failures(side: ComparedSide, max_errors_in_a_row: int) -> None:
    """End a comparison in which further runs of a side would only fail again.

    Raises:
        ConfigError: the last run of the side was INVALID: its components could not be made.
        WorkerError: several runs of the side in a row failed in the code they train.
    """
    runs = list(side.runs.values())[-max_errors_in_a_row:]
    if runs[-1].outcome is Outcome.INVALID:
        raise ConfigError(f"{side.name}: {runs[-1].error_line}")
    if len(runs) == max_errors_in_a_row and all(run.outcome is Outcome.ERRORED for run in runs):
        what = f"{len(runs)} runs of side {side.name} in a row failed in the code they train"
        raise WorkerError(f"{what}; the first:", runs[0].error or "")


@contextlib.contextmanager
def _opened(
    plan: ComparisonPlan, comparison: Comparison, console: Console
) -> Iterator[TrackerWriter]:
    """Lock the plan's folder and open its tracker, which is closed if the context ends by an
    error.
    """
    with sole_user(plan.folder), log_file(plan.folder / "autotune.log"):
        tracker = TrackerWriter(
            plan.config.tracking,
            plan.sides[0].trial.allowed_targets,
            make_info=partial(_tracker_info, plan),
            ended=partial(_ended_runs, plan, comparison),
            say=lambda line: console.print(
                without_secrets(line), markup=False, highlight=False, soft_wrap=True
            ),
        )
        try:
            yield tracker
        except BaseException as error:
            tracker.close_if_open(is_interrupt=isinstance(error, KeyboardInterrupt))
            raise


def _tracker_info(plan: ComparisonPlan) -> StudyInfo:
    first, experiment = plan.sides[0], plan.comparison().experiment
    target = first.trial.target
    return StudyInfo(
        name=plan.name,
        kind="comparison",
        workload=workload_of(first.composed),
        experiment=experiment,
        folder=str(plan.folder),
        settings={
            "experiment": experiment,
            "target": f"{target.metric} {target.value:g}",
            "max_train_seconds": target.max_train_seconds,
            "objective": plan.config.objective["_target_"].rpartition(".")[2],
            "score": score_format_of(plan.objective).description,
            "num_seeds": plan.num_seeds,
            "seed": plan.config.study.seed,
            **{side.name: " ".join(side.overrides) for side in plan.sides},
        },
        tags={"autotune.device": plan.capabilities.device_name},
    )


def _ended_runs(plan: ComparisonPlan, comparison: Comparison) -> list[FinishedRun]:
    runs = []
    for index, side in enumerate(comparison.sides):
        for number, result in side.runs.items():
            tracked = replace(plan.run(index, number, ()).tracked, started_at=result.started_at)
            scored = run_score(result, plan.objective)
            runs.append((tracked, result, scored.score if scored.reached else None))
    return runs
