"""What a study prints, on a terminal and into a file."""

import math
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from autotune.confirm.statistics import Ratio, RunScore
from autotune.measurement import Target, TrialResult
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.reporting import terminal
from autotune.reporting.scores import SECONDS, ConfigurationScores
from autotune.reporting.terminal import (
    Progress,
    StudyDisplay,
    format_rough,
    print_summary,
    shorten_overrides,
    verdict_rows,
    words_of_result,
)
from tests.support.patience import wait_until
from tests.support.records import make_evaluation, make_result

TARGET = Target(metric="accuracy", value=0.94, mode="max", max_train_seconds=60)
TIME = AmortisedTime(num_trainings=10_000)
EVALUATION = make_evaluation(
    12.0,
    step=10,
    epoch=1.5,
    samples=1000,
    build_seconds=2.0,
    prepare_seconds=0.5,
    evaluate_seconds=0.1,
    metric=0.91234,
    loss=0.3,
    samples_per_second=100.0,
)
BASELINE = ConfigurationScores(
    label="baseline", runs=[RunScore(20.0, reached=True), RunScore(22.0, reached=True)]
)
CHOSEN = ConfigurationScores(
    label="trial 7", runs=[RunScore(10.0, reached=True), RunScore(11.0, reached=True)]
)
OTHER = ConfigurationScores(label="trial 9", runs=[RunScore(14.0, reached=True)])
DOUBLED = Ratio(ratio=2.0, low=1.8, high=2.2, num_pairs=2)
COMMAND = "python -m autotune train experiment=cnn 'model.widths=[64,128]' " + "x" * 200


def finished(
    trial: int, outcome: Outcome, *, evaluated: bool = True, error: str | None = None
) -> TrialResult:
    """A trial that ended after one evaluation or none."""
    return make_result(trial, outcome, *(EVALUATION,) if evaluated else (), error=error)


def display(console: Console) -> StudyDisplay:
    """A study of ten trials with an hour to go."""
    return StudyDisplay(
        title="cnn · study cnn-1",
        target=TARGET,
        objective=TIME,
        num_trials=10,
        time_budget_seconds=3600,
        console=console,
    )


def summary(console: Console | None = None, **changed: Any) -> list[str]:
    """The printed summary of a study with a confirmation, in which something is changed."""
    console = console or Console(file=StringIO(), width=60, force_terminal=False)
    verdict = {
        "baseline": BASELINE,
        "chosen": CHOSEN,
        "speed_up": DOUBLED,
        "is_exported": True,
        **changed,
    }
    verdict |= {
        "overrides": ["optimizer=sgd", "model.widths=[64,128]"],
        "others": [(OTHER, "left after round 1: in the slower half")],
    }
    print_summary(
        console,
        "cnn · cnn-1",
        verdict_rows(**verdict),
        advice="more trials",
        commands=[("Train it", COMMAND)],
    )
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO


