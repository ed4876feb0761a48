"""Comparing given configurations: they run in turns, in fresh processes, as in confirmation.

Runs that ended are kept in a storage like a study's, so the same command continues a comparison
wherever an earlier process stopped, and all its files are derived from the storage.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from autotune.config.build import build_partial, call
from autotune.config.command_line import EXIT_AGAIN, Interrupt
from autotune.config.compose import Composed, Composer
from autotune.config.schema import TrialConfig
from autotune.confirm.statistics import in_turns
from autotune.confirm.turns import Turns, compiled_anew, num_side_by_side, quiet
from autotune.errors import AutotuneError, ConfigError, StudyError, WorkerError
from autotune.execution.cluster import RaySession, capabilities_of
from autotune.execution.launcher import CHECK_TRAINING, Launcher, calling
from autotune.execution.live_study import closing_tracker, open_folder, say, say_interrupted
from autotune.execution.plan import TrainingPlan, defining
from autotune.execution.settings import check_limits, study_name
from autotune.execution.study_folder import shown_path
from autotune.execution.task import TrialTask
from autotune.execution.trial_manager import TrialManager
from autotune.measurement import TrialResult
from autotune.objective import check_measured
from autotune.outcome import Outcome
from autotune.policy import COMPARE, Run
from autotune.redaction import without_secrets
from autotune.reporting.comparison import (
    RESULTS,
    Compared,
    Comparison,
    verdict,
    write_comparison,
)
from autotune.reporting.runs_terminal import RunsDisplay, print_comparison
from autotune.reporting.scores import describe_scores
from autotune.search.points import derived_seed
from autotune.search.study import Study, confirmations, store_confirmation
from autotune.space import Suggestion
from autotune.tracking.tracker import FinishedRun, StudyEnd
from autotune.tracking.writer import TrackerWriter
from autotune.training.capabilities import versions
from autotune.training.sources import train_missing_sources

logger = logging.getLogger(__name__)

_SAME = ("target", "evaluate_every_samples", "objective", "cluster", "tracking", "study", "seed")
"""Configuration keys whose values must be the same for all configurations."""
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


@dataclass(frozen=True, kw_only=True)
class Candidate(Compared):
    """One of the configurations that a comparison runs, with what its runs are composed from."""

    composer: Composer
    composed: Composed

    @property
    def trial(self) -> TrialConfig:
        """The configuration that the runs train, except for the seed."""
        return self.composed.trial

    @property
    def experiment(self) -> str:
        """Name of the experiment that the configuration is composed from."""
        return self.composed.choices["experiment"]


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan(Comparison, TrainingPlan):
    """A checked plan of a comparison, which becomes its result as runs end."""

    configurations: tuple[Candidate, ...]

    def run(self, index: int, number: int) -> Run:
        """The run of a configuration in a round, whose runs share a seed."""
        each = self.configurations[index]
        values = {"side": each.name, **each.composed.values_of(each.overrides)}
        return Run(
            number=number * len(self.configurations) + index,
            name=f"{each.name}-{number}",
            suggestion=Suggestion(values),
            overrides=each.overrides,
            seed=derived_seed(self.config.study.seed, f"compare {number}"),
            phase=COMPARE,
            trial=number,
            round=number,
            may_have_begun=True,
        )

    def index(self, run: Run) -> int:
        """Index of the configuration that a run trains."""
        return run.number % len(self.configurations)

    def configuration(self, run: Run) -> Candidate:
        """The configuration that a run trains."""
        return self.configurations[self.index(run)]

    def run_task(self, run: Run, **fields: Any) -> TrialTask:
        """The task of a worker that makes a run."""
        composed = self.configuration(run).composer.compose_suggestion(
            Suggestion({}), seed=run.seed
        )
        return self.task(run.name, composed.trial, score_test=True, **fields)

    def definition(self) -> dict[str, Any]:
        """Settings that must be equal for two commands to mean the same comparison, as plain
        JSON.
        """
        return self._definition(
            names=" ".join(each.name for each in self.configurations),
            configurations={each.name: defining(each.config) for each in self.configurations},
        )

    def resume_command(self) -> str:
        """Command line that continues the comparison, without passwords."""
        return self.command_line(["compare"])

    def ended_runs(self) -> list[FinishedRun]:
        """The runs that have ended, as a tracker knows them."""
        return [
            (
                self._ended_run(self.run(index, number), result),
                result,
                score.score if score.reached else None,
            )
            for index, each in enumerate(self.configurations)
            for number, score in each.scores.items()
            for result in (each.runs[number],)
        ]

    def _ended_run(self, run: Run, result: TrialResult) -> Run:
        def make_config() -> dict[str, Any]:
            return self.run_task(run).config.as_dict()

        return replace(run, make_config=make_config, started_at=result.started_at)

    def settings(self) -> dict[str, object]:
        """What is compared and how, in a few words for people."""
        overrides = {each.name: " ".join(each.overrides) for each in self.configurations}
        return {**super().settings(), "num_seeds": self.num_seeds, **overrides}

    def metrics(self) -> dict[str, float]:
        """The comparison's metrics for a tracker, such as ``b_time_to_target_ratio``."""
        return {
            f"{each.name}_{name}_ratio{end}": value
            for each in self.configurations[1:]
            for name, ratio in self.ratios(each).items()
            if ratio is not None
            for end, value in (("", ratio.ratio), ("_low", ratio.low), ("_high", ratio.high))
        }

    def write(self) -> list[Path]:
        """Write the files with all runs so far, and return their paths."""
        runs = [run for each in self.configurations for run in each.runs.values()]
        device = next((run.fingerprint.get("device") for run in runs if run.fingerprint), None)
        ended_at = max((run.stopped_at for run in runs), default=None)
        facts = {
            "command": list(map(without_secrets, self.command)),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(ended_at)),
            "versions": versions(),
            "device": device,
        }
        return write_comparison(self.folder, self, facts)

    def draw(self) -> list[Path]:
        """Write the chart of all runs, and return its path."""
        from autotune.reporting import drawing  # noqa: PLC0415  # Plotly

        verdicts = "; ".join(verdict(self, each) for each in self.configurations[1:])
        words = "; ".join(
            f"{each.summary.label}: {describe_scores(each.summary)}" for each in self.configurations
        )
        chart = drawing.runs_chart(
            "comparison",
            [each.summary for each in self.configurations],
            _COLOURS,
            f"{verdicts}. {self.experiment} to {drawing.target_label(self.target)}: {words}.",
        )
        return drawing.write_charts(self.folder / "figures", [chart])


