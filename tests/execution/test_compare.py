"""``python -m autotune compare``: what it refuses, and whole comparisons with real Ray."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from mlflow import MlflowClient

from autotune.compare import compare, compare_command
from autotune.errors import ConfigError, WorkerError
from autotune.execution.comparison_plan import ComparisonPlan, compose_sides, plan_comparison
from autotune.execution.run_comparison import check_failures
from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from tests.patience import exit_code, wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]

Refusal = Callable[..., str]

_SIDES = ("a=[optimizer.lr=0.05]", "b=[optimizer.lr=0.1,model.widths=[8,16]]")
_COMMAND = ("experiment=cnn_smoke", *_SIDES, "num_seeds=2", "study.name=two", "runtime.num_threads=1")
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

    @property
    def rows(self) -> list[dict[str, str]]:
        with (self.folder / "runs.csv").open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def compared(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("compared")
    return Whole(folder, commands.run(*_COMMAND, folder=folder, module="autotune.compare"))


def test_a_comparison_ends_with_both_sides_and_their_ratio(compared: Whole) -> None:
    assert compared.ended.returncode == 0, compared.ended.stderr
    assert compared.ended.stderr == ""
    said = compared.ended.stdout.splitlines()
    assert said[:3] == [
        "cnn_smoke · two: target accuracy >= 0.9, 4 runs",
        "  a: optimizer.lr=0.05",
        "  b: optimizer.lr=0.1 model.widths=[8,16]",
    ]
    assert [line.split()[:5] for line in said if line.startswith("run ")] == [
        ["run", f"{number}", "of", "4", side] for number, side in enumerate("abba", start=1)
    ]
    assert any(line.split()[:4] == ["time", "to", "target", *line.split()[3:4]] and "x (interval" in line for line in said)
    assert any(line.startswith(("  b reaches the target", "  which is faster is not resolved")) and "n = 2 pairs" in line for line in said)
    assert said[-1] == "  folder  outputs/two"


def test_its_folder_holds_every_file(compared: Whole) -> None:
    files = {str(path.relative_to(compared.folder)) for path in compared.folder.rglob("*") if path.is_file()} - {".lock"}
    assert files == {"compare.json", "runs.csv", "autotune.log", "figures/comparison.html", "figures/curves.html"}
    assert {path.name for path in compared.working_folder.iterdir()} <= {"outputs", "mlflow.db", "mlruns"}


def test_compare_json_adds_up(compared: Whole) -> None:
    found = compared.found
    assert (found["comparison"], found["experiment"], found["num_seeds"], found["num_pairs"]) == ("two", "cnn_smoke", 2, 2)
    assert found["is_complete"]
    assert found["command"] == list(_COMMAND)
    assert found["b"]["overrides"] == ["optimizer.lr=0.1", "model.widths=[8,16]"]
    assert (found["a"]["config"]["optimizer"]["lr"], found["b"]["config"]["optimizer"]["lr"]) == (0.05, 0.1)
    for side in ("a", "b"):
        assert found[side]["num_reached"] == found[side]["num_runs"] == len(found[side]["times_seconds"]) == 2
        own = [run for run in found["runs"] if run["side"] == side]
        steps = [run["evaluations"][-1]["train_seconds"] / run["evaluations"][-1]["step"] for run in own]
        assert sorted(found[side]["step_seconds"]) == pytest.approx(sorted(steps))
    ratio = found["a_over_b"]["time_to_target"]
    assert ratio["ratio"] == pytest.approx(fmean(found["a"]["times_seconds"]) / fmean(found["b"]["times_seconds"]))
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert (ratio["num_pairs"], ratio["claim"]) == (2, "measured")
    assert found["versions"]["torch"]
    assert found["device"]


def test_runs_take_turns_one_at_a_time_and_pairs_share_a_seed(compared: Whole) -> None:
    runs = compared.found["runs"]
    assert [(run["side"], run["pair"]) for run in runs] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert runs[0]["seed"] == runs[1]["seed"] != runs[2]["seed"] == runs[3]["seed"]
    assert all(before["stopped_at"] <= after["started_at"] for before, after in itertools.pairwise(runs))
    assert all(run["test_metric"] is not None and run["fingerprint"]["device"] for run in runs)


def test_runs_csv_has_a_row_a_run(compared: Whole) -> None:
    assert [(row["run"], row["side"], row["pair"], row["outcome"]) for row in compared.rows] == [
        ("0", "a", "0", "REACHED"), ("1", "b", "0", "REACHED"), ("2", "b", "1", "REACHED"), ("3", "a", "1", "REACHED"),
    ]  # fmt: skip
    for row, run in zip(compared.rows, compared.found["runs"], strict=True):
        last = run["evaluations"][-1]
        assert float(row["time_to_target_seconds"]) == pytest.approx(last["prepare_seconds"] + last["train_seconds"])
        assert float(row["step_seconds"]) == pytest.approx(last["train_seconds"] / last["step"])


def test_mlflow_has_the_comparison_and_its_runs(compared: Whole) -> None:
    client = MlflowClient(f"sqlite:///{compared.working_folder}/mlflow.db")
    runs = [*client.search_runs([each.experiment_id for each in client.search_experiments()])]
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert (parent.info.run_name, parent.data.tags["autotune.phase"], parent.info.status) == ("two", "comparison", "FINISHED")
    assert parent.data.metrics["time_ratio"] == pytest.approx(compared.found["a_over_b"]["time_to_target"]["ratio"])
    assert parent.data.params["b"] == "optimizer.lr=0.1 model.widths=[8,16]"
    assert {each.path for each in client.list_artifacts(parent.info.run_id)} == {
        "compare.json",
        "runs.csv",
        "comparison.html",
        "curves.html",
    }
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.info.run_name for run in children} == {"a-0", "a-1", "b-0", "b-1"}
    assert Counter(run.data.params["side"] for run in children) == {"a": 2, "b": 2}
    assert {run.data.params["optimizer.lr"] for run in children} == {"0.05", "0.1"}
    assert {(run.data.tags["autotune.phase"], run.info.status) for run in children} == {("compare", "FINISHED")}
    assert all("time_to_target_seconds" in run.data.metrics for run in children)


def test_a_comparison_keeps_the_files_of_an_earlier_one(compared: Whole, commands: Any) -> None:
    before = compared.found
    again = commands.run(*_COMMAND, folder=compared.working_folder, module="autotune.compare")
    assert again.returncode == 2
    assert again.stderr.startswith("autotune: study.name: ")
    assert again.stderr.count("\n") == 1
    assert compared.found == before


@pytest.mark.slow
def test_a_side_that_dies_never_reached_and_keeps_what_it_had_evaluated(commands: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_OWN_TRAINING)
    training = "training={_target_: own.train, kind: fine}"
    sides = (
        "a=[]",
        "b=[training.kind=dies]",
        "num_seeds=2",
        "allowed_targets=[own]",
        "target.value=0.9",
        "tracking=none",
        "study.name=dies",
    )
    ended = commands.run("experiment=cnn", training, *sides, folder=tmp_path, module="autotune.compare")
    assert ended.returncode == 3, ended.stderr
    assert "side b never reached the target" in ended.stdout
    found = json.loads((tmp_path / "outputs/dies/compare.json").read_text())
    assert (found["a"]["num_reached"], found["b"]["num_reached"], found["b"]["num_runs"]) == (2, 0, 2)
    died = [run for run in found["runs"] if run["side"] == "b"]
    assert [(run["outcome"], len(run["evaluations"])) for run in died] == [("ERRORED", 1), ("ERRORED", 1)]
    assert found["a_over_b"]["time_to_target"]["claim"] == "at most"
    assert found["a_over_b"]["time_to_target"]["low"] == 0


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
    said = (tmp_path / "out.txt").read_text()
    assert f"interrupted after {len(found['runs'])} of 100 runs" in said
    assert (tmp_path / "err.txt").read_text() == ""
    assert (kept.parent / "figures/comparison.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("experiment=cnn", ["a and b: missing", "a=[key=value,...]"]),
        ("experiment=cnn b=[device=cpu]", ["a: missing"]),
        ("experiment=cnn a=[] b=[batch_size=64]", ["a and b: [] and [batch_size=64] are the same configuration"]),
        ("experiment=cnn a=[optimizer=sgd] b=[]", ["are the same configuration"]),
        ("experiment=cnn a=[] b=[optimzer.lr=1]", ["b: optimzer.lr: no such key"]),
        ("experiment=cnn a=[batch_sise=1] b=[]", ["a: batch_sise: no such key (did you mean batch_size?)"]),
        ("experiment=cnn batch_sise=1 a=[] b=[epochs=3]", ["batch_sise: no such key (did you mean batch_size?)"]),
        ("experiment=cnn a=[optimizer.lr=choice(0.1,0.2)] b=[]", ["a: optimizer.lr: is a sweep"]),
        ("experiment=cnn optimizer.lr=0.1,0.2 a=[epochs=3] b=[]", ["optimizer.lr: is a sweep"]),
        ("experiment=cnn a=[optimizer.lr=0.1,0.2] b=[]", ["a: found '0.2' in it"]),
        ("experiment=cnn a=device=cpu b=[]", ["a: found 'device=cpu'", "a list of overrides"]),
        ("experiment=cnn a=[] a=[epochs=3] b=[]", ["a: found twice"]),
        ("experiment=cnn A=[] b=[]", ["A: no such key (did you mean a=...?)"]),
        ("experiment=cnn a=[] b=[epochs=3] num_seed=5", ["num_seed: no such key (did you mean num_seeds=...?)"]),
        ("experiment=cnn a=[] b=[epochs=3] num_seeds=1", ["num_seeds: found '1'", "from 2"]),
        ("experiment=cnn a=[] b=[epochs=3] num_seeds=many", ["num_seeds: found 'many'"]),
        ("experiment=cnn a=[] b=[epochs=0]", ["b: epochs: found 0"]),
        ("experiment=cnn a=[study.name=x] b=[]", ["a: study.name=x: is shared by both sides"]),
        ("experiment=cnn a=[] b=[target.value=0.5]", ["b: target.value=0.5: is shared by both sides"]),
        ("experiment=cnn a=[] b=[tracking=none]", ["b: tracking=none: is shared by both sides"]),
        ("experiment=cnn a=[seed=1] b=[]", ["a: seed=1: is shared by both sides"]),
        ("a=[] b=[epochs=3]", ["no experiment", "cnn_smoke"]),
        ("experiment=nope a=[] b=[epochs=3]", ["experiment=nope", "cnn_smoke"]),
        ("a=[experiment=cnn] b=[experiment=cnn_smoke]", ["target: the experiments of a and b differ in it (value 0.98 and 0.9)"]),
        ("experiment=cnn a=[] b=[+model.depth=3]", ["b: model:", "depth"]),
        ("experiment=cnn a=[] b=[model._target_=os.system]", ["b: ", "_target_", "accepted are"]),
        ("experiment=cnn a=[] b=[epochs=3] study.name=../x", ["study.name: found '../x'"]),
        ("experiment=cnn a=[] b=[epochs=3] cluster.cpus_per_worker=0", ["cluster.cpus_per_worker: found 0"]),
        ("experiment=cnn a=[] b=[epochs=3] cluster.placement=heap", ["cluster.placement: found 'heap'"]),
        ("experiment=cnn a=[] b=[epochs=3] objective.num_trainings=0", ["objective.num_trainings: found 0"]),
        ("experiment=cnn a=[] b=[epochs=3]", ["study.folder: /dev/null/outputs", "cannot be written"]),
        ("experiment=cnn a=[] b=[epochs=3] --no-such-flag", ["--no-such-flag", "--help"]),
    ],
)
def test_what_cannot_be_compared_is_one_line(arguments: str, parts: list[str], refusal: Refusal) -> None:
    said = refusal(_STOP, *arguments.split(), command=compare_command)
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("compare", *_SIDES), ("scale", "workers=[1,2]")], ids=lambda arguments: arguments[0])
def test_the_driver_does_not_itself_ask_torch_for_gpus(commands: Any, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Asking would make a context on the first GPU, which keeps its memory from the runs."""
    asks = "import sys, torch\nfor name in ('is_available', 'device_count'):\n    setattr(torch.cuda, name, lambda: sys.exit('asked'))\n"
    command = ["autotune", *arguments, "experiment=cnn_smoke", _STOP]
    ran = commands.python("-c", f"{asks}sys.argv = {command}\nfrom autotune.__main__ import main\nmain()", folder=tmp_path)
    assert "asked" not in ran.stderr
    assert "/dev/null/outputs" in ran.stderr