def test_a_log_has_one_plain_line_for_each_event() -> None:
    file = StringIO()
    with display(Console(file=file, width=40, force_terminal=False)) as shown:
        shown.trial_started(0, ["optimizer=sgd"])
        shown.evaluated(0, EVALUATION)
        shown.trial_finished(finished(0, Outcome.REACHED), 12.34)
        shown.trial_finished(finished(1, Outcome.CAPPED), None)
        shown.trial_finished(
            finished(
                2,
                Outcome.OUT_OF_MEMORY,
                evaluated=False,
                error="Traceback:\nout of memory \x1b[1m[4 GiB]\n",
            ),
            None,
        )
        shown.note("[bold]kept[/bold] as it is: " + "long " * 29 + "long")
    text = file.getvalue()
    assert text.splitlines() == [
        (
            "cnn · study cnn-1: target accuracy >= 0.94, 0 of 10 trials done, at most 60 min 00 s"
            " of search left"
        ),
        "trial 0  REACHED  12.3 s  accuracy 0.9123  best 12.3 s (trial 0)",
        "trial 1  CAPPED  12.5 s  accuracy 0.9123  best 12.3 s (trial 0)",
        ("trial 2  OUT_OF_MEMORY  no time  best 12.3 s (trial 0)  out of memory  [1m[4 GiB]"),
        "[bold]kept[/bold] as it is: " + "long " * 29 + "long",
    ]
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_log_says_now_and_then_how_the_study_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LOG_SECONDS", 0.02)
    file = StringIO()

    def next_line() -> str:
        """The next line that says how the study stands, in words without the time."""
        begin = len(file.getvalue())
        wait_until(lambda: file.getvalue()[begin:].count("\n") >= 2)
        line = file.getvalue()[begin:].splitlines()[-1]
        return re.sub(r"(about|elapsed) \d+ \w+", r"\1 TIME", line)

    console = Console(file=file, width=40, force_terminal=False)
    with StudyDisplay(
        title="t", target=TARGET, objective=TIME, num_trials=3, time_budget_seconds=None,
        console=console,
    ) as shown:  # fmt: skip
        assert next_line() == "elapsed TIME, 0 of 3 trials done, best none yet"
        shown.trial_started(0, ["lr=0.1"])
        shown.trial_started(1, ["lr=0.2"])
        shown.evaluated(0, EVALUATION)
        running = "trial 0 epoch 1.5 accuracy 0.9123 train 12.0 s, trial 1 not evaluated yet"
        assert next_line() == (
            "elapsed TIME, 0 of 3 trials done, best none yet, the first to end trains at most 48 s"
            f" more; running: {running}"
        )
        shown.trial_finished(finished(0, Outcome.REACHED), 12.34)
        shown.trial_paused(1)
        shown.trial_started(2, ["lr=0.3"])
        assert next_line() == (
            "elapsed TIME, 1 of 3 trials done, 1 paused, best 12.3 s (trial 0), about TIME of"
            " search left; running: trial 2 not evaluated yet"
        )
        for trial in range(3, 20):
            shown.trial_started(trial, ["lr=0.3"])
        assert next_line().endswith("trial 9 not evaluated yet, and 10 more")
    ended = file.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "log"]
    assert file.getvalue() == ended


def test_what_is_left_follows_from_what_trainings_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    target = replace(TARGET, max_train_seconds=3600.0)
    shown = Progress(Console(file=StringIO()), target, TIME)
    assert (shown.left_seconds(10), shown.describe_left(10)) == (None, "")
    now += 30  # Ray starts
    for trial in (0, 1):  # side by side
        shown.trial_started(trial, ())
    now += 100
    shown.evaluated(0, make_evaluation(80.0))
    assert shown.left_seconds(10) is None, "nothing has ended yet"
    assert shown.describe_left(10) == "the first to end trains at most 59 min more"
    shown.evaluated(1, make_evaluation(80.0))
    now += 100
    shown.trial_finished(make_result(0, Outcome.MISSED, make_evaluation(160.0)), None)
    shown.evaluated(1, make_evaluation(120.0))
    # 8 to begin, and a fourth of one that runs, at 1.4 seconds of training a second
    assert shown.left_seconds(10) == pytest.approx((8 * 160 + 40) / 1.4)
    assert shown.describe_left(10) == "about 16 min left"
    assert shown.describe_left(10, 5000.0) == "about 16 min, at most 83 min 20 s left"
    assert shown.describe_left(10, 500.0) == "at most 500.0 s left"
    shown.trial_paused(1)
    assert shown.left_seconds(10) == pytest.approx(8 * 140 / 1.4), "as long as trials of both kinds"
    assert shown.left_seconds(2) is None, "nobody knows whether one that is paused continues"
    assert shown.describe_left(2) == shown.describe_left(None) == ""
    paused = {7: ((), make_evaluation(50.0))}
    resumed = Progress(
        Console(file=StringIO()), target, TIME, num_ended=4, train_seconds=400.0, paused=paused
    )
    resumed.trial_started(7, ())
    now += 10
    resumed.evaluated(7, make_evaluation(60.0))
    assert resumed.left_seconds(5) == pytest.approx(40.0), "earlier processes tell how long"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.4, "0 s"),
        (99.0, "99 s"),
        (725.0, "12 min"),
        (11_220.0, "3 h 07 min"),
        (190_000.0, "2 days 4 h"),
    ],
)
def test_an_estimate_is_told_roughly(seconds: float, shown: str) -> None:
    assert format_rough(seconds) == shown


def test_a_trial_says_which_bounds_it_missed_and_by_how_much() -> None:
    bounds = {"g_loss": {"at_most": 0.01}, "d_loss": {"at_least": 0.5}, "loss": {"at_most": 0.3}}
    target = replace(TARGET, constraints=bounds)
    evaluation = replace(EVALUATION, metric=0.95, metrics={"g_loss": 0.0313, "d_loss": 0.4999999})
    result = make_result(3, Outcome.MISSED, evaluation)
    words = words_of_result(result, None, target, SECONDS)
    bounds_missed = ["g_loss 0.0313 > 0.01", "d_loss 0.4999999 < 0.5"]
    assert words == ["MISSED", "no time", "accuracy 0.95", *bounds_missed]


