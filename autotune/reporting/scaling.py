"""The result of a scaling measurement: time to target, step time and efficiency by number of workers, as records, JSON and tables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.comparison import Ratio, RunScore, expected_score, ratio_of_expected_scores, ratio_of_means
from autotune.measurement import Target, differing_devices
from autotune.outcome import Outcome
from autotune.reporting.compared import ComparedSide, format_step
from autotune.reporting.scores import format_ratio, format_seconds
from autotune.reporting.study_files import write_json
from autotune.reporting.terminal import printable


class Mode(StrEnum):
    """The kind of scaling: what stays constant while workers are added."""

    STRONG = "strong"
    """The batch size stays constant, so that workers share the same work."""
    WEAK = "weak"
    """Each worker's part of the batch stays constant, so that the batch size grows with the number of workers."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """The runs with one number of workers in one scaling mode."""

    mode: Mode
    num_workers: int
    batch_size: int
    """Samples per step, summed over all workers."""
    side: ComparedSide
    part: ComparedSide | None
    """The runs of one worker alone on its part of the batch; None if a single worker was not measured."""
    worker_share: float
    """Fraction of the part's work that one worker does; below 1 if workers split the model's layers."""

    @property
    def times(self) -> Mapping[int, RunScore]:
        """Warm seconds that each run took to the target or spent without reaching it, by round."""
        return {
            number: RunScore(run.time_to_target_seconds or (run.last.warm_seconds if run.last else None), run.outcome is Outcome.REACHED)
            for number, run in self.side.runs.items()
        }

    @property
    def num_reached(self) -> int:
        """Number of runs that reached the target."""
        return sum(run.reached for run in self.times.values())

    @property
    def seconds(self) -> float | None:
        """Expected warm seconds per success, misses included; None if no run reached the target."""
        expected = expected_score(list(self.times.values()))
        return expected if expected is not None and math.isfinite(expected) else None

    @property
    def device_seconds(self) -> float | None:
        """Expected device-seconds per success: ``seconds`` times the number of workers; None if no run reached the target."""
        return None if self.seconds is None else self.seconds * self.num_workers

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds per step over all runs; None if no step was timed."""
        return fmean(self.side.step_seconds.values()) if self.side.step_seconds else None

    @property
    def computation_share(self) -> float | None:
        """Fraction of a step spent in computation, at most 1; the rest is exchange and waiting for other workers.

        It is estimated from the step time of one worker alone on its part of the batch; None if that was not measured.
        """
        alone, together = (dict(side.step_seconds) if side is not None else {} for side in (self.part, self.side))
        rounds = sorted(alone.keys() & together.keys())
        if not rounds:
            return None
        return min(1.0, self.worker_share * fmean(alone[number] for number in rounds) / fmean(together[number] for number in rounds))


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The result of a scaling measurement, finished or interrupted."""

    name: str
    experiment: str
    target: Target
    strategy: str
    num_seeds: int
    points: tuple[ScalingPoint, ...]
    is_complete: bool

    def of(self, mode: Mode) -> list[ScalingPoint]:
        """The points of one scaling mode, in rising order of their number of workers."""
        return [point for point in self.points if point.mode is mode]

    @property
    def all_points_reached(self) -> bool:
        """Whether every number of workers reached the target at least once."""
        return all(point.num_reached for point in self.points)

    def speed_up(self, point: ScalingPoint) -> Ratio | None:
        """Expected time to target with the fewest workers of the same mode divided by that of ``point``, paired by round."""
        base = self.of(point.mode)[0]
        rounds = sorted(base.times.keys() & point.times.keys())
        if not rounds:
            return None
        return ratio_of_expected_scores([base.times[number] for number in rounds], [point.times[number] for number in rounds])

    def efficiency(self, point: ScalingPoint) -> float | None:
        """Speed-up of the time to target divided by the growth in the number of workers."""
        speed_up = self.speed_up(point)
        return None if speed_up is None else speed_up.ratio * self.of(point.mode)[0].num_workers / point.num_workers

    def step_efficiency(self, point: ScalingPoint) -> Ratio | None:
        """Samples per second and worker divided by those with the fewest workers of the same mode: 1 if exchange costs nothing."""
        base = self.of(point.mode)[0]
        base_seconds, point_seconds = base.side.step_seconds, point.side.step_seconds
        rounds = sorted(base_seconds.keys() & point_seconds.keys())
        work = point.batch_size / base.batch_size * base.num_workers / point.num_workers
        if not rounds:
            return None
        return ratio_of_means([work * base_seconds[number] for number in rounds], [point_seconds[number] for number in rounds])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics for a tracker, named ``MODE_NUMWORKERS_NAME``; values that were not measured are left out."""
        return {name: value for point in self.points for name, value in self._metrics_of(point) if value is not None}

    def _metrics_of(self, point: ScalingPoint) -> Iterator[tuple[str, float | None]]:
        efficiency = self.step_efficiency(point)
        for name, value in (
            ("time_to_target_seconds", point.seconds),
            ("device_seconds", point.device_seconds),
            ("step_seconds", point.step_seconds),
            ("efficiency", self.efficiency(point)),
            ("step_efficiency", efficiency.ratio if efficiency else None),
            ("computation_share", point.computation_share),
        ):
            yield f"{point.mode}_{point.num_workers}_{name}", value


def write_scaling(folder: Path, scaling: Scaling, circumstances: Mapping[str, Any]) -> list[Path]:
    """Write scaling.json and return its path; ``circumstances`` are facts about the command and the machine."""
    path = folder / "scaling.json"
    content = {
        "scaling": scaling.name,
        "experiment": scaling.experiment,
        "target": asdict(scaling.target),
        "strategy": scaling.strategy,
        **circumstances,
        "num_seeds": scaling.num_seeds,
        "is_complete": scaling.is_complete,
        "points": [_as_json(scaling, point) for point in scaling.points],
    }
    write_json(path, "scaling", content)
    return [path]


def _as_json(scaling: Scaling, point: ScalingPoint) -> dict[str, Any]:
    speed_up, efficiency = scaling.speed_up(point), scaling.step_efficiency(point)
    return {
        "mode": point.mode.value,
        "num_workers": point.num_workers,
        "batch_size": point.batch_size,
        "overrides": point.side.overrides,
        "num_reached": point.num_reached,
        "time_to_target_seconds": point.seconds,
        "device_seconds": point.device_seconds,
        "speed_up": asdict(speed_up) if speed_up else None,
        "efficiency": scaling.efficiency(point),
        "step_seconds": point.step_seconds,
        "step_efficiency": asdict(efficiency) if efficiency else None,
        "computation_share": point.computation_share,
        "runs": [run.as_dict() for _, run in sorted(point.side.runs.items())],
    }


def print_scaling(console: Console, scaling: Scaling, *, folder: str) -> None:
    """Print a table for each scaling mode, and the folder of the files."""
    for mode in dict.fromkeys(point.mode for point in scaling.points):
        console.print(_table(scaling, mode))
    lines = [f"folder  {folder}"]
    if any(point.computation_share is not None for point in scaling.points):
        lines.insert(
            0, "computing: one worker by itself on its part of a batch, over a step of all; the rest is exchange, and waiting for others"
        )
    if not scaling.is_complete:
        lines.insert(0, "interrupted: not every run was made")
    if (differences := differing_devices(run for point in scaling.points for run in point.side.runs.values())) is not None:
        lines.insert(0, differences)
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)


def _table(scaling: Scaling, mode: Mode) -> Table:
    constant = "the same batch for all" if mode is Mode.STRONG else "the same part of a batch for each worker"
    title = f"{scaling.experiment} · {scaling.strategy} · {mode} scaling ({constant}) to {scaling.target}"
    table = Table(title=printable(title), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("workers", "batch", "reached", "to target", "speed-up", "device time", "a step", "step efficiency", "computing"):
        table.add_column(name, justify="right")
    for point in scaling.of(mode):
        table.add_row(*_cells(scaling, point))
    return table


def _cells(scaling: Scaling, point: ScalingPoint) -> Sequence[str]:
    speed_up, efficiency, computing = scaling.speed_up(point), scaling.step_efficiency(point), point.computation_share
    is_base = point is scaling.of(point.mode)[0]
    return (
        str(point.num_workers),
        str(point.batch_size),
        f"{point.num_reached} of {len(point.times)}",
        "-" if point.seconds is None else format_seconds(point.seconds),
        "1" if is_base else _with_interval(speed_up),
        "-" if point.device_seconds is None else format_seconds(point.device_seconds),
        "-" if point.step_seconds is None else format_step(point.step_seconds),
        "1" if is_base else _with_interval(efficiency),
        "-" if computing is None else f"{computing:.0%}",
    )


def _with_interval(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    return f"{format_ratio(ratio).removesuffix('x')}\n[{ratio.low:.2g}, {ratio.high:.2g}]"
