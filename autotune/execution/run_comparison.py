"""A whole comparison: two configurations in pairs of runs, each in a fresh process, one at a time; its files and its runs in a tracker.

Everything measured is on disk after each run, so an interrupted comparison keeps what it has.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from autotune.comparison import RunTime, in_turns
from autotune.config.build import build_partial, call
from autotune.database_url import without_password
from autotune.errors import ConfigError, WorkerError
from autotune.execution.background_tracker import BackgroundTracker
from autotune.execution.cluster import connected
from autotune.execution.comparison_plan import ComparisonPlan, Side
from autotune.execution.confirmation import run_time
from autotune.execution.interrupt import interruptible
from autotune.execution.study_folder import log_file, shown_path, sole_user
from autotune.execution.task_run import TrialTask
from autotune.measurement import Outcome, TrialResult
from autotune.report.compared import ComparedSide, Comparison
from autotune.report.comparison_files import write_comparison
from autotune.report.comparison_terminal import ComparisonDisplay, print_comparison
from autotune.report.scale import scale_of
from autotune.tracking.tracker import StudyInfo, TrackedTrial, Tracker
from autotune.training.versions import versions

Results = dict[tuple[str, int], TrialResult]
"""Runs that ended, by side and number of the pair."""


def run_comparison(plan: ComparisonPlan, *, command: Sequence[str], code_folders: Sequence[str], console: Console) -> Comparison:
    """Run a planned comparison and write, track and print what came of it.

    The first Ctrl-C ends it after no further run, and what was measured until then is told; see ``Comparison.is_complete``.

    Args:
        command: the arguments that started it, kept in its files.
        code_folders: where modules of the user's own may lie.

    Raises:
        AutotuneError: it cannot be run, in one line.
        WorkerError: several runs of a side in a row failed in the user's own code.
    """
    results: Results = {}
    shown = [without_password(each) for each in command]
    facts = {"command": shown, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": versions()}
    with interruptible() as interrupt, _opened(plan) as tracker:
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C ends at once what the first one was to end
            _make_runs(plan, results, facts, tracker, interrupt, code_folders=code_folders, console=console)
        comparison = _comparison(plan, results)
        _conclude(comparison, plan, facts, tracker)
    print_comparison(console, comparison, folder=shown_path(plan.folder))
    return comparison


def _make_runs(
    plan: ComparisonPlan,
    results: Results,
    facts: Mapping[str, Any],
    tracker: BackgroundTracker,
    interrupt: threading.Event,
    *,
    code_folders: Sequence[str],
    console: Console,
) -> None:
    """Make the runs in turns; ``results`` holds each as soon as it has ended."""
    from autotune.execution.fresh import FreshRun, train_fresh  # noqa: PLC0415  # imports ray

    order = [(plan.sides[number], pair) for number, pair in in_turns(2, plan.num_seeds)]
    tracked = [_tracked(side, pair, plan.seed(pair)) for side, pair in order]
    tasks = [_task(plan, side, pair, code_folders) for side, pair in order]
    with contextlib.ExitStack() as stack:
        with console.status("starting Ray"):
            size = stack.enter_context(connected(plan.config.cluster))
            tracker.wait()
        display = stack.enter_context(
            ComparisonDisplay(
                title=f"{plan.experiment} · {plan.name}",
                target=plan.target,
                sides=[side.label for side in _comparison(plan, results).sides],
                num_runs=len(order),
                console=console,
                scale=scale_of(plan.objective),
            )
        )

        def run_at(place: int) -> FreshRun:
            side, pair = order[place]

            def on_start() -> None:
                display.run_started(side.name, plan.seed(pair))
                tracked[place] = replace(tracked[place], started_at=time.time())
                tracker.wait().start(tracked[place])

            return FreshRun(
                task=tasks[place],
                trial=pair,
                values=side.values,
                overrides=side.overrides,
                on_start=on_start,
                on_evaluation=display.evaluated,
            )

        runs = train_fresh([run_at(place) for place in range(len(order))], fit=size.holds, interrupt=interrupt)
        for place, result in enumerate(stack.enter_context(contextlib.closing(runs))):
            side, pair = order[place]
            results[side.name, pair] = result
            time_of_run = run_time(result, plan.objective)
            display.run_finished(side.name, result, time_of_run.seconds)
            tracker.wait().finish(tracked[place], result, time_of_run.seconds if time_of_run.reached else None)
            write_comparison(plan.folder, _comparison(plan, results), {**facts, "device": result.fingerprint.get("device")})
            refuse_to_go_on(plan, side, results)


def refuse_to_go_on(plan: ComparisonPlan, side: Side, results: Results) -> None:
    """End a comparison that no further run would mend.

    Raises:
        ConfigError: a worker could not even make the side.
        WorkerError: several runs of the side in a row failed in the code they train.
    """
    own = [result for (name, _), result in results.items() if name == side.name]
    if own[-1].outcome is Outcome.INVALID:
        raise ConfigError(f"{side.name}: {own[-1].error_line}")
    most = plan.config.search.max_errors_in_a_row
    if len(own) >= most and all(each.outcome is Outcome.ERRORED for each in own[-most:]):
        raise WorkerError(f"{most} runs of side {side.name} in a row failed in the code they train; the first:", own[-most].error or "")


def _task(plan: ComparisonPlan, side: Side, pair: int, code_folders: Sequence[str]) -> TrialTask:
    config = side.seeded(plan.seed(pair))
    num_cpus, num_gpus = plan.resources(config)
    return TrialTask(
        name=f"{side.name}-{pair}",
        config=config,
        cap_seconds=float("inf"),
        num_threads=plan.config.cluster.cpus_per_worker,
        deadline_seconds=plan.run_deadline_seconds,
        code_folders=tuple(code_folders),
        working_folder=str(Path.cwd()),
        hang_folder=str(plan.folder),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        placement=plan.config.cluster.placement.upper(),
        accelerator_type=plan.config.cluster.accelerator_type,
        score_test=True,
    )


def _comparison(plan: ComparisonPlan, results: Results) -> Comparison:
    one, other = (_side(plan, side, results) for side in plan.sides)
    return Comparison(name=plan.name, experiment=plan.experiment, target=plan.target, num_seeds=plan.num_seeds, sides=(one, other))


def _side(plan: ComparisonPlan, side: Side, results: Results) -> ComparedSide:
    runs = {pair: result for (name, pair), result in results.items() if name == side.name}
    times: dict[int, RunTime] = {pair: run_time(result, plan.objective) for pair, result in runs.items()}
    return ComparedSide(
        name=side.name, overrides=side.overrides, config=side.trial.as_dict(), runs=runs, times=times, scale=scale_of(plan.objective)
    )


def _conclude(comparison: Comparison, plan: ComparisonPlan, facts: Mapping[str, Any], tracker: BackgroundTracker) -> None:
    """Write the files and figures, and close the tracker with them."""
    from autotune.report.comparison_figures import write_comparison_figures  # noqa: PLC0415  # matplotlib is wanted once, at the end

    device = next((run.fingerprint.get("device") for side in comparison.sides for run in side.runs.values() if run.fingerprint), None)
    files = write_comparison(plan.folder, comparison, {**facts, "device": device})
    figures = write_comparison_figures(plan.folder / "figures", comparison)
    is_time = comparison.scale.is_time
    metrics = {f"{side.name}_mean_{'seconds' if is_time else 'score'}": side.arm.mean_seconds or float("nan") for side in comparison.sides}
    for name, ratio in (
        ("time" if is_time else "score", comparison.time_ratio),
        ("steps", comparison.steps_ratio),
        ("step", comparison.step_ratio),
    ):
        if ratio is not None:
            metrics |= {f"{name}_ratio": ratio.ratio, f"{name}_ratio_low": ratio.low, f"{name}_ratio_high": ratio.high}
    metrics["num_pairs"] = comparison.num_pairs
    claim = {"autotune.claim": str(comparison.time_ratio.claim)} if comparison.time_ratio else {}
    tracker.close("FINISHED" if comparison.is_complete else "KILLED", metrics, claim, [*files, *figures])


@contextlib.contextmanager
def _opened(plan: ComparisonPlan) -> Iterator[BackgroundTracker]:
    """The comparison's folder, held, and its tracker, which is closed however the context ends."""
    with sole_user(plan.folder), log_file(plan.folder / "autotune.log"), ThreadPoolExecutor(1) as background:
        tracker = BackgroundTracker(background.submit(_open_tracker, plan))
        try:
            yield tracker
        except BaseException as error:
            tracker.close_if_open(is_interrupt=isinstance(error, KeyboardInterrupt))
            raise


