"""``autotune compare``: what it refuses, and whole comparisons with real Ray."""

import csv
import itertools
import json
import os
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from mlflow import MlflowClient

from autotune.compare import compare_command
from autotune.confirm.compare import (
    ComparisonPlan,
    check_failures,
    compose_configurations,
    plan_comparison,
    take_earlier_runs,
)
from autotune.errors import ConfigError, StudyError, WorkerError
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.reporting.comparison import Compared
from autotune.search.study import Study, open_study, store_confirmation
from tests.support.patience import exit_code, wait_until
from tests.support.records import make_evaluation, make_result
from tests.support.studies import runs_of

Refusal = Callable[..., str]

_SIDES = ("a=[optimizer.lr=0.05]", "b=[optimizer.lr=0.1,model.widths=[8,16]]")
_COMMAND = (
    "experiment=cnn_smoke",
    *_SIDES,
    "num_seeds=2",
    "study.name=two",
    "runtime.num_threads=1",
)
_STOP = "study.folder=/dev/null/outputs"
"""Stops a comparison that passed every check, before Ray is started."""

_OWN_TRAINING = """
import os, time

def train(kind):
    yield {"metric": 0.5, "epoch": 1}
    if kind == "dies":
        time.sleep(3)  # the report is on its way
        os._exit(7)
    yield {"metric": 0.99, "epoch": 2}
"""


@dataclass(frozen=True)
class Whole:
    """A finished comparison and the folder it was started in."""

    working_folder: Path
    ended: subprocess.CompletedProcess[str]

    @property
    def folder(self) -> Path:
        return self.working_folder / "outputs/two"

    @property
    def found(self) -> dict[str, Any]:
        return json.loads((self.folder / "compare.json").read_text())


