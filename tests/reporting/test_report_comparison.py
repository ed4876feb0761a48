"""A comparison in figures, on a terminal and in files: nothing clipped, nothing claimed beyond what was measured."""

import csv
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from autotune.comparison import RunScore
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.reporting.compared import ComparedSide, Comparison, verdict, write_comparison
from autotune.reporting.comparison_charts import comparison_charts
from autotune.reporting.comparison_terminal import ComparisonDisplay, print_comparison
from autotune.reporting.drawing import write_charts

pytestmark = pytest.mark.slow

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60)


def run(seconds: float, *, reached: bool = True, steps: int = 100, started_at: float = 0.0) -> TrialResult:
    """A run of two evaluations that prepared for no time."""
    evaluations = [
        Evaluation(
            step=round(steps * part),
            epoch=part,
            samples=round(1000 * part),
            build_seconds=2.0,
            prepare_seconds=0.0,
            train_seconds=seconds * part,
            evaluate_seconds=0.1,
            metric=metric,
            loss=math.nan,
            samples_per_second=100.0,
            peak_memory_bytes=None,
            energy_joules=None,
        )
        for part, metric in ((0.5, 0.6), (1.0, 0.95 if reached else 0.85))
    ]
    return TrialResult(
        trial=0,
        values={},
        overrides=(),
        seed=3,
        outcome=Outcome.REACHED if reached else Outcome.MISSED,
        evaluations=tuple(evaluations),
        started_at=started_at,
        stopped_at=started_at + seconds,
        fingerprint={},
        test_metric=0.91,
    )


CRASHED = replace(run(1.0), outcome=Outcome.ERRORED, evaluations=(), error="Traceback:\nboom", test_metric=None)


def side(
    name: str, runs: Sequence[TrialResult], *, overrides: tuple[str, ...] = ("optimizer.lr=0.1",), batch_size: int = 64
) -> ComparedSide:
    return ComparedSide(
        name=name,
        overrides=overrides,
        config={"batch_size": batch_size},
        runs=dict(enumerate(runs)),
        scores={
            pair: RunScore(each.last.warm_seconds if each.last else None, reached=each.outcome is Outcome.REACHED)
            for pair, each in enumerate(runs)
        },
    )


def compared(a: Sequence[TrialResult], b: Sequence[TrialResult], *, num_seeds: int | None = None) -> Comparison:
    sides = (side("a", a), side("b", b, overrides=("optimizer.lr=0.2", "runtime.channels_last=true")))
    return Comparison(name="compare-cnn-1", experiment="cnn", target=TARGET, num_seeds=num_seeds or len(a), sides=sides)


def times(*seconds: float, missed: Collection[int] = (), steps: int = 100) -> list[TrialResult]:
    return [run(each, reached=place not in missed, steps=steps, started_at=10.0 * place) for place, each in enumerate(seconds)]


PLAIN = compared(times(4.0, 6.0, 5.0), times(2.0, 3.0, 2.5, steps=50))
COMPARISONS: Mapping[str, Comparison] = {
    "plain": PLAIN,
    "ten pairs": compared(times(*np.linspace(4, 6, 10)), times(*np.linspace(2, 4, 10))),
    "a fell short": compared(times(4.0, 6.0, missed=[0]), times(2.0, 3.0)),
    "a never reached": compared(times(4.0, 6.0, missed=[0, 1]), times(2.0, 3.0)),
    "b never reached": compared(times(4.0, 6.0), times(2.0, 3.0, missed=[0, 1])),
    "both fell short": compared(times(4.0, 6.0, 5.0, missed=[0]), times(2.0, 3.0, 2.0, missed=[1])),
    "neither reached": compared(times(4.0, 6.0, missed=[0, 1]), times(2.0, 3.0, missed=[0, 1])),
    "a crash": compared([CRASHED, run(4.0)], times(2.0, 2.0)),
    "all crashed": compared([CRASHED, CRASHED], [CRASHED, CRASHED]),
    "no run": compared([], [], num_seeds=5),
    "one run": compared(times(3.0), [], num_seeds=5),
    "one pair": compared(times(3.0), times(2.0), num_seeds=5),
    "a long way apart": compared(times(100.0, 120.0), times(0.01, 0.02)),
    "long names": replace(
        PLAIN,
        experiment="an_experiment_of_a_very_long_name",
        sides=tuple(replace(each, overrides=("model.something_long=[1,2,3]",) * 12) for each in PLAIN.sides),  # type: ignore[arg-type]
    ),
}