def compose_configurations(
    common: Sequence[str], overrides: Mapping[str, Sequence[str]], config_dirs: Sequence[str]
) -> tuple[Candidate, ...]:
    """Compose all configurations and check that they can be compared.

    Args:
        common: overrides that all configurations share.
        overrides: overrides of each one alone, by its name.

    Raises:
        ConfigError: one cannot be composed, or two cannot be compared; the message names them.
    """
    configurations = [_composed(name, common, own, config_dirs) for name, own in overrides.items()]
    for one, other in itertools.combinations(configurations, 2):
        for key in _SAME:
            if one.composed.plain[key] != other.composed.plain[key]:
                names = f"{one.name} and {other.name}"
                raise ConfigError(f"{key}: {names} differ in it; set it for both, beside {names}")
        if one.trial == other.trial:
            raise ConfigError(f"{one.name} and {other.name}: are the same configuration")
    return tuple(configurations)


def _composed(
    name: str, common: Sequence[str], own: Sequence[str], config_dirs: Sequence[str]
) -> Candidate:
    try:
        composer = Composer([*common, *own], config_dirs)
        composer.refuse_sweeps()
        composed = composer.compose()
        trial, node = composed.trial, composed.config.objective
        return Candidate(
            name=name,
            overrides=tuple(own),
            config=trial.as_dict(),
            objective=call(build_partial(node, trial.allowed_targets, "objective"), "objective"),
            composer=composer,
            composed=composed,
        )
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def plan_comparison(
    configurations: tuple[Candidate, ...],
    *,
    num_seeds: int,
    command: Sequence[str],
    code_folders: Sequence[str],
    launcher: Launcher | None = None,
) -> ComparisonPlan:
    """Plan the runs and check the settings and machines that they need.

    Args:
        command: command-line arguments that started the comparison, kept in its files.
        code_folders: folders that may hold Python modules of the user's own.
        launcher: what finds out what this machine has, in place of this process, which would
            then hold memory of its GPU.

    Raises:
        AutotuneError: these machines cannot run a configuration, or a setting has a value that is
            refused.
    """
    first = configurations[0]
    config = first.composed.config
    check_limits(config)
    experiments = list(dict.fromkeys(each.experiment for each in configurations))
    name = study_name(config, f"compare-{'-and-'.join(experiments)}")
    folder = (Path(config.study.folder) / name).absolute()
    capabilities = capabilities_of(config.cluster, launcher)
    plan = ComparisonPlan(
        name=name,
        experiment=" and ".join(experiments),
        target=first.trial.target,
        num_seeds=num_seeds,
        configurations=configurations,
        composed=first.composed,
        objective=first.objective,
        folder=folder,
        capabilities=capabilities,
        code_folders=tuple(code_folders),
        command=tuple(command),
    )
    for each in configurations:
        if (reason := plan.unsuitable(each.trial)) is not None:
            raise ConfigError(f"{each.name}: cannot run here: {reason}")
    check_measured(first.objective, [capabilities.device_of(each.trial) for each in configurations])
    return plan