@pytest.fixture(scope="module")
def compared(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("compared")
    return Whole(folder, commands.run("compare", *_COMMAND, folder=folder))


def test_a_comparison_prints_its_runs_in_turns_and_a_verdict(compared: Whole) -> None:
    assert (compared.ended.returncode, compared.ended.stderr) == (0, "")
    said = compared.ended.stdout.splitlines()
    assert said[0].startswith("comparison two -> ")
    assert [line.partition(":")[0].split() for line in said[2:4]] == [
        ["a", "optimizer.lr=0.05"],
        ["b", "optimizer.lr=0.1", "model.widths=[8,16]"],
    ]
    assert [line.split()[:5] for line in said if line.startswith("run ")] == [
        ["run", f"{number}", "of", "4", side] for number, side in enumerate("abba", start=1)
    ]
    assert said[-2].startswith(
        ("  b reaches the target", "  which of a and b is faster is not resolved")
    )
    assert "n = 2 pairs" in said[-2]
    assert said[-1] == "  folder  outputs/two"


def test_its_files_hold_every_run_and_the_ratios(compared: Whole) -> None:
    files = {
        str(path.relative_to(compared.folder))
        for path in compared.folder.rglob("*")
        if path.is_file()
    }
    assert files - {".lock"} == {
        "study.log",
        "compare.json",
        "runs.csv",
        "autotune.log",
        "figures/comparison.html",
    }
    found = compared.found
    assert (found["num_seeds"], found["is_complete"], sorted(found["command"])) == (
        2,
        True,
        sorted(_COMMAND),
    )
    assert found["versions"]["torch"]
    assert found["device"]
    a, b = found["sides"]
    assert (a["name"], b["overrides"]) == ("a", ["optimizer.lr=0.1", "model.widths=[8,16]"])
    assert (a["config"]["optimizer"]["lr"], b["config"]["optimizer"]["lr"]) == (0.05, 0.1)
    ratio = b["first_over_this"]["time_to_target"]
    assert ratio["ratio"] == pytest.approx(fmean(a["times_seconds"]) / fmean(b["times_seconds"]))
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    runs = found["runs"]
    assert [(run["side"], run["pair"]) for run in runs] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert runs[0]["seed"] == runs[1]["seed"] != runs[2]["seed"] == runs[3]["seed"]
    assert all(
        before["stopped_at"] <= after["started_at"] for before, after in itertools.pairwise(runs)
    )
    with (compared.folder / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, run in zip(rows, runs, strict=True):
        last = run["evaluations"][-1]
        assert (row["side"], row["outcome"]) == (run["side"], "REACHED")
        assert float(row["step_seconds"]) == pytest.approx(last["train_seconds"] / last["step"])


def test_mlflow_has_the_comparison_and_its_runs(compared: Whole) -> None:
    client = MlflowClient(f"sqlite:///{compared.working_folder}/mlflow.db")
    runs = [*client.search_runs([each.experiment_id for each in client.search_experiments()])]
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert (parent.info.run_name, parent.data.tags["autotune.phase"], parent.info.status) == (
        "two",
        "comparison",
        "FINISHED",
    )
    ratio = compared.found["sides"][1]["first_over_this"]["time_to_target"]["ratio"]
    assert parent.data.metrics["b_time_to_target_ratio"] == pytest.approx(ratio)
    assert {each.path for each in client.list_artifacts(parent.info.run_id)} >= {
        "compare.json",
        "comparison.html",
    }
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert Counter(run.data.params["side"] for run in children) == {"a": 2, "b": 2}
    assert {(run.data.tags["autotune.phase"], run.info.status) for run in children} == {
        ("compare", "FINISHED")
    }


def test_a_finished_comparison_is_only_reported_again(
    compared: Whole, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = compared.found
    (compared.folder / "compare.json").unlink()
    monkeypatch.chdir(compared.working_folder)
    assert compare_command(_COMMAND) == 0
    said = capsys.readouterr().out
    assert "run " not in said
    assert said.splitlines()[-2:] == compared.ended.stdout.splitlines()[-2:]
    assert compared.found == before
    with pytest.raises(
        StudyError,
        match=r"study\.name=two: .* \(configurations\.a\.optimizer\.lr: 0\.05 there, 0\.06 here\)",
    ):
        compare_command([*_COMMAND[:1], "a=[optimizer.lr=0.06]", *_COMMAND[2:]])


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., ComparisonPlan]:
    """Makes the plan of a comparison that is new to this process, in the same folder each time."""

    def plan(num_seeds: int = 4) -> ComparisonPlan:
        common = ["experiment=cnn_smoke", "study.name=two", f"study.folder={tmp_path}"]
        sides = {"a": ["optimizer.lr=0.05"], "b": ["optimizer.lr=0.1"]}
        configurations = compose_configurations(common, sides, [])
        return plan_comparison(configurations, num_seeds=num_seeds, command=common, code_folders=[])

    return plan


def open_comparison(plan: ComparisonPlan) -> Study:
    study, _ = open_study(plan.name, plan.folder, storage_url=None, definition=plan.definition())
    take_earlier_runs(plan, study)
    return study


def test_a_comparison_has_the_runs_of_earlier_processes_and_may_have_more_of_them(
    planned: Callable[..., ComparisonPlan],
) -> None:
    study = open_comparison(planned())
    for index, number in [(0, 0), (1, 0), (1, 1)]:
        result = make_result(number, Outcome.REACHED, make_evaluation(1.0))
        store_confirmation(study, index, number, result)
    again = planned(num_seeds=6)
    open_comparison(again)
    assert [run.name for run, _, _ in again.ended_runs()] == ["a-0", "b-0", "b-1"]
    assert (again.num_runs, again.num_wanted) == (3, 12)
    with pytest.raises(StudyError, match=r"^num_seeds: found 1, and study\.name=two has 2 pairs"):
        open_comparison(planned(num_seeds=1))


@pytest.mark.parametrize(
    ("outcomes", "kept"),
    [
        ([Outcome.REACHED, *[Outcome.ERRORED] * 3], 1),  # which ended the earlier process
        ([Outcome.REACHED, *[Outcome.ERRORED] * 2], 3),
        ([Outcome.REACHED, Outcome.INVALID], 1),
    ],
)
def test_failures_that_ended_a_comparison_are_tried_again(
    planned: Callable[..., ComparisonPlan], outcomes: list[Outcome], kept: int
) -> None:
    study, again = open_comparison(planned()), planned()
    for number, outcome in enumerate(outcomes):
        store_confirmation(study, 1, number, make_result(number, outcome, error="boom"))
    open_comparison(again)
    assert again.num_runs == kept
    store_confirmation(study, 1, kept, make_result(kept, Outcome.REACHED, make_evaluation(1.0)))
    again = planned()
    open_comparison(again)
    assert again.configurations[1].runs[kept].outcome is Outcome.REACHED, "the later result counts"


def test_results_of_a_comparison_without_its_storage_are_not_written_over(
    planned: Callable[..., ComparisonPlan], tmp_path: Path
) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two/compare.json").write_text("{}")
    with pytest.raises(
        StudyError, match=r"study\.name=two: .*/two has compare\.json of an earlier"
    ):
        open_comparison(planned())


@pytest.mark.slow
def test_a_side_that_dies_never_reached_and_keeps_what_it_had_evaluated(
    commands: Any, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(_OWN_TRAINING)
    sides = (
        "a=[]",
        "b=[training.kind=dies]",
        "num_seeds=2",
        "allowed_targets=[own]",
        "target.value=0.9",
        "tracking=none",
    )
    command = (
        "experiment=cnn",
        "training={_target_: own.train, kind: fine}",
        *sides,
        "study.name=dies",
    )
    ended = commands.run("compare", *command, folder=tmp_path)
    assert ended.returncode == 3, ended.stderr
    assert "b never reached the target" in ended.stdout
    found = json.loads((tmp_path / "outputs/dies/compare.json").read_text())
    assert [(side["num_reached"], side["num_runs"]) for side in found["sides"]] == [(2, 2), (0, 2)]
    died = [run for run in found["runs"] if run["side"] == "b"]
    assert [(run["outcome"], len(run["evaluations"])) for run in died] == [
        ("ERRORED", 1),
        ("ERRORED", 1),
    ]
    assert found["sides"][1]["first_over_this"]["time_to_target"]["claim"] == "at most"


@pytest.mark.slow
def test_a_comparison_that_was_killed_or_interrupted_continues_where_it_stopped(
    commands: Any, tmp_path: Path
) -> None:
    command = ("experiment=cnn_smoke", *_SIDES, "num_seeds=6", "study.name=long")
    kept = tmp_path / "outputs/long/compare.json"

    def runs() -> dict[tuple[str, int], Any]:
        found = json.loads(kept.read_text()) if kept.is_file() else {"runs": []}
        return {(run["side"], run["pair"]): run for run in found["runs"]}

    made, begun = [], kept.with_name("study.log")
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGINT):
        num_before = len(runs())
        is_first = not begun.is_file()  # ended before its first run has
        process = commands.start("compare", *command, folder=tmp_path)
        wait_until(
            lambda first=is_first, n=num_before: begun.is_file() and (first or len(runs()) > n),
            process=process,
        )
        os.killpg(process.pid, number)
        assert exit_code(process) == (130 if number == signal.SIGINT else -number)
        made.append(runs())
        assert (tmp_path / "err.txt").read_text() == ""
    said = (tmp_path / "out.txt").read_text().splitlines()
    assert f"  interrupted after {len(made[-1])} of 12 runs" in said
    assert said[-2] == "interrupted; the same study goes on with"
    python, dash_m, autotune, subcommand, *arguments = shlex.split(said[-1])
    assert (python, dash_m, autotune, subcommand) == ("python", "-m", "autotune", "compare")
    assert sorted(arguments) == sorted(command)

    last = commands.succeed(subcommand, *arguments, folder=tmp_path)
    assert made[0].items() <= made[1].items() <= made[2].items() <= runs().items()
    assert len(runs()) == 12
    numbers = [line.split()[1] for line in last.splitlines() if line.startswith("run ")]
    assert numbers == [f"{number}" for number in range(len(made[-1]) + 1, 13)]
    tracked = [run for run in runs_of(tmp_path) if run.data.tags["autotune.phase"] == "compare"]
    names = Counter(run.info.run_name for run in tracked if run.info.status == "FINISHED")
    assert names == {f"{side}-{number}": 1 for side in "ab" for number in range(6)}
    assert not [run for run in runs_of(tmp_path) if run.info.status == "RUNNING"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("experiment=cnn", ["a and b: missing", "a=[key=value,...]"]),
        (
            "experiment=cnn a=[] b=[epochs=3] c=[optimizer=sgd]",
            ["a and c: are the same configuration"],
        ),
        ("experiment=cnn a=[] b=[optimzer.lr=1]", ["b: optimzer.lr: no such key"]),
        ("experiment=cnn a=[optimizer.lr=choice(0.1,0.2)] b=[]", ["a: optimizer.lr: is a sweep"]),
        ("experiment=cnn a=device=cpu b=[]", ["a: found 'device=cpu'", "a list of overrides"]),
        ("experiment=cnn a=[] b=[epochs=3] num_seeds=1", ["num_seeds: found '1'", "from 2"]),
        (
            "a=[experiment=cnn] b=[experiment=cnn_smoke]",
            ["target: a and b differ in it; set it for both, beside a and b"],
        ),
        ("a=[] b=[epochs=3]", ["no experiment", "cnn_smoke"]),
        (
            "experiment=cnn a=[] b=[model._target_=os.system]",
            ["b: ", "_target_", "allowed_targets=[os]"],
        ),
        (
            "experiment=cnn a=[] b=[epochs=3] objective.num_trainings=0",
            ["objective.num_trainings: found 0"],
        ),
        (
            "experiment=cnn a=[] b=[epochs=3]",
            ["study.folder: /dev/null/outputs", "cannot be written"],
        ),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    arguments: str, parts: list[str], refusal: Refusal
) -> None:
    said = refusal(_STOP, *arguments.split(), command=compare_command)
    assert [part for part in parts if part not in said] == [], said


def test_a_side_that_this_machine_cannot_run_is_named(refusal: Refusal) -> None:
    said = refusal(
        "experiment=cnn", "a=[device=cpu]", "b=[device=cuda]", _STOP, command=compare_command
    )
    assert said.startswith("b: cannot run here: device=cuda needs a GPU")


def test_a_dry_run_says_what_would_be_done_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sides = ["a=[]", "b=[technique=transfer,technique.source=cnn_smoke]", "device=cpu"]
    assert compare_command(["experiment=cnn", *sides, "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert "b          technique=transfer technique.source=cnn_smoke: 1 CPU and 0 GPU a run" in said
    assert "10 of each, in turns" in said
    assert "first      cnn_smoke is trained, once" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_function_gives_what_was_measured_and_says_nothing(
    commands: Any, tmp_path: Path
) -> None:
    code = """
from autotune.compare import compare
found = compare(
    ["experiment=cnn_smoke", "tracking=none"], a=["epochs=6"], b=["epochs=8"], num_seeds=2
)
print(found.is_complete, sorted(found.configurations[1].runs))
"""
    said = commands.python("-c", code, folder=tmp_path)
    assert (said.returncode, said.stdout, said.stderr) == (0, "True [0, 1]\n", "")


def side_of(*outcomes: Outcome, error: str = "") -> Compared:
    """Side b with runs that ended before their first evaluation."""
    runs = {number: make_result(0, outcome, error=error) for number, outcome in enumerate(outcomes)}
    return Compared(
        name="b", overrides=(), config={}, objective=AmortisedTime(num_trainings=1), runs=runs
    )


def test_code_that_fails_again_and_again_ends_a_comparison() -> None:
    check_failures(side_of(Outcome.ERRORED, Outcome.ERRORED), 3)
    check_failures(side_of(Outcome.ERRORED, Outcome.ERRORED, Outcome.OUT_OF_MEMORY), 3)
    with pytest.raises(WorkerError, match=r"3 runs of b in a row failed.*: boom") as failed:
        check_failures(side_of(*[Outcome.ERRORED] * 3, error="boom\nat line 3"), 3)
    assert failed.value.traceback_text == "boom\nat line 3"
    with pytest.raises(ConfigError, match=r"b: data\.root: is not there"):
        check_failures(side_of(Outcome.INVALID, error="data.root: is not there"), 3)