def printed(comparison: Comparison) -> list[str]:
    """What stands in a log file."""
    console = Console(file=StringIO(), width=40, force_terminal=False)
    print_comparison(console, comparison, folder="outputs/compare-cnn-1")
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_has_its_charts(name: str, tmp_path: Path) -> None:
    paths = write_charts(tmp_path / "new", comparison_charts(COMPARISONS[name]))
    assert [path.name for path in paths] == ["comparison.html", "curves.html"]
    assert all("NaN" not in path.read_text().partition("Plotly.newPlot")[2] for path in paths)


def test_the_chart_shows_every_run_and_both_ratios() -> None:
    figure = comparison_charts(PLAIN)[0].figure
    marks = [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "markers"]
    runs = [x for trace in marks if trace.xaxis == "x" for x in trace.x]
    assert sorted(runs) == [2.0, 2.5, 3.0, 4.0, 5.0, 6.0]
    assert [trace.x[0] for trace in figure.data if trace.type == "bar" and trace.xaxis == "x"] == [5.0, 2.5]
    assert figure.layout.xaxis2.title.text == "a / b: 2.00x [2, 2], n = 3"
    assert figure.layout.xaxis4.title.text == "a / b: no difference shown [1, 1], n = 3"
    assert (figure.layout.xaxis.title.text, figure.layout.xaxis3.title.text) == ("Time to target (s)", "Time of a training step (ms)")
    assert [trace.name for trace in marks if trace.showlegend] == [
        "a: optimizer.lr=0.1 (3 runs)",
        "b: optimizer.lr=0.2 runtime.channels_last=true (3 runs)",
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", "b reaches the target 2.00x as fast as a (interval 2.00x to 2.00x, n = 3 pairs)"),
        ("a fell short", "which is faster is not resolved (interval 0.00x to "),
        ("a never reached", "side a never reached the target; a / b is at least 2.00x (interval from"),
        ("b never reached", "side b never reached the target; a / b is not shown"),
        ("both fell short", "which is faster is not resolved (interval 0.05x to "),
        ("neither reached", "neither side ever reached the target"),
        ("a crash", "which is faster is not resolved (interval 0.00x to "),
        ("all crashed", "neither side ever reached the target"),
        ("no run", "nothing to compare: no pair of runs ended"),
        ("one run", "nothing to compare: no pair of runs ended"),
    ],
)
def test_a_verdict_claims_no_more_than_was_measured(name: str, said: str) -> None:
    assert verdict(COMPARISONS[name]).startswith(said)


def test_a_verdict_says_where_nothing_is_resolved() -> None:
    open_ended = compared(times(4.0, 2.0, 5.0), times(2.0, 4.0, 3.0))
    assert re.fullmatch(r"which is faster is not resolved \(interval 0\.\d+x to \d+\.\d+x, n = 3 pairs\)", verdict(open_ended))


def test_the_table_tells_time_steps_and_step_time_and_is_never_cut() -> None:
    lines = printed(PLAIN)
    assert lines[1:5] == ["cnn · compare-cnn-1", "  target  accuracy >= 0.9", "  a       optimizer.lr=0.1",
                          "  b       optimizer.lr=0.2 runtime.channels_last=true"]  # fmt: skip
    assert lines[5:12] == [
        "                              a       b   a / b",
        "  reached                3 of 3  3 of 3",
        "  time to target         5.00 s  2.50 s   2.00x (interval 2.00x to 2.00x)",
        "  steps to target           100      50   2.00x (interval 2.00x to 2.00x)",
        "  step time               50 ms   50 ms   1.00x (interval 1.00x to 1.00x)",
        "  build, once a process  2.00 s  2.00 s",
        "  test accuracy            0.91    0.91",
    ]
    assert lines[-1] == "  folder  outputs/compare-cnn-1"


