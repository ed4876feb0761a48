"""The HTML report of a study: what it says, that text stays text, and that it stays small."""

import base64
import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autotune.api import TuneResult
from autotune.config.command_line import run_command
from autotune.export import report_command
from autotune.measurement import Target, TrialResult
from autotune.outcome import Outcome
from autotune.recording import write_recording
from autotune.reporting.html import write_study_report
from autotune.reporting.study_files import write_json, write_trials
from autotune.space import SearchSpace
from tests.support.records import make_evaluation, make_result

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60.0)
SPACE = {
    "optimizer": ["sgd", "adam"],
    "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
}
HOSTILE = """</script><script>alert(1)</script>"'><img src=x onerror=alert(2)>{{ 7 * 7 }}"""


def ended(
    trial: int, outcome: Outcome, seconds: float, *, num_evaluations: int = 5, **changed: Any
) -> TrialResult:
    values = changed.pop(
        "values", {"optimizer": "adam" if trial % 2 else "sgd", "lr": 10 ** -(1 + trial % 7 / 3)}
    )
    top = 0.91 if outcome is Outcome.REACHED else 0.7
    evaluations = [
        make_evaluation(
            seconds * step / num_evaluations,
            step=step,
            epoch=float(step),
            samples=step,
            build_seconds=0.1,
            metric=top * step / num_evaluations,
            num_workers=1,
            device_kind="cpu",
            outcome=outcome if step == num_evaluations else None,
        )
        for step in range(1, num_evaluations + 1)
    ]
    times = {"started_at": 1e9 + 10 * trial, "stopped_at": 1e9 + 10 * trial + seconds}
    return make_result(trial, outcome, *evaluations, values=values, **times, **changed)


TRIALS = [
    ended(0, Outcome.REACHED, 12.0),
    ended(1, Outcome.REACHED, 4.0),
    ended(2, Outcome.CAPPED, 5.0),
    ended(3, Outcome.STOPPED, 1.0, num_evaluations=1),
    ended(4, Outcome.ERRORED, 0.0, num_evaluations=0, error="ValueError: lr is too odd"),
]


def arm(times: Sequence[float], misses: Sequence[float] = (), **more: Any) -> dict[str, Any]:
    return {
        "unit": "s",
        "times_seconds": list(times),
        "lower_bounds_seconds": list(misses),
        "num_runs": len(times) + len(misses),
        "num_reached": len(times),
        **more,
    }


SUMMARY: dict[str, Any] = {
    "study": "one",
    "experiment": "cnn",
    "trial": 1,
    "objective": {"quantity": "time to target", "unit": "s"},
    "changes": [
        {"key": "optimizer", "baseline": "sgd", "best": "adam"},
        {"key": "epochs", "baseline": 20, "best": 20},
    ],
    "baseline": arm([12.0, 11.0, 13.0]),
    "best": arm([4.0, 3.0, 5.0]),
    "speed_up": {"ratio": 3.0, "low": 2.5, "high": 3.6, "num_pairs": 3, "claim": "measured"},
    "candidates": [
        {
            "trial": 1,
            "overrides": ["optimizer=adam", "lr=0.046"],
            **arm([4.0, 3.0, 5.0]),
            "why": "chosen",
        },
        {
            "trial": 7,
            "overrides": ["optimizer=sgd"],
            **arm([6.0], [9.0]),
            "why": "left after round 2: in the slower half",
        },
    ],
    "wall_seconds": 100.0,
    "device": "a device",
    "versions": {"torch": "2.13"},
    "command": "python -m autotune experiment=cnn",
    "settings": {"sampler": "FreezeThawSampler"},
    "seeds": {"study": 0, "confirmation": [77001, 77002]},
}