def test_a_busy_machine_does_not_fill_the_screen() -> None:
    file = StringIO()
    with display(Console(file=file, width=40, force_terminal=False)) as shown:
        for trial in range(5):
            shown.trial_withdrawn(
                finished(trial, Outcome.CONTENDED, evaluated=False, error="it waited")
            )
        shown.trial_finished(replace(finished(5, Outcome.REACHED), contention="it waited"), 12.34)
    lines = [
        line
        for line in file.getvalue().splitlines()
        if "it waited" in line or "other programs" in line
    ]
    assert lines == [
        *(
            f"trial {trial}  CONTENDED: it waited; its configuration is tried again"
            for trial in range(3)
        ),
        "other programs spoilt the times of 6 trainings (search.max_retakes, docs/measuring.md)",
    ]


def test_a_terminal_shows_running_trials_and_those_of_earlier_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    file = StringIO()
    with StudyDisplay(
        title="t",
        target=TARGET,
        objective=TIME,
        num_trials=10,
        time_budget_seconds=None,
        outcomes={Outcome.CAPPED: 4, Outcome.REACHED: 1},
        paused={5: (["lr=0.1"], EVALUATION), 6: (["lr=0.2"], None)},
        best=(3, 13.0),
        console=Console(file=file, width=100, height=30, force_terminal=True, color_system=None),
    ) as shown:
        shown.trial_started(4, ["optimizer=sgd", "model.widths=[64,128]", "optimizer.lr=0.123456"])
        shown.trial_started(5, ["lr=0.1"])
        shown.trial_finished(finished(7, Outcome.REACHED), 12.34)
        shown.trial_finished(finished(8, Outcome.CAPPED), None)
    text = file.getvalue()
    for part in (
        "optimizer=sgd widths=[64,128] lr=0.123",
        "0.9123",  # a trial that was paused shows its last evaluation
        "REACHED 2 · CAPPED 5 · paused 1",
        "best 12.3 s (trial 7) · 7 of 10 trials done · elapsed 0 s",
        "trial 7  REACHED",  # a new best leaves a line that stays
    ):
        assert part in text, part
    assert "trial 8  CAPPED" not in text


def test_the_summary_compares_and_says_what_to_type_next(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = summary()
    assert (
        "  speed-up  2.00x (interval 1.80x to 2.20x), n = 2 pairs, reached in 2 of 2 runs" in lines
    )
    assert "            model.widths=[64,128]" in lines
    assert "  others    trial 9: 14.0 s (1 run), left after round 1: in the slower half" in lines
    assert "more trials" in lines
    assert f"  {COMMAND}" in lines, "a command stays on one line"
    monkeypatch.setenv("TERM", "xterm-256color")
    assert any(
        COMMAND in line
        for line in summary(
            Console(file=StringIO(), width=60, force_terminal=True, color_system="standard")
        )
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"speed_up": replace(DOUBLED, low=0.9)},
            "not shown to be faster than the baseline, nor slower",
        ),
        (
            {"is_exported": False},
            "best      no configuration was shown to be faster than the baseline",
        ),
        (
            {"speed_up": Ratio(ratio=0.8, low=0.7, high=0.9, num_pairs=2)},
            "slower than the baseline",
        ),
        ({"chosen": None}, "the baseline: no other configuration reached the target in the search"),
        ({"speed_up": None}, "speed-up  not measured"),
        (
            {"speed_up": Ratio(ratio=4.55, low=0.0, high=math.inf, num_pairs=1)},
            "speed-up  not shown, n = 1 pair",
        ),
    ],
)
def test_the_summary_claims_no_more_than_was_measured(
    changed: dict[str, Any], expected: str
) -> None:
    lines = summary(**changed)
    assert any(expected in line for line in lines)
    assert not [line for line in lines if "4.55" in line], "a ratio that shows nothing is no number"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "(no overrides)"),
        (
            ["optimizer.lr=0.0123456", "batch_size=512", "precision=bf16", "+a.b=[1,2]"],
            "lr=0.0123 batch_size=512 precision=bf16 b=[1,2]",
        ),
        (["run.name=1e", "flag"], "name=1e flag"),
    ],
)
def test_overrides_are_shortened_without_losing_their_values(
    overrides: Sequence[str], words: str
) -> None:
    assert shorten_overrides(overrides) == words