def check_comparison(
    plan: ComparisonPlan, tell: Callable[[str], None], launcher: Launcher | None
) -> None:
    """Train the checkpoints that configurations start from, unless this is a dry run, then make the
    components of each once.

    Args:
        tell: called with a line of text when a checkpoint is trained.
        launcher: what makes the components, in place of this process.

    Raises:
        AutotuneError: a component cannot be made, data is missing, or a checkpoint cannot be
            trained.
    """
    with calling(launcher) as call_there:
        for each in plan.configurations:
            try:
                if not plan.config.dry_run:
                    train_missing_sources(each.composer, tell)
                # a remote cluster may have data that is not here
                if plan.config.cluster.is_local and not each.composer.missing_sources:
                    call_there(CHECK_TRAINING, each.trial)
            except AutotuneError as error:
                raise type(error)(f"{each.name}: {error}") from error


def describe_comparison(plan: ComparisonPlan) -> list[str]:
    """The plan as lines of text for the terminal: configurations, target, runs and resources."""
    lines = [
        f"comparison {plan.name} -> {plan.folder}",
        f"target     {plan.target}, at most {plan.target.max_train_seconds:g} s of training a run",
    ]
    for each in plan.configurations:
        cpus, gpus = plan.resources(each.trial)
        lines.append(f"{each.name:<10} {each.shown}: {cpus} CPU and {gpus} GPU a run")
        lines += [
            f"first      {source.experiment} is trained, once, for {each.name}"
            for source in each.composer.missing_sources
        ]
    trained = [each.trial for each in plan.configurations]
    return [
        *lines,
        f"runs       {plan.num_seeds} of each, in turns, each in a fresh process",
        *(f"device     {line}" for line in plan.device_lines(*trained)),
    ]


def run_comparison(
    plan: ComparisonPlan, *, console: Console, launcher: Launcher | None = None
) -> Comparison:
    """Run a planned comparison, or resume it where an earlier process stopped, then write, track
    and print its result.

    The first Ctrl-C ends the comparison without a further run, and the runs so far are reported,
    with the command that continues it.

    Args:
        launcher: the driver's own launcher, for runs on this machine.

    Raises:
        AutotuneError: the comparison cannot be run, or one with another definition has its name;
            the message is one line.
        WorkerError: several runs of a configuration in a row failed in the user's own code.
        SystemExit: a notice (SIGTERM, SIGUSR1, SIGUSR2) has ended the comparison.
    """
    with (
        contextlib.closing(RaySession(plan.config.cluster, launcher)) as connection,
        open_folder(plan, console=console, connection=connection) as opened,
    ):
        study, _, interrupt, is_resumed = opened
        take_earlier_runs(plan, study)
        tracker = TrackerWriter(
            plan.config.tracking,
            plan.configurations[0].trial.allowed_targets,
            make_info=partial(plan.tracker_info, "comparison", is_resumed=is_resumed),
            ended=plan.ended_runs,
            rest_command=plan.resume_command(),
            say=partial(say, console),
        )
        with closing_tracker(tracker):
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C ends the runs at once
                if not plan.is_complete:
                    _make_runs(plan, study, connection, tracker, interrupt, console, launcher)
            tracker.close(
                StudyEnd(
                    status="FINISHED" if plan.is_complete else "KILLED",
                    metrics=plan.metrics(),
                    artifacts=[*plan.write(), *plan.draw()] if plan.num_runs else [],
                )
            )
        print_comparison(console, plan, folder=shown_path(plan.folder))
        if not plan.is_complete:
            say_interrupted(console, plan)
            if interrupt.exit_code == EXIT_AGAIN:
                raise SystemExit(EXIT_AGAIN)
    return plan