def test_what_a_reader_must_know_stands_below_the_table() -> None:
    lines = printed(COMPARISONS["one run"])
    assert "  interrupted after 1 of 10 runs" in lines
    assert any(line.split() == ["time", "to", "target", "3.00", "s", "-"] for line in lines)
    assert "  a: 1 without a time: ERRORED boom" in printed(COMPARISONS["a crash"])
    sides = (PLAIN.sides[0], replace(PLAIN.sides[1], config={"batch_size": 128}))
    assert "  a step of a is 64 samples, one of b 128" in printed(replace(PLAIN, sides=sides))
    both = printed(COMPARISONS["both fell short"])
    assert any("7.50 s" in line and "2.14x (interval " in line for line in both)
    assert "  in the 1 pair in which both reached the target, a / b is 2.50x; above it counts the misses" in both


def test_step_time_is_told_of_runs_that_fell_short_too() -> None:
    ratio = COMPARISONS["neither reached"].step_ratio
    assert ratio is not None
    assert (ratio.ratio, ratio.num_pairs) == (2.0, 2)
    assert COMPARISONS["all crashed"].step_ratio is None


def test_a_log_has_a_line_for_each_run_that_ended() -> None:
    file = StringIO()
    console = Console(file=file, width=30, force_terminal=False)
    with ComparisonDisplay(title="cnn · one", target=TARGET, sides=["a: x=1", "b: x=[2]"], num_runs=4, console=console) as shown:
        shown.run_started("a", 7)
        shown.evaluated(run(4.0).evaluations[0])
        shown.run_finished("a", run(4.0), 4.0)
        shown.run_started("b", 7)
        shown.run_finished("b", CRASHED, None)
    assert file.getvalue().splitlines() == [
        "cnn · one: target accuracy >= 0.9, 4 runs",
        "  a: x=1",
        "  b: x=[2]",
        "run 1 of 4  a  REACHED  4.00 s  100 steps  40 ms a step  accuracy 0.95",
        "run 2 of 4  b  ERRORED  no time  boom",
    ]


def test_a_terminal_shows_the_run_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    file = StringIO()
    console = Console(file=file, width=120, force_terminal=True, color_system=None)
    with ComparisonDisplay(title="cnn", target=TARGET, sides=["a: x=1", "b: x=2"], num_runs=4, console=console) as shown:
        shown.run_started("a", 7)
        shown.evaluated(run(4.0).evaluations[0])
    assert "run 1 of 4: a, seed 7 · " in file.getvalue()
    assert "epoch 0.5  accuracy 0.6  train 2.0 s" in file.getvalue()


def test_files_hold_every_run_in_the_order_they_were_made(tmp_path: Path) -> None:
    write_comparison(tmp_path, COMPARISONS["a never reached"], {"device": "a machine"})
    found = json.loads((tmp_path / "compare.json").read_text())
    assert (found["device"], found["num_pairs"], found["is_complete"]) == ("a machine", 2, True)
    assert found["a_over_b"]["time_to_target"] == {
        "ratio": 2.0,
        "low": 2.0,
        "high": None,
        "num_pairs": 2,
        "claim": "at least",
    }
    assert (found["a"]["times_seconds"], found["a"]["lower_bounds_seconds"], found["a"]["num_reached"]) == ([], [4.0, 6.0], 0)
    assert (found["a"]["expected_seconds"], found["b"]["expected_seconds"]) == (None, 2.5)
    assert [(each["side"], each["pair"]) for each in found["runs"]] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert len(found["runs"][0]["evaluations"]) == 2
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["side"], row["outcome"], row["score"], row["step_seconds"]) for row in rows] == [
        ("a", "MISSED", "", "0.04"),
        ("b", "REACHED", "2.0", "0.02"),
        ("a", "MISSED", "", "0.06"),
        ("b", "REACHED", "3.0", "0.03"),
    ]
