"""A comparison in a chart, on a terminal and in files: nothing claimed beyond what was measured."""

import csv
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from autotune.measurement import Target, TrialResult
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.reporting import terminal
from autotune.reporting.comparison import Compared, Comparison, verdict, write_comparison
from autotune.reporting.drawing import Chart, runs_chart, write_charts
from autotune.reporting.runs_terminal import RunsDisplay, print_comparison
from tests.support.patience import wait_until
from tests.support.records import make_evaluation, make_result

OBJECTIVE = AmortisedTime(num_trainings=1)
TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60)


def run(
    seconds: float, *, reached: bool = True, steps: int = 100, started_at: float = 0.0
) -> TrialResult:
    """A run of two evaluations that prepared for no time."""
    evaluations = [
        make_evaluation(
            seconds * part,
            step=round(steps * part),
            epoch=part,
            samples=round(1000 * part),
            build_seconds=2.0,
            evaluate_seconds=0.1,
            metric=metric,
            loss=math.nan,
            samples_per_second=100.0,
        )
        for part, metric in ((0.5, 0.6), (1.0, 0.95 if reached else 0.85))
    ]
    return make_result(
        0,
        Outcome.REACHED if reached else Outcome.MISSED,
        *evaluations,
        seed=3,
        started_at=started_at,
        stopped_at=started_at + seconds,
        test_metric=0.91,
    )


CRASHED = replace(
    run(1.0), outcome=Outcome.ERRORED, evaluations=(), error="Traceback:\nboom", test_metric=None
)


def side(
    name: str,
    runs: Sequence[TrialResult],
    *overrides: str,
    num_workers: int = 1,
    batch_size: int = 64,
) -> Compared:
    config = {
        "batch_size": batch_size,
        "parallelism": {"num_workers": num_workers},
        "lr": overrides,
    }
    # warm seconds alone
    objective = AmortisedTime(num_trainings=math.inf)  # type: ignore[arg-type]
    return Compared(
        name=name,
        overrides=overrides,
        config=config,
        objective=objective,
        runs=dict(enumerate(runs)),
    )


def compared(
    a: Sequence[TrialResult], b: Sequence[TrialResult], *, num_seeds: int | None = None
) -> Comparison:
    configurations = (
        side("a", a, "optimizer.lr=0.1"),
        side("b", b, "optimizer.lr=0.2", "runtime.channels_last=true"),
    )
    return Comparison(
        name="compare-cnn-1",
        experiment="cnn",
        target=TARGET,
        num_seeds=num_seeds or len(a),
        configurations=configurations,
    )


def times(*seconds: float, missed: Collection[int] = (), steps: int = 100) -> list[TrialResult]:
    return [
        run(each, reached=place not in missed, steps=steps, started_at=10.0 * place)
        for place, each in enumerate(seconds)
    ]


PLAIN = compared(times(4.0, 6.0, 5.0), times(2.0, 3.0, 2.5, steps=50))
WORKERS = replace(
    PLAIN,
    configurations=(
        side("a", times(8.0, 12.0, 10.0)),
        side("b", times(4.0, 6.0, 5.0), num_workers=4),
        side("c", times(6.0, 9.0, 7.5, steps=50), num_workers=4, batch_size=256),
    ),
)
COMPARISONS: Mapping[str, Comparison] = {
    "plain": PLAIN,
    "workers": WORKERS,
    "a fell short": compared(times(4.0, 6.0, missed=[0]), times(2.0, 3.0)),
    "a never reached": compared(times(4.0, 6.0, missed=[0, 1]), times(2.0, 3.0)),
    "neither reached": compared(times(4.0, 6.0, missed=[0, 1]), times(2.0, 3.0, missed=[0, 1])),
    "a crash": compared([CRASHED, run(4.0)], times(2.0, 2.0)),
    "all crashed": compared([CRASHED, CRASHED], [CRASHED, CRASHED]),
    "one run": compared(times(3.0), [], num_seeds=5),
}


def printed(comparison: Comparison) -> list[str]:
    """What is printed where there is no terminal."""
    file = StringIO()
    print_comparison(Console(file=file, width=120), comparison, folder="outputs/compare-cnn-1")
    return [line.rstrip() for line in file.getvalue().splitlines()]


def chart(comparison: Comparison) -> Chart:
    summaries = [each.summary for each in comparison.configurations]
    return runs_chart("comparison", summaries, ("red", "green", "blue"), "All runs.")


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_has_its_chart_and_table(name: str, tmp_path: Path) -> None:
    [path] = write_charts(tmp_path / "new", [chart(COMPARISONS[name])])
    assert "NaN" not in path.read_text().partition("Plotly.newPlot")[2]
    said = printed(COMPARISONS[name])
    assert said[-1] == "  folder  outputs/compare-cnn-1"
    assert ("  interrupted after 1 of 10 runs" in said) == (name == "one run")


def test_the_chart_shows_every_run_and_what_a_success_costs() -> None:
    figure = chart(PLAIN).figure
    marks = [trace for trace in figure.data if trace.type == "box"]
    assert sorted(x for trace in marks for x in trace.x) == [2.0, 2.5, 3.0, 4.0, 5.0, 6.0]
    assert [list(trace.x) for trace in figure.data if trace.type == "bar"] == [[5.0, 2.5]]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", "b reaches the target 2.00x as fast as a (interval 2.00x to 2.00x, n = 3 pairs)"),
        ("a fell short", "which of a and b is faster is not resolved (interval 0.00x to "),
        (
            "a never reached",
            "a never reached the target; a / b is at least 2.00x (interval from",
        ),
        ("neither reached", "a and b never reached the target"),
        ("one run", "no pair of runs has two times to compare"),
    ],
)
def test_a_verdict_claims_no_more_than_was_measured(name: str, said: str) -> None:
    assert verdict(COMPARISONS[name], COMPARISONS[name].configurations[1]).startswith(said)


