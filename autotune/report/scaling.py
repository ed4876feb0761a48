"""What more workers bring: time to target, seconds a step and efficiency over their number, as records, files and tables."""

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
from autotune.measurement import Target
from autotune.outcome import Outcome
from autotune.report.compared import ComparedSide, format_step
from autotune.report.score_format import format_seconds
from autotune.report.study_files import write_json
from autotune.report.terminal import describe_target, printable


class Mode(StrEnum):
    """What stays as it is while workers are added."""

    STRONG = "strong"
    """The batch."""
    WEAK = "weak"
    """Each worker's part of it."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One number of workers."""

    mode: Mode
    num_workers: int
    batch_size: int
    """Samples a step, over all workers."""
    side: ComparedSide
    part: ComparedSide | None
    """One worker by itself on its part of the batch; None where the training does not fit one."""
    share_of_part: float
    """What of that part is one worker's."""

    @property
    def times(self) -> Mapping[int, RunScore]:
        """Warm seconds to the target, or spent without reaching it, by round."""
        return {
            number: RunScore(run.time_to_target_seconds or (run.last.warm_seconds if run.last else None), run.outcome is Outcome.REACHED)
            for number, run in self.side.runs.items()
        }

    @property
    def num_reached(self) -> int:
        """Runs that reached the target."""
        return sum(each.reached for each in self.times.values())

    @property
    def seconds(self) -> float | None:
        """Warm seconds that a success is expected to cost; None where no run reached the target."""
        expected = expected_score(list(self.times.values()))
        return expected if expected is not None and math.isfinite(expected) else None

    @property
    def device_seconds(self) -> float | None:
        """Those, times the workers."""
        return None if self.seconds is None else self.seconds * self.num_workers

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step."""
        return fmean(self.side.step_seconds.values()) if self.side.step_seconds else None

    @property
    def computation_share(self) -> float | None:
        """What a step would take with nothing to exchange, of what it takes: at most 1. The rest is exchange, and waiting for others."""
        alone, together = (dict(each.step_seconds) if each is not None else {} for each in (self.part, self.side))
        rounds = sorted(alone.keys() & together.keys())
        if not rounds:
            return None
        return min(1.0, self.share_of_part * fmean(alone[each] for each in rounds) / fmean(together[each] for each in rounds))


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """All of them, finished or interrupted."""

    name: str
    experiment: str
    target: Target
    strategy: str
    num_seeds: int
    points: tuple[ScalingPoint, ...]
    is_complete: bool

    def of(self, mode: Mode) -> list[ScalingPoint]:
        """Those of one kind, by their number of workers."""
        return [each for each in self.points if each.mode is mode]

    @property
    def each_reached(self) -> bool:
        """Whether every number of workers reached the target at least once."""
        return all(each.num_reached for each in self.points)

    def speed_up(self, point: ScalingPoint) -> Ratio | None:
        """Time to target of the fewest workers over a point's, by rounds."""
        base = self.of(point.mode)[0]
        rounds = sorted(base.times.keys() & point.times.keys())
        return ratio_of_expected_scores([base.times[each] for each in rounds], [point.times[each] for each in rounds]) if rounds else None

    def efficiency(self, point: ScalingPoint) -> float | None:
        """Speed-up of the time to target over how many times as many workers it took."""
        speed_up = self.speed_up(point)
        return None if speed_up is None else speed_up.ratio * self.of(point.mode)[0].num_workers / point.num_workers

    def step_efficiency(self, point: ScalingPoint) -> Ratio | None:
        """Samples a second and worker, over those of the fewest workers: 1 where exchange costs nothing."""
        base = self.of(point.mode)[0]
        one, other = base.side.step_seconds, point.side.step_seconds
        rounds = sorted(one.keys() & other.keys())
        work = point.batch_size / base.batch_size * base.num_workers / point.num_workers
        return ratio_of_means([work * one[each] for each in rounds], [other[each] for each in rounds]) if rounds else None

    @property
    def metrics(self) -> dict[str, float]:
        """What a tracker keeps of it."""
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
        "points": [_as_json(scaling, each) for each in scaling.points],
    }
    write_json(path, content)
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
    """A table for each kind of scaling, and where the files lie."""
    for mode in dict.fromkeys(each.mode for each in scaling.points):
        console.print(_table(scaling, mode))
    lines = [f"folder  {folder}"]
    if any(each.computation_share is not None for each in scaling.points):
        lines.insert(
            0, "computing: one worker by itself on its part of a batch, over a step of all; the rest is exchange, and waiting for others"
        )
    if not scaling.is_complete:
        lines.insert(0, "interrupted: not every run was made")
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)


def _table(scaling: Scaling, mode: Mode) -> Table:
    what = "the same batch for all" if mode is Mode.STRONG else "the same part of a batch for each worker"
    title = f"{scaling.experiment} · {scaling.strategy} · {mode} scaling ({what}) to {describe_target(scaling.target)}"
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
    claim = "" if ratio.claim == "measured" else f"{ratio.claim} "
    return f"{claim}{ratio.ratio:.2f}\n[{ratio.low:.2g}, {ratio.high:.2g}]"