def test_a_side_that_this_machine_cannot_run_is_named(refusal: Refusal) -> None:
    said = refusal("experiment=cnn", "a=[device=cpu]", "b=[device=cuda]", _STOP, command=compare_command)
    assert said.startswith("b: cannot run here: device=cuda needs a GPU")


def test_a_missing_data_set_names_its_side(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = refusal("experiment=cnn", "a=[]", "b=[data=cifar10,data.root=empty]", command=compare_command)
    assert said.startswith("b: ")
    assert "data.download=true" in said


def test_the_configuration_of_both_sides_is_printed_and_nothing_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_command(["experiment=cnn", *_SIDES, "--cfg", "job"]) == 0
    one, other = capsys.readouterr().out.removeprefix("---\n").split("---\n")
    assert one.startswith("# a: optimizer.lr=0.05\n")
    assert "lr: 0.05" in one
    assert other.startswith("# b: optimizer.lr=0.1 model.widths=[8,16]\n")
    assert "lr: 0.1" in other


def test_an_experiment_of_ones_own_is_a_side(write: Callable[[str, str], str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / write("mine", "defaults: [cnn]\nbatch_size: 48\n")
    assert compare_command(["a=[experiment=cnn]", "b=[experiment=mine]", "--config-dir", str(folder), "--cfg", "job"]) == 0
    one, other = capsys.readouterr().out.removeprefix("---\n").split("---\n")
    assert ("batch_size: 64" in one, "batch_size: 48" in other) == (True, True)


def test_a_dry_run_says_what_would_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert compare_command([*_COMMAND, "dry_run=true", "device=cpu"]) == 0
    said = capsys.readouterr().out
    assert "b          [optimizer.lr=0.1, model.widths=[8,16]]: 1 CPU and 0 GPU a run" in said
    assert "2 of each side, in turns" in said
    assert not list(tmp_path.iterdir())


def test_a_dry_run_names_what_a_side_starts_from_and_does_not_train_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compare_command(["experiment=cnn", "a=[]", "b=[technique=transfer,technique.source=cnn_smoke]", "dry_run=true"]) == 0
    assert "first      cnn_smoke is trained, once" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_function_refuses_what_the_command_does() -> None:
    with pytest.raises(ConfigError, match="are the same configuration"):
        compare(["experiment=cnn"], a=[], b=["batch_size=64"], num_seeds=2)


@pytest.mark.slow
def test_the_function_gives_what_was_measured_and_says_nothing(commands: Any, tmp_path: Path) -> None:
    code = (
        "from autotune.compare import compare\n"
        "found = compare(['experiment=cnn_smoke', 'tracking=none'], a=['epochs=6'], b=['epochs=8'], num_seeds=2)\n"
        "print(found.is_complete, found.step_ratio.num_pairs, sorted(found.sides[1].runs))"
    )
    said = commands.python("-c", code, folder=tmp_path)
    assert (said.returncode, said.stdout, said.stderr) == (0, "True 2 [0, 1]\n", "")


def test_a_side_may_be_an_experiment_of_its_own() -> None:
    shared = ["target.value=0.95", "target.max_train_seconds=9", "optimizer=sgd"]
    one, other = compose_sides(shared, {"a": ["experiment=cnn"], "b": ["experiment=cnn_smoke", "optimizer=adamw"]}, [])
    assert (one.experiment, other.experiment) == ("cnn", "cnn_smoke")
    assert other.composed.choices["optimizer"] == "adamw"
    plan = plan_comparison((one, other), num_seeds=2)
    assert plan.name.startswith("compare-cnn-and-cnn_smoke-")
    assert plan.experiment == "cnn and cnn_smoke"


@pytest.fixture
def plan(tmp_path: Path) -> ComparisonPlan:
    sides = compose_sides(["experiment=cnn", f"study.folder={tmp_path}"], {"a": [], "b": ["epochs=3"]}, [])
    return plan_comparison(sides, num_seeds=4)


def ended(outcome: Outcome, error: str | None = None) -> TrialResult:
    """A run that ended before its first evaluation."""
    nothing: dict[str, Any] = {"values": {}, "overrides": (), "evaluations": (), "fingerprint": {}}
    return TrialResult(trial=0, seed=0, outcome=outcome, started_at=0.0, stopped_at=0.0, error=error, **nothing)


def test_code_that_fails_again_and_again_ends_a_comparison(plan: ComparisonPlan) -> None:
    one, other = plan.sides
    results = {("a", 0): ended(Outcome.REACHED)}
    for pair in range(3):
        check_failures(plan, one, results)
        results["b", pair] = ended(Outcome.ERRORED, f"Traceback\nboom {pair}")
        if pair < 2:
            check_failures(plan, other, results)
    with pytest.raises(WorkerError, match="3 runs of side b in a row failed") as failed:
        check_failures(plan, other, results)
    assert failed.value.traceback_text == "Traceback\nboom 0"
    check_failures(plan, other, results | {("b", 2): ended(Outcome.OUT_OF_MEMORY)})


def test_a_side_that_no_worker_can_make_ends_a_comparison(plan: ComparisonPlan) -> None:
    with pytest.raises(ConfigError, match=r"b: data\.root: is not there"):
        check_failures(plan, plan.sides[1], {("b", 0): ended(Outcome.INVALID, "data.root: is not there")})


def test_help_needs_none_of_what_takes_long_to_import() -> None:
    code = (
        "import sys\nfrom autotune.compare import compare_command\n"
        "try:\n    compare_command(['--help'])\nexcept SystemExit as ended:\n    code = ended.code\n"
        "sys.exit(code or bool({'torch', 'hydra', 'ray', 'mlflow', 'plotly', 'scipy'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.returncode == 0
    assert "  a=[key=value,...]  what one side has" in said.stdout
