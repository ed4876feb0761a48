"""Measuring strong and weak scaling: one configuration is trained on several numbers of workers, in turns.

Strong scaling keeps the batch size: more workers share the same work. Weak scaling keeps each worker's part of the batch, so that the batch
grows with the number of workers. One worker alone on its part of the batch is timed too: what a step would take without communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from autotune.errors import ConfigError
from autotune.execution.comparison_plan import ComparisonPlan, Side, compose_side, plan_comparison
from autotune.execution.fork_server import ForkServer
from autotune.execution.interrupt import interruptible
from autotune.execution.run_comparison import Results, compared_sides, device_of, facts_of, make_runs, opened
from autotune.execution.study_folder import shown_path
from autotune.reporting.compared import ComparedSide
from autotune.reporting.scaling import Mode, Scaling, ScalingPoint, print_scaling, write_scaling
from autotune.training.components import make_strategy

_ALONE = ("parallelism=single",)
_DEFAULT_STRATEGY = "ddp"
_PART_SECONDS = 5.0
"""Seconds for which one worker trains its part of a batch alone: enough to time a step."""


@dataclass(frozen=True, kw_only=True)
class _Point:
    mode: Mode
    num_workers: int
    side: Side
    part: Side | None
    """One worker alone on its part of the batch; None if a single worker is not among the numbers of workers."""
    worker_share: float
    """Fraction of the part's work that one worker does: workers that split the model's layers share a part."""


@dataclass(frozen=True, kw_only=True)
class ScalingPlan:
    """A checked plan of a scaling measurement."""

    runs: ComparisonPlan
    strategy: str
    points: tuple[_Point, ...]


def plan_scaling(
    overrides: Sequence[str],
    *,
    workers: Sequence[int],
    modes: Sequence[Mode],
    num_seeds: int,
    config_dirs: Sequence[str],
    fork_server: ForkServer | None = None,
) -> ScalingPlan:
    """Compose and check the configuration of every number of workers.

    Args:
        overrides: overrides of the configuration; its ``parallelism`` option is the strategy, or ``ddp`` if that is ``single``.
        workers: distinct numbers of workers, in rising order.
        modes: kinds of scaling to measure.
        fork_server: what finds out what this machine has, see ``plan_comparison``.

    Raises:
        AutotuneError: a configuration cannot be composed, or this machine cannot run it.
    """
    parallel = [override for override in overrides if override.partition("=")[0].partition(".")[0] == "parallelism"]
    common = [override for override in overrides if override not in parallel]
    chosen = compose_side("workers", overrides, (), config_dirs).composed.choices["parallelism"]
    strategy = _DEFAULT_STRATEGY if chosen == "single" else chosen
    settings = [override for override in parallel if override.partition("=")[0] not in ("parallelism", "parallelism.num_workers")]

    def composed(name: str, num_workers: int, batch_size: int | None) -> Side:
        parallelism = (f"parallelism={strategy}", *settings, f"parallelism.num_workers={num_workers}")
        size = () if batch_size is None else (f"batch_size={batch_size}",)
        try:
            return compose_side(name, common, (*(_ALONE if num_workers == 1 else parallelism), *size), config_dirs)
        except ConfigError as error:
            raise ConfigError(f"workers={num_workers}: {error}") from error

    base = composed(f"strong-{workers[0]}", workers[0], None)
    batch_size = base.trial.batch_size
    sides: dict[str, Side] = {base.name: base}
    points = []
    for mode in modes:
        for num_workers in workers:
            if mode is Mode.WEAK and batch_size * num_workers % workers[0]:
                raise ConfigError(f"workers: {num_workers} has no whole batch beside {batch_size} on {workers[0]}; accepted are multiples")
            name = f"{mode}-{num_workers}" if num_workers != workers[0] else base.name
            size = batch_size if mode is Mode.STRONG else batch_size * num_workers // workers[0]
            if name not in sides:
                sides[name] = composed(name, num_workers, size)
            part, share = _part(sides, name, common, config_dirs) if workers[0] == 1 else (None, 1.0)
            points.append(_Point(mode=mode, num_workers=num_workers, side=sides[name], part=part, worker_share=share))
    runs = plan_comparison(tuple(sides.values()), num_seeds=num_seeds, kind="scaling", fork_server=fork_server)
    return ScalingPlan(runs=runs, strategy=strategy, points=tuple(points))


def _part(sides: dict[str, Side], name: str, common: Sequence[str], config_dirs: Sequence[str]) -> tuple[Side | None, float]:
    """The side with one worker alone on its part of a named side's batch, added to ``sides`` if new, and the ``worker_share``."""
    trial = sides[name].trial
    strategy = make_strategy(trial)
    num_parts = strategy.part_of_batch(0)[1]
    if trial.batch_size % num_parts:
        raise ConfigError(
            f"batch_size: found {trial.batch_size}, accepted with {num_parts} workers that share a batch is a multiple of that"
        )
    size = trial.batch_size // num_parts
    part = next((side for side in sides.values() if side.trial.batch_size == size and side.trial.num_workers == 1), None)
    if part is None:
        label = f"alone-{size}"
        part = compose_side(label, common, (*_ALONE, f"batch_size={size}"), config_dirs, cap_seconds=_PART_SECONDS)
        sides[label] = part
    return part, num_parts / strategy.num_workers