def take_earlier_runs(plan: ComparisonPlan, study: Study) -> None:
    """Give a comparison's plan the runs that earlier processes made.

    Runs of a configuration that ended an earlier process, since the last ones failed in the code
    that they train, are left out: the cause may be fixed by now.

    Raises:
        StudyError: the storage has more pairs than ``num_seeds``; or the folder has results of a
            comparison, and the storage has none.
    """
    stored = confirmations(study)
    if not stored and (plan.folder / RESULTS).exists():
        raise StudyError(
            f"study.name={plan.name}: {plan.folder} has {RESULTS} of an earlier comparison, and its"
            " storage has no run of it; use another study.name"
        )
    num_pairs = max((number + 1 for _, number in stored), default=0)
    if num_pairs > plan.num_seeds:
        raise StudyError(
            f"num_seeds: found {plan.num_seeds}, and study.name={plan.name} has {num_pairs} pairs"
            f" already; give {num_pairs} or more"
        )
    for (index, number), result in sorted(stored.items()):
        plan.configurations[index].runs[number] = result
    for each in plan.configurations:
        for number in failed_last(each, plan.config.search.max_errors_in_a_row):
            del each.runs[number]


def _make_runs(
    plan: ComparisonPlan,
    study: Study,
    connection: RaySession,
    tracker: TrackerWriter,
    interrupt: Interrupt,
    console: Console,
    launcher: Launcher | None,
) -> None:
    """Make the runs of all configurations in turns, and keep each as soon as it has ended."""
    configurations = plan.configurations
    with console.status("starting Ray"):
        size = connection.size(interrupt)
        from autotune.execution import ray_tune  # noqa: PLC0415  # imports ray

        for each in configurations:
            size.check_holds(f"a run of {each.name}", *plan.placed(each.trial))
        tracker.wait()
    display = RunsDisplay(console, plan.target, plan.objective, num_ended=plan.num_runs)
    display.num_runs = plan.num_wanted
    for line in describe_comparison(plan):
        display.note(line)
    turns = list(in_turns(len(configurations), plan.num_seeds))
    runs = [plan.run(*turn) for turn in turns]
    display.labels = {run.number: plan.configuration(run).name for run in runs}
    first_tasks = [plan.run_task(run) for run in runs[: len(configurations)]]
    num_workers, _ = num_side_by_side(first_tasks, plan.capabilities, size)
    left = [run for run in runs if run.round not in plan.configuration(run).runs]
    units = [list(unit) for _, unit in itertools.groupby(left, key=attrgetter("round"))]
    batches = [units[at : at + num_workers] for at in range(0, len(units), num_workers)]

    def on_end(run: Run, result: TrialResult) -> float | None:
        each = plan.configuration(run)
        store_confirmation(study, plan.index(run), run.round, result)
        each.runs[run.round] = result
        plan.write()
        check_failures(each, plan.config.search.max_errors_in_a_row)
        return plan.objective.score(result) if result.outcome is Outcome.REACHED else None

    def phases() -> Generator[TrialManager, None, None]:
        yield TrialManager.of(
            plan,
            connection,
            size,
            policy=Turns(batches, on_end),
            interrupt=interrupt,
            note=display.note,
            tracker=tracker,
            listeners=(display,),
            make_task=lambda run: anew(plan.run_task(run, launcher=launcher and launcher.address)),
            max_concurrent_trials=num_workers,
        )

    with (
        compiled_anew(plan.folder) as anew,
        quiet(tracker, plan, first_tasks),
        display.status,
        plan.saved_on_notice(interrupt),
    ):
        connection.run(lambda: ray_tune.make_runs(phases(), plan, connection, interrupt), interrupt)


def check_failures(configuration: Compared, max_errors_in_a_row: int) -> None:
    """End a comparison in which further runs of a configuration would only fail again.

    Raises:
        ConfigError: its last run was INVALID: its components could not be made.
        WorkerError: several of its runs in a row failed in the code they train.
    """
    runs = [
        configuration.runs[number] for number in failed_last(configuration, max_errors_in_a_row)
    ]
    if not runs:
        return
    if runs[-1].outcome is Outcome.INVALID:
        raise ConfigError(f"{configuration.name}: {runs[-1].error_line}")
    what = f"{len(runs)} runs of {configuration.name} in a row failed in the code they train"
    raise WorkerError(f"{what}; the first: {runs[0].error_line}", runs[0].error or "")


def failed_last(configuration: Compared, max_errors_in_a_row: int) -> list[int]:
    """Numbers of the last runs of a configuration if they show that further ones would only fail
    again: the last one was INVALID, or so many in a row ERRORED; else empty.
    """
    last = list(configuration.runs.items())[-max_errors_in_a_row:]
    if last and last[-1][1].outcome is Outcome.INVALID:
        return [last[-1][0]]
    has_failed = len(last) == max_errors_in_a_row and all(
        run.outcome is Outcome.ERRORED for _, run in last
    )
    return [number for number, _ in last] if has_failed else []
