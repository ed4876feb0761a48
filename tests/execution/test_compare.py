"""``autotune compare``: what it refuses, and whole comparisons with real Ray."""

import csv
import itertools
import json
import os
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
from autotune.confirm.compare import check_failures
from autotune.errors import ConfigError, WorkerError
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.reporting.comparison import Compared
from tests.support.patience import exit_code, wait_until
from tests.support.records import make_result

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
    return Whole(folder, commands.run(*_COMMAND, folder=folder, module="autotune.compare"))


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


def test_a_comparison_keeps_the_files_of_an_earlier_one(
    compared: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compared.found
    monkeypatch.chdir(compared.working_folder)
    with pytest.raises(ConfigError, match=r"^study\.name: "):
        compare_command(_COMMAND)
    assert compared.found == before


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
    ended = commands.run(*command, folder=tmp_path, module="autotune.compare")
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
def test_ctrl_c_keeps_what_was_measured(commands: Any, tmp_path: Path) -> None:
    command = ("experiment=cnn_smoke", *_SIDES, "num_seeds=50", "study.name=long", "tracking=none")
    process = commands.start(*command, folder=tmp_path, module="autotune.compare")
    kept = tmp_path / "outputs/long/compare.json"
    wait_until(kept.is_file, process=process)
    os.killpg(process.pid, signal.SIGINT)
    assert exit_code(process) == 130
    found = json.loads(kept.read_text())
    assert not found["is_complete"]
    assert 1 <= len(found["runs"]) < 100
    assert (
        f"interrupted after {len(found['runs'])} of 100 runs" in (tmp_path / "out.txt").read_text()
    )
    assert (tmp_path / "err.txt").read_text() == ""


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
