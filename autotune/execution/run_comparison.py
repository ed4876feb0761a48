"""Runs of a comparison's or a scaling's sides in turns, in fresh processes, then files, figures and tracker.

All results are written to disk after each run, so an interrupted comparison keeps its runs so far.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from autotune.comparison import RunScore, in_turns
from autotune.errors import ClusterError, ConfigError, WorkerError
from autotune.execution.background_tracker import BackgroundTracker, TrackerOpening, TrackerProcess
from autotune.execution.cluster import Connection, check_can_start
from autotune.execution.comparison_plan import VERB_OF_KIND, ComparisonPlan, Side
from autotune.execution.confirmation import run_score
from autotune.execution.fork_server import ForkServer
from autotune.execution.interrupt import interruptible
from autotune.execution.paired_runs import Lanes, PairedRun, run_in_turns
from autotune.execution.study_folder import log_file, shown_path, sole_user
from autotune.execution.task_run import TrialTask
from autotune.hiding import without_secrets
from autotune.measurement import TrialResult
from autotune.mlflow_logs import logs_folder
from autotune.outcome import Outcome
from autotune.reporting.compared import ComparedSide, Comparison, write_comparison
from autotune.reporting.comparison_terminal import ComparisonDisplay, print_comparison
from autotune.reporting.scores import score_format_of
from autotune.tracking.tracker import StudyInfo, TrackedTrial
from autotune.training.capabilities import versions

Results = dict[tuple[str, int], TrialResult]
"""Results of the runs that have ended, by (name of the side, number of the round)."""


def run_comparison(
    plan: ComparisonPlan,
    *,
    command: Sequence[str],
    code_folders: Sequence[str],
    console: Console,
    fork_server: ForkServer | None = None,
) -> Comparison:
    """Run a planned comparison, then write, track and print its result.

    The first Ctrl-C ends the comparison without a further run, and the runs so far are reported; see ``Comparison.is_complete``.

    Args:
        command: command-line arguments that started the comparison, kept in its files.
        code_folders: folders that may hold Python modules of the user's own.
        fork_server: the driver's own fork server, for runs on this machine.

    Raises:
        AutotuneError: the comparison cannot be run; the message is one line.
        WorkerError: several runs of a side in a row failed in the user's own code.
    """
    results: Results = {}
    facts = facts_of(command)

    def write() -> None:
        write_comparison(plan.folder, _comparison(plan, results), {**facts, "device": device_of(results)})

    with interruptible() as interrupt, opened(plan, console) as tracker:
        make_runs(plan, results, tracker, interrupt, write=write, code_folders=code_folders, console=console, fork_server=fork_server)
        comparison = _comparison(plan, results)
        _conclude(comparison, plan, {**facts, "device": device_of(results)}, tracker)
    print_comparison(console, comparison, folder=shown_path(plan.folder))
    return comparison


def _comparison(plan: ComparisonPlan, results: Results) -> Comparison:
    side_a, side_b = compared_sides(plan, results)
    return Comparison(name=plan.name, experiment=plan.experiment, target=plan.target, num_seeds=plan.num_seeds, sides=(side_a, side_b))


def _conclude(comparison: Comparison, plan: ComparisonPlan, facts: Mapping[str, Any], tracker: BackgroundTracker) -> None:
    """Write the comparison's files and figures, and close the tracker with them."""
    from autotune.reporting.comparison_charts import comparison_charts  # noqa: PLC0415  # imports Plotly, needed only at the end
    from autotune.reporting.drawing import write_charts  # noqa: PLC0415  # likewise

    files = write_comparison(plan.folder, comparison, facts)
    figures = write_charts(plan.folder / "figures", comparison_charts(comparison))
    is_time = comparison.scale.is_time
    metrics = {f"{side.name}_mean_{'seconds' if is_time else 'score'}": side.arm.mean_spent or float("nan") for side in comparison.sides}
    for name, ratio in (
        ("time" if is_time else "score", comparison.score_ratio),
        ("steps", comparison.steps_ratio),
        ("step", comparison.step_ratio),
    ):
        if ratio is not None:
            metrics |= {f"{name}_ratio": ratio.ratio, f"{name}_ratio_low": ratio.low, f"{name}_ratio_high": ratio.high}
    metrics["num_pairs"] = comparison.num_pairs
    claim = {"autotune.claim": str(comparison.score_ratio.claim)} if comparison.score_ratio else {}
    status = "FINISHED" if comparison.is_complete else "KILLED"
    tracker.close(status=status, metrics=metrics, tags=claim, artifacts=[*files, *figures])


