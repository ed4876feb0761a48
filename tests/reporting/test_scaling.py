"""What more workers bring, told from runs whose times are known."""

import json
import math
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.reporting.compared import ComparedSide
from autotune.reporting.comparison_charts import scaling_chart
from autotune.reporting.scaling import Mode, Scaling, ScalingPoint, print_scaling, write_scaling

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60)


def run(seconds: float, *, steps: int = 100, reached: bool = True) -> TrialResult:
    evaluation = Evaluation(
        step=steps,
        epoch=1.0,
        samples=1000,
        build_seconds=2.0,
        prepare_seconds=0.0,
        train_seconds=seconds,
        evaluate_seconds=0.1,
        metric=0.95 if reached else 0.5,
        loss=math.nan,
        samples_per_second=100.0,
        peak_memory_bytes=None,
        energy_joules=None,
    )
    outcome = Outcome.REACHED if reached else Outcome.MISSED
    return TrialResult(
        trial=0, values={}, overrides=(), seed=3, outcome=outcome, evaluations=(evaluation,), started_at=0.0, stopped_at=1.0, fingerprint={}
    )


def side(*runs: TrialResult) -> ComparedSide:
    return ComparedSide(name="x", overrides=(), config={}, runs=dict(enumerate(runs)), scores={})


def point(
    mode: Mode, num_workers: int, batch_size: int, whole: ComparedSide, part: ComparedSide | None, share: float = 1.0
) -> ScalingPoint:
    return ScalingPoint(mode=mode, num_workers=num_workers, batch_size=batch_size, side=whole, part=part, worker_share=share)


def scaling(*points: ScalingPoint, is_complete: bool = True) -> Scaling:
    return Scaling(name="s", experiment="cnn", target=TARGET, strategy="ddp", num_seeds=2, points=points, is_complete=is_complete)


ONE = side(run(8.0), run(12.0))
"""A tenth of a second a step, on average."""
FOUR = side(run(4.0), run(6.0))
"""Twice as fast with four times the workers."""
HALF = side(run(3.0), run(3.0))
LARGER = side(run(6.0, steps=50), run(9.0, steps=50))
"""Four times the batch, half the steps, each half as long again."""
STRONG = (point(Mode.STRONG, 1, 64, ONE, ONE), point(Mode.STRONG, 4, 64, FOUR, HALF))
WEAK = (point(Mode.WEAK, 1, 64, ONE, ONE), point(Mode.WEAK, 4, 256, LARGER, ONE))


def test_strong_scaling_is_judged_by_the_time_that_the_same_work_takes() -> None:
    found = scaling(*STRONG)
    one, four = found.points
    assert (one.seconds, four.seconds) == (10.0, 5.0)
    assert (one.device_seconds, four.device_seconds) == (10.0, 20.0)
    speed_up, efficiency = found.speed_up(four), found.step_efficiency(four)
    assert speed_up is not None
    assert efficiency is not None
    assert speed_up.ratio == pytest.approx(2)
    assert found.efficiency(four) == pytest.approx(0.5)
    assert efficiency.ratio == pytest.approx(0.5)
    assert found.efficiency(one) == pytest.approx(1)


def test_weak_scaling_is_judged_by_samples_a_second_and_worker() -> None:
    found = scaling(*WEAK)
    efficiency, speed_up = found.step_efficiency(found.points[1]), found.speed_up(found.points[1])
    assert efficiency is not None
    assert speed_up is not None
    assert efficiency.ratio == pytest.approx(0.1 / 0.15)
    assert speed_up.ratio == pytest.approx(10 / 7.5)


def test_computing_is_what_one_workers_part_takes_by_itself() -> None:
    assert STRONG[1].computation_share == pytest.approx(0.03 / 0.05)
    assert STRONG[0].computation_share == 1
    halved = point(Mode.STRONG, 4, 64, FOUR, ONE, share=0.25)  # workers that share the layers
    assert halved.computation_share == pytest.approx(0.25 * 0.1 / 0.05)
    assert point(Mode.STRONG, 4, 64, FOUR, None).computation_share is None


def test_a_run_that_falls_short_is_in_what_a_success_costs() -> None:
    found = scaling(STRONG[0], point(Mode.STRONG, 2, 64, side(run(4.0), run(20.0, reached=False)), None))
    assert found.points[1].num_reached == 1
    assert found.points[1].seconds == 24.0
    speed_up = found.speed_up(found.points[1])
    assert speed_up is not None
    assert speed_up.claim == "measured"
    assert found.all_points_reached
    assert not scaling(STRONG[0], point(Mode.STRONG, 2, 64, side(run(20.0, reached=False)), None)).all_points_reached


def test_files_tables_and_figure_tell_it(tmp_path: Path) -> None:
    found = scaling(*STRONG, *WEAK)
    (path,) = write_scaling(tmp_path, found, {"date": "today"})
    points = json.loads(path.read_text())["points"]
    assert [(each["mode"], each["num_workers"], each["batch_size"]) for each in points] == [
        ("strong", 1, 64), ("strong", 4, 64), ("weak", 1, 64), ("weak", 4, 256)
    ]  # fmt: skip
    assert points[1]["computation_share"] == pytest.approx(0.6)
    assert len(points[1]["runs"]) == 2
    out = StringIO()
    print_scaling(Console(file=out, width=120), found, folder="here")
    said = out.getvalue()
    assert "strong scaling (the same batch for all) to accuracy" in said
    assert "weak scaling (the same part of a batch for each worker)" in said
    assert "60%" in said
    assert {trace.name for trace in scaling_chart(found).figure.data} >= {"strong", "weak"}
    assert found.metrics["strong_4_step_efficiency"] == pytest.approx(0.5)


def test_what_has_no_run_yet_is_told_as_such() -> None:
    found = scaling(point(Mode.STRONG, 1, 64, side(), side()), point(Mode.STRONG, 2, 64, side(), None), is_complete=False)
    out = StringIO()
    print_scaling(Console(file=out, width=120), found, folder="here")
    assert "interrupted" in out.getvalue()
    assert found.metrics == {}
    assert not scaling_chart(found).figure.data