def _open_tracker(plan: ComparisonPlan) -> Tracker:
    target = plan.target
    info = StudyInfo(
        name=plan.name,
        kind="comparison",
        workload=plan.workload,
        experiment=plan.experiment,
        folder=str(plan.folder),
        settings={
            "experiment": plan.experiment,
            "target": f"{target.metric} {target.value:g}",
            "max_train_seconds": target.max_train_seconds,
            "objective": plan.config.objective["_target_"].rpartition(".")[2],
            "score": scale_of(plan.objective).description,
            "num_seeds": plan.num_seeds,
            "seed": plan.config.study.seed,
            **{side.name: " ".join(side.overrides) for side in plan.sides},
        },
        tags={"autotune.device": plan.capabilities.device_name},
    )
    made = build_partial(plan.config.tracking, plan.sides[0].trial.allowed_targets, "tracking")
    return call(made, "tracking", info, finished=())  # type: ignore[no-any-return]  # the contract of tracking:


def _tracked(side: Side, pair: int, seed: int) -> TrackedTrial:
    return TrackedTrial(
        name=f"{side.name}-{pair}",
        phase="compare",
        trial=pair,
        values={"side": side.name, **side.values},
        overrides=side.overrides,
        config=side.seeded(seed).as_dict(),
        seed=seed,
        started_at=0.0,
    )