def make_runs(
    plan: ComparisonPlan,
    results: Results,
    tracker: BackgroundTracker,
    interrupt: threading.Event,
    *,
    write: Callable[[], object],
    code_folders: Sequence[str],
    console: Console,
    fork_server: ForkServer | None = None,
) -> None:
    """Make the runs of all sides in turns; the first Ctrl-C ends this without a further run.

    Args:
        results: the result of each run is added to it as soon as the run has ended.
        write: called after each run, to write the results to disk.
        code_folders: folders that may hold Python modules of the user's own.
        fork_server: the driver's own fork server, for runs on this machine.

    Raises:
        AutotuneError: the runs cannot be made; the message is one line.
        WorkerError: several runs of a side in a row failed in the user's own code.
    """
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:  # a second Ctrl-C ends the runs at once
        connection = Connection(plan.config.cluster)
        stack.callback(connection.close)
        with console.status("starting Ray"):
            size = connection.size(interrupt)
            for side in plan.sides:
                check_can_start(f"a run of {side.name}", size, plan.config.cluster, side.trial.num_workers, *plan.resources(side.trial))
            tracker.wait()
        display = stack.enter_context(
            ComparisonDisplay(
                title=f"{plan.experiment} · {plan.name}",
                target=plan.target,
                sides=[side.label for side in compared_sides(plan, {})],
                num_runs=len(plan.sides) * plan.num_seeds,
                console=console,
                scale=score_format_of(plan.objective),
            )
        )
        for line in plan.device_lines:
            console.print(f"  device: {line}", markup=False, highlight=False, soft_wrap=True)

        def batches(num_lanes: int) -> Iterator[list[list[PairedRun]]]:
            turns = in_turns(len(plan.sides), plan.num_seeds)
            units = [[turn] for turn in turns] if num_lanes == 1 else [[*each] for _, each in itertools.groupby(turns, key=itemgetter(1))]
            for first in range(0, len(units), num_lanes):
                batch = units[first : first + num_lanes]
                yield [[run(*turn) for turn in unit] for unit in batch]
                for index, _ in itertools.chain.from_iterable(batch):
                    check_failures(plan, plan.sides[index], results)

        def run(index: int, number: int) -> PairedRun:
            side = plan.sides[index]
            return PairedRun(
                arm=index,
                number=number,
                task=_task(plan, side, number, code_folders),
                tracked=_tracked(plan, side, number),
                on_start=partial(display.run_started, side.name, plan.seed(number)),
                on_evaluation=display.evaluated,
            )

        def on_end(run: PairedRun, result: TrialResult) -> None:
            side = plan.sides[run.arm]
            results[side.name, run.number] = result
            display.run_finished(side.name, result, run_score(result, plan.objective).score)
            write()

        def make() -> None:
            tasks = [_task(plan, side, 0, code_folders) for side in plan.sides]
            lanes = Lanes.of(tasks, plan.capabilities) if plan.kind == "comparison" else Lanes()
            run_in_turns(
                batches(lanes.number),
                lanes=lanes,
                size=size,
                tracker=tracker,
                objective=plan.objective,
                interrupt=interrupt,
                max_retakes=plan.config.search.max_retakes,
                check_ray=connection.check,
                fork_server=fork_server,
                on_end=on_end,
            )

        try:
            connection.run(make, interrupt)
        except ClusterError as error:
            if not connection.is_lost:
                raise
            tracker.close_if_open(is_interrupt=False)  # before the connection: what Ray does then is uncertain
            raise ClusterError(f"{error}; the runs so far are in {shown_path(plan.folder)}") from error


def compared_sides(plan: ComparisonPlan, results: Results) -> list[ComparedSide]:
    """The results of each side's runs so far."""
    return [_compared(plan, side, results) for side in plan.sides]