def run_scaling(
    plan: ScalingPlan,
    *,
    command: Sequence[str],
    code_folders: Sequence[str],
    console: Console,
    fork_server: ForkServer | None = None,
) -> Scaling:
    """Make the runs of a planned scaling measurement, then write, track and print the result.

    The first Ctrl-C ends the measurement without a further run, and the runs so far are reported.

    Raises:
        AutotuneError: the runs cannot be made; the message is one line.
        WorkerError: several runs of one number of workers in a row failed in the user's own code.
    """
    results: Results = {}
    facts = facts_of(command)

    def write() -> None:
        write_scaling(plan.runs.folder, _scaling(plan, results), {**facts, "device": device_of(results)})

    with interruptible() as interrupt, opened(plan.runs, console) as tracker:
        make_runs(plan.runs, results, tracker, interrupt, write=write, code_folders=code_folders, console=console, fork_server=fork_server)
        scaling = _scaling(plan, results)
        from autotune.reporting.comparison_charts import scaling_chart  # noqa: PLC0415  # imports Plotly, needed only at the end
        from autotune.reporting.drawing import write_charts  # noqa: PLC0415  # likewise

        files = write_scaling(plan.runs.folder, scaling, {**facts, "device": device_of(results)})
        figure = write_charts(plan.runs.folder / "figures", [scaling_chart(scaling)])
        tracker.close(
            status="FINISHED" if scaling.is_complete else "KILLED",
            metrics=scaling.metrics,
            tags={"autotune.strategy": scaling.strategy},
            artifacts=[*files, *figure],
        )
    print_scaling(console, scaling, folder=shown_path(plan.runs.folder))
    return scaling


def _scaling(plan: ScalingPlan, results: Results) -> Scaling:
    sides: dict[str, ComparedSide] = {side.name: side for side in compared_sides(plan.runs, results)}
    points = [
        ScalingPoint(
            mode=point.mode,
            num_workers=point.num_workers,
            batch_size=point.side.trial.batch_size,
            side=sides[point.side.name],
            part=None if point.part is None else sides[point.part.name],
            worker_share=point.worker_share,
        )
        for point in plan.points
    ]
    runs = plan.runs
    return Scaling(
        name=runs.name,
        experiment=runs.experiment,
        target=runs.target,
        strategy=plan.strategy,
        num_seeds=runs.num_seeds,
        points=tuple(points),
        is_complete=len(results) == len(runs.sides) * runs.num_seeds,
    )