def a_study(
    folder: Path,
    results: Sequence[TrialResult] = TRIALS,
    summary: dict[str, Any] | None = None,
    target: Target = TARGET,
    space: Any = None,
) -> Path:
    folder.mkdir(parents=True)
    scores = {
        result.trial: result.time_to_target_seconds
        for result in results
        if result.outcome is Outcome.REACHED
    }
    space = space or SPACE
    write_trials(folder / "trials.csv", SearchSpace.from_mapping(space, "space"), results, scores)  # type: ignore[arg-type]
    write_recording(
        folder / "recording",
        results=results,
        target=target,
        space=space,
        source="a test",
        baseline=0,
    )
    if summary is not None:
        write_json(folder / "summary.json", summary)
    return folder


class _Page(HTMLParser):
    """Text, headings, tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.headings: dict[str, str] = {}
        self.ids: list[str] = []
        self._heading = ""
        self._is_shown = True
        self.texts: list[str] = []
        self._is_figures = False
        self.feed(page)
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self._is_shown = tag not in ("script", "style")
        self._is_figures = ("id", "figures") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._is_shown = True

    def handle_data(self, data: str) -> None:
        if self._is_shown:
            self.texts.append(data)
        elif self._is_figures:
            self.figures = json.loads(data)


def read(path: Path) -> _Page:
    return _Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> _Page:
    """The report of a study with a confirmation, of which all files are there."""
    failures = ["optimizer=adam: all of 2 trials failed (2 ERRORED: ValueError: <odd>)"]
    summary = SUMMARY | {"failures": failures}
    folder = a_study(tmp_path_factory.mktemp("studies") / "one", summary=summary)
    machine = {"host": "a-host", "processor": {"name": "EPYC"}, "gpus": [{"name": "H200"}]}
    (folder / "machine.yaml").write_text(yaml.safe_dump(machine))
    (folder / "trace.csv").write_text(
        "order,trial,worker,started_seconds,stopped_seconds,from_train_seconds,train_seconds,outcome\n"
        "0,9,1,0,1,0,1,LOST\n1,3,0,0,1,0,1,PAUSED\n2,3,0,2,3,1,2,STOPPED\n"
    )
    return read(write_study_report(folder))


@pytest.mark.parametrize(
    "said",
    [
        "3 times as fast as the baseline",
        "3.00x (interval 2.50x to 3.60x), n = 3 pairs",
        "optimizer=adam: all of 2 trials failed (2 ERRORED: ValueError: <odd>)",
        "optimizer sgd adam",
        "epochs 20 20 (same)",
        "reached in 3 of 3 runs",
        "13 trainings each saves 8.00 s",  # 100 s of search, 8 s less each time
        "reached in 1 of 2 runs",
        "6, ≥ 9 left after round 2: in the slower half",
        "12, 11, 13 what all are compared with",
        "Seconds a step 2.4 s 0.8 s",
        *(Outcome[name].traits.meaning for name in ("CAPPED", "STOPPED", "ERRORED", "LOST")),
        "ValueError: lr is too odd",
        "77001, 77002",
        "a-host",
        "H200",
        "torch 2.13",
        "FreezeThawSampler",
        "Workers 2",
        "Pauses 1",
        "Began 2001-09-09",
    ],
)
def test_the_page_tells_answer_outcomes_and_provenance(page: _Page, said: str) -> None:
    assert said in page.text


def test_what_was_not_there_is_not_told(page: _Page) -> None:
    assert Outcome.DIVERGED.traits.meaning not in page.text
    assert "Seconds of preparing" not in page.text, "both took none"


def hostile_study(parent: Path) -> Path:
    """A study all of whose texts are tags and scripts."""
    target = Target(metric=HOSTILE, value=0.9, mode="max", max_train_seconds=60.0)
    space = {"key": [HOSTILE, "b"]}
    results = [
        ended(0, Outcome.REACHED, 12.0, values={"key": HOSTILE}),
        ended(1, Outcome.ERRORED, 4.0, values={"key": "b"}, error=HOSTILE),
    ]
    summary = SUMMARY | {
        "experiment": HOSTILE,
        "device": HOSTILE,
        "command": HOSTILE,
        "settings": {HOSTILE: HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "objective": {"quantity": HOSTILE, "unit": HOSTILE},
        "changes": [{"key": HOSTILE, "baseline": HOSTILE, "best": [HOSTILE]}],
        "candidates": [{"trial": HOSTILE, "overrides": [HOSTILE], **arm([1.0]), "why": HOSTILE}],
    }
    folder = a_study(parent / "<img src=x onerror=alert(1)>", results, summary, target, space)
    (folder / "pareto_front.csv").write_text("")
    with (folder / "pareto_front.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["trial", HOSTILE, "b (s)", "picked_by", "overrides"], [0, 1.0, 2.0, HOSTILE, HOSTILE]]
        )
    return folder


def large_study(folder: Path, num_trials: int) -> Path:
    outcomes = [Outcome.REACHED, Outcome.CAPPED, Outcome.STOPPED]
    results = [
        ended(number, outcomes[number % 3], 1 + number % 37, num_evaluations=100)
        for number in range(num_trials)
    ]
    return a_study(folder, results, SUMMARY)


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    page = read(write_study_report(hostile_study(tmp_path)))
    assert page.tags.count("script") == 3
    words = json.dumps(page.figures)
    assert "<" not in re.sub("<br>|<extra></extra>", "", words), "Plotly reads tags in texts"
    assert "&lt;script&gt;" in words
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("{{ 7 * 7 }}") > 10
    assert len(page.ids) == len(set(page.ids))


def test_the_page_needs_nothing_beside_it_and_tells_its_charts_in_words(page: _Page) -> None:
    loaded = {value for name, value in page.attributes if name in ("src", "href")}
    assert all(value.startswith(("#", "data:")) for value in loaded)
    anchors = {value[1:] for value in loaded if value.startswith("#")}
    assert anchors <= set(page.ids)
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert any(
        label.startswith("5 trials over the search. The best score goes from 12.0 s to 4.00 s.")
        for label in labels
    )
    assert page.tags.count("table") == page.tags.count("caption")
    assert page.tags.count("h1") == 1


def trials_of(trace: dict[str, Any]) -> "np.ndarray[Any, Any]":
    """Numbers of the trials that a trace shows."""
    numbers = trace.get("customdata", {"bdata": "", "dtype": "i4"})
    return np.frombuffer(base64.b64decode(numbers["bdata"]), numbers["dtype"])


@pytest.mark.slow
def test_a_thousand_trials_stay_small(tmp_path: Path) -> None:
    path = TuneResult("large", large_study(tmp_path / "large", 1000)).report()
    assert path.stat().st_size < 6e6
    page = read(path)
    assert "100 of 1000 trials" in page.text
    charts = [
        name
        for name, figure in page.figures.items()
        if any(999 in trials_of(trace) for trace in figure["data"])
    ]
    assert charts == ["search", "curves"]


NOTHING = SUMMARY | {
    "trial": None,
    "changes": [],
    "baseline": None,
    "best": None,
    "speed_up": None,
    "candidates": [],
}


@pytest.mark.parametrize(
    ("results", "changed", "told"),
    [
        (TRIALS, {}, "Not confirmed: trial 1 was fastest in the search"),
        (
            TRIALS,
            {
                "baseline": arm([], [9.0]),
                "candidates": [
                    {"trial": 1, "overrides": [], **arm([], [9.0]), "why": "never reached"}
                ],
            },
            "Nothing reached the target again on fresh seeds",
        ),
        (TRIALS[2:], {}, "Nothing reached accuracy ≥ 0.9 Closest: trial 2, accuracy 0.7, with"),
        (
            [ended(0, Outcome.MISSED, 12.0, values={})],
            {},
            "Closest: trial 0, accuracy 0.7, the baseline",
        ),
    ],
)
def test_a_study_without_anything_confirmed_says_what_came_closest(
    results: Sequence[TrialResult], changed: dict[str, Any], told: str, tmp_path: Path
) -> None:
    assert (
        told in read(write_study_report(a_study(tmp_path / "one", results, NOTHING | changed))).text
    )


def test_the_page_shows_further_metrics_and_the_bounds_that_trials_missed(tmp_path: Path) -> None:
    target = replace(TARGET, constraints={"g<loss": {"at_most": 0.01}})
    results = [
        make_result(trial, Outcome.MISSED, make_evaluation(metric=metric, metrics=metrics))
        for trial, metric, metrics in (
            (0, 0.95, {"g<loss": 0.031}),
            (1, 0.93, {"g<loss": 0.0125, "d": 4.5}),
            (2, 0.85, {"g<loss": 0.001}),
        )
    ]
    page = read(write_study_report(a_study(tmp_path / "one", results, NOTHING, target)))
    assert (
        "Nothing reached accuracy ≥ 0.9, g<loss ≤ 0.01 Closest: trial 2, accuracy 0.85" in page.text
    )
    assert "Metric d g<loss Values" in page.text
    assert "1 MISSED 0.93, g<loss 0.0125 > 0.01 4.5 0.0125" in page.text


def test_a_training_that_reports_no_loss_has_a_report(tmp_path: Path) -> None:
    results = [
        replace(
            result, evaluations=tuple(replace(each, loss=math.nan) for each in result.evaluations)
        )
        for result in TRIALS
    ]
    page = read(write_study_report(a_study(tmp_path / "one", results, SUMMARY)))
    assert "3 times as fast as the baseline" in page.text


def test_a_gain_that_may_be_none_is_not_claimed(tmp_path: Path) -> None:
    summary = SUMMARY | {
        "speed_up": {"ratio": 1.1, "low": 0.9, "high": None, "num_pairs": 3, "claim": "measured"}
    }
    page = read(write_study_report(a_study(tmp_path / "one", summary=summary)))
    assert "No configuration is shown to be faster than the baseline" in page.text
    assert (
        "Speed-up not shown, n = 3 pairs of runs on fresh seeds; interval from 0.90x, so the best"
        " one is not shown to be faster" in page.text
    )
    assert "1.1" not in page.text.partition("What to change")[0]
    assert "Paid back" not in page.text


def test_the_command_writes_the_report_or_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_study(tmp_path / "one", summary=SUMMARY)
    command = ["study=one", f"folder={tmp_path}"]
    assert run_command(report_command, command) == 0
    assert run_command(report_command, [*command, f"output={tmp_path / 'page.html'}"]) == 0
    assert (tmp_path / "page.html").read_text() == (tmp_path / "one/report.html").read_text()
    assert capsys.readouterr().err == ""


def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_study(tmp_path / "one", summary=SUMMARY)
    a_study(tmp_path / "broken")
    (tmp_path / "broken/summary.json").write_text('{"baseline": 3')
    a_study(tmp_path / "cut")
    (tmp_path / "cut/trials.csv").write_text("trial,outcome\n1,REACHED\n")
    (tmp_path / "empty").mkdir()
    for arguments, told in (
        (["study=none"], "study=none: no such study"),
        (["study=empty"], "the study has not ended"),
        (["study=broken"], "broken/summary.json: cannot be read: JSONDecodeError: Expecting"),
        (["study=cut"], "study=cut: cannot be read"),
        ([], "study: missing"),
        (["study=one", "what=1"], "what: no such key"),
        (["study=one", "output=s3://a/b"], "output"),
        (["study=one", f"output={tmp_path}/no/such.html"], "cannot be written"),
    ):
        assert run_command(report_command, [*arguments, f"folder={tmp_path}"]) == 2
        line = capsys.readouterr().err
        assert told in line
        assert line.count("\n") == 1