def facts_of(command: Sequence[str]) -> dict[str, Any]:
    """Facts on the running command for the result files: its arguments without passwords, the time, and versions."""
    shown = [without_secrets(argument) for argument in command]
    return {"command": shown, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": versions()}


def device_of(results: Results) -> Any:
    """The device that the first run with a fingerprint ran on; None if there is no such run."""
    return next((run.fingerprint.get("device") for run in results.values() if run.fingerprint), None)


def check_failures(plan: ComparisonPlan, side: Side, results: Results) -> None:
    """End a comparison in which further runs of a side would only fail again.

    Raises:
        ConfigError: the last run of the side was INVALID: its components could not be made.
        WorkerError: several runs of the side in a row failed in the code they train.
    """
    runs = [result for (name, _), result in results.items() if name == side.name]
    if runs[-1].outcome is Outcome.INVALID:
        raise ConfigError(f"{side.name}: {runs[-1].error_line}")
    most = plan.config.search.max_errors_in_a_row
    if len(runs) >= most and all(run.outcome is Outcome.ERRORED for run in runs[-most:]):
        raise WorkerError(f"{most} runs of side {side.name} in a row failed in the code they train; the first:", runs[-most].error or "")


def _task(plan: ComparisonPlan, side: Side, number: int, code_folders: Sequence[str]) -> TrialTask:
    config = side.seeded(plan.seed(number))
    num_cpus, num_gpus = plan.resources(config)
    return TrialTask(
        name=f"{side.name}-{number}",
        config=config,
        cap_seconds=side.cap_seconds,
        num_threads=num_cpus // config.num_workers,
        deadline_seconds=plan.run_deadline_seconds,
        code_folders=tuple(code_folders),
        working_folder=str(Path.cwd()),
        hang_folder=str(plan.folder),
        logs_folder=logs_folder(plan.config.tracking, plan.folder),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        placement=plan.config.cluster.placement.upper(),
        accelerator_type=plan.config.cluster.accelerator_type,
        score_test=True,
    )


def _compared(plan: ComparisonPlan, side: Side, results: Results) -> ComparedSide:
    runs = {number: result for (name, number), result in sorted(results.items()) if name == side.name}
    scores: dict[int, RunScore] = {number: run_score(result, plan.objective) for number, result in runs.items()}
    return ComparedSide(
        name=side.name,
        overrides=side.overrides,
        config=side.trial.as_dict(),
        runs=runs,
        scores=scores,
        scale=score_format_of(plan.objective),
    )


@contextlib.contextmanager
def opened(plan: ComparisonPlan, console: Console) -> Iterator[BackgroundTracker]:
    """Lock the plan's folder and open its tracker, which is closed if the context ends by an error."""
    with sole_user(plan.folder), log_file(plan.folder / "autotune.log"):
        tracker = BackgroundTracker(
            partial(_tracker_opening, plan),
            TrackerProcess(plan.config.tracking),
            spool_folder=plan.folder,
            say=lambda line: console.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True),
        )
        try:
            yield tracker
        except BaseException as error:
            tracker.close_if_open(is_interrupt=isinstance(error, KeyboardInterrupt))
            raise


def _tracker_opening(plan: ComparisonPlan) -> TrackerOpening:
    target = plan.target
    info = StudyInfo(
        name=plan.name,
        kind=plan.kind,
        workload=plan.workload,
        experiment=plan.experiment,
        folder=str(plan.folder),
        settings={
            "experiment": plan.experiment,
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
    return TrackerOpening(
        node=plan.config.tracking,
        allowed_targets=tuple(plan.sides[0].trial.allowed_targets),
        log_path=plan.folder / "autotune.log",
        info=info,
    )


def _tracked(plan: ComparisonPlan, side: Side, number: int) -> TrackedTrial:
    return TrackedTrial(
        name=f"{side.name}-{number}",
        phase=VERB_OF_KIND[plan.kind],
        trial=number,
        values={"side": side.name, **side.values},
        overrides=side.overrides,
        config=side.seeded(plan.seed(number)).as_dict(),
        seed=plan.seed(number),
        started_at=0.0,
    )