def test_the_table_tells_time_steps_and_step_time_and_is_never_cut() -> None:
    assert printed(PLAIN)[1:13] == [
        "cnn · compare-cnn-1",
        "  target  accuracy >= 0.9",
        "  a       optimizer.lr=0.1",
        "  b       optimizer.lr=0.2 runtime.channels_last=true",
        "                              a       b  a / b",
        "  reached                3 of 3  3 of 3",
        "  time to target         5.00 s  2.50 s  2.00x (interval 2.00x to 2.00x)",
        "  steps to target           100      50  2.00x (interval 2.00x to 2.00x)",
        "  step time               50 ms   50 ms  1.00x (interval 1.00x to 1.00x)",
        "  build, once a process  2.00 s  2.00 s",
        "  test accuracy            0.91    0.91",
        "  b reaches the target 2.00x as fast as a (interval 2.00x to 2.00x, n = 3 pairs)",
    ]


def test_sides_that_differ_in_their_workers_alone_have_an_efficiency() -> None:
    _, four, larger = WORKERS.configurations
    found, weak = WORKERS.ratios(four), WORKERS.ratios(larger)
    assert not PLAIN.is_scaling
    assert {name: ratio and ratio.ratio for name, ratio in found.items()} == pytest.approx(
        {
            "time_to_target": 2.0,
            "steps_to_target": 1.0,
            "step_seconds": 2.0,
            "efficiency": 0.5,
            "step_efficiency": 0.5,
        }
    )
    assert weak["step_efficiency"] is not None
    assert weak["step_efficiency"].ratio == pytest.approx(0.1 / 0.15), (
        "by the samples of a second and worker"
    )
    said = printed(WORKERS)
    assert next(line for line in said if "workers" in line).split() == ["workers", "1", "4", "4"]
    assert "0.50x (interval" in next(line for line in said if "efficiency, to target" in line)
    assert "  samples a step             64      64     256" in said


def test_a_display_has_a_line_for_each_run_that_ended() -> None:
    file = StringIO()
    console = Console(file=file, width=120, force_terminal=False)
    shown = RunsDisplay(console, TARGET, OBJECTIVE, noun="confirmation run", num_ended=3)
    shown.labels, shown.num_runs = {0: "baseline (claim)", 1: "trial 5 (claim)"}, 8
    with shown.status:
        for result in (replace(run(4.0), trial=0), replace(CRASHED, trial=1)):
            shown.trial_started(result.trial, ())
            for evaluation in result.evaluations:
                shown.evaluated(result.trial, evaluation)
            shown.trial_finished(result, None)
    assert file.getvalue().splitlines() == [
        "confirmation run 4 of 8  baseline (claim)  REACHED  6.00 s  accuracy 0.95  100 steps"
        "  40 ms a step",
        "confirmation run 5 of 8  trial 5 (claim)  ERRORED  no time  boom",
    ]


def test_a_log_says_now_and_then_how_the_runs_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LOG_SECONDS", 0.02)
    file = StringIO()
    shown = RunsDisplay(Console(file=file, width=120, force_terminal=False), TARGET, OBJECTIVE)
    shown.labels = {0: "a"}

    def says(line: str) -> None:
        wait_until(lambda: line in re.sub(r"\d+ s (with|left)", r"TIME \1", file.getvalue()))

    with shown.status:
        says("0 runs made, elapsed TIME with them; starting new processes\n")
        shown.num_runs = 8
        shown.trial_started(0, ())
        says(" more; running: a not evaluated yet\n")
        shown.evaluated(0, run(4.0).evaluations[0])
        says("running: a epoch 0.5 accuracy 0.6 train 2.00 s\n")
        shown.trial_withdrawn(replace(run(4.0), trial=0))
        says("0 of 8 runs made, elapsed TIME with them; starting new processes\n")
        shown.trial_started(0, ())
        shown.trial_finished(replace(run(4.0), trial=0), 4.0)
        says("1 of 8 runs made, elapsed TIME with them, about TIME left; starting new processes\n")


def test_files_hold_every_run_in_the_order_they_were_made(tmp_path: Path) -> None:
    write_comparison(tmp_path, COMPARISONS["a never reached"], {"device": "a machine"})
    found = json.loads((tmp_path / "compare.json").read_text())
    a, b = found["sides"]
    assert (found["device"], found["is_complete"], a["first_over_this"]) == ("a machine", True, {})
    assert b["first_over_this"]["time_to_target"] == {
        "ratio": 2.0,
        "low": 2.0,
        "high": None,
        "num_pairs": 2,
        "claim": "at least",
        "num_pairs_lacking": None,
    }
    assert (a["times_seconds"], a["lower_bounds_seconds"], a["num_reached"]) == ([], [4.0, 6.0], 0)
    assert [(each["side"], each["pair"]) for each in found["runs"]] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["side"], row["outcome"], row["score"], row["step_seconds"]) for row in rows] == [
        ("a", "MISSED", "", "0.04"),
        ("b", "REACHED", "2.0", "0.02"),
        ("a", "MISSED", "", "0.06"),
        ("b", "REACHED", "3.0", "0.03"),
    ]
