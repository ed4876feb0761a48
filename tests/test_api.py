"""The Python interface: ``autotune.tune`` of a function and of an experiment, in a process that
is no command.
"""

import json
import math
import subprocess
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml

import autotune
from autotune import api
from autotune.compare import compare_command
from autotune.config.compose import Composer
from autotune.errors import AutotuneError, ConfigError, StudyError
from autotune.outcome import Outcome
from autotune.reporting.study_files import write_json
from autotune.search.study import finished_results, read_study
from autotune.session import refuse_within_training
from autotune.tune_study import tune_command

SCRIPT = """
import functools
from typing import Any

import torch
import autotune


@functools.lru_cache
def draw(num):
    class Line:
        def __call__(self, inputs):
            return inputs @ torch.tensor([1.0, -2.0, 0.5, 3.0])

    inputs = torch.randn(num, 4)
    return inputs, Line()(inputs)


def fit(lr, batch_size=16, num_epochs=200):
    with autotune.building():
        inputs, targets = draw(256)
        val_inputs, val_targets = draw(64)
    weights = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=lr)
    state = autotune.checkpoint().load({"optimizer": optimizer})
    weights.data = state.get("weights", weights.data)
    for epoch in range(state.get("epoch", 0), num_epochs):
        for chosen in torch.randperm(256).split(batch_size):
            loss = ((inputs[chosen] @ weights - targets[chosen]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with autotune.evaluating(), torch.no_grad():
            error = ((val_inputs @ weights - val_targets) ** 2).mean()
        state = {"optimizer": optimizer, "weights": weights.detach(), "epoch": epoch + 1}
        autotune.checkpoint().save(state, weights={"weights": weights.detach()})
        autotune.report(error, epoch=epoch + 1)


result = autotune.tune(
    fit,
    space={"lr": autotune.log(1e-4, 0.3), "batch_size": [16, 64]},
    target=autotune.target("error", at_most=1e-3, max_seconds=5),
    baseline={"lr": 2e-3, "batch_size": 16},
    trials=6,
    name="line",
    confirm={"max_runs": 12},
    tracking="none",
    quiet=True,
)
fit(lr=0.1, num_epochs=1)   # still runs by hand
import json
print(json.dumps({
    "best": result.best, "speed_up": result.speed_up,
    "interval": result.speed_up_interval, "seconds": result.expected_seconds,
    "trials": len(result.trials_dataframe()), "optuna": len(result.study.trials),
    "exported": result.export("best.yaml").read_text(),
    "weights": str(result.weights),
}))
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_function_of_a_script_is_tuned_to_a_confirmed_result(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert set(found["best"]) == {"lr", "batch_size"}
    assert (
        found["speed_up"] is None
        or found["interval"][0] <= found["speed_up"] <= found["interval"][1]
    )
    assert found["seconds"] > 0
    assert found["trials"] >= 6
    assert found["optuna"] >= 6
    assert found["exported"].startswith("# Best of study line: fit(lr=")
    assert (tmp_path / "outputs/line/best_arguments.yaml").read_text() == found["exported"]
    assert Path(tmp_path, found["weights"]).is_file()
    assert len(ran.stdout.splitlines()) == 1, "quiet=True prints nothing"
    trace = (tmp_path / "outputs/line/trace.csv").read_text()
    assert trace.count("\n") > 6
    again = autotune_in(
        tmp_path,
        "experiment=fit",
        "--config-dir=outputs/line/function",
        "allowed_targets=[study_line]",
        "study.name=line",
        "search.num_trials=6",
        "confirm.max_runs=12",
        "tracking=none",
    )
    assert again.returncode == 0, again.stderr


def autotune_in(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "autotune", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def fit(lr: float, depth: int = 2, *, report: Any = None) -> None:
    """A training function that is never called here."""


TARGET = autotune.target("accuracy", at_least=0.9, max_seconds=1)


CONTINUED = """
import time

import autotune


def fit(lr=0.9):
    for epoch in range(1, 7):
        time.sleep(0.15 if lr > 0.5 else 0.1)
        autotune.report(epoch / 6, epoch=epoch)


for max_seconds, trials in [(0.3, 2), (5, 4), (5, 5)]:
    autotune.tune(
        fit,
        space={"lr": autotune.uniform(0.05, 1.0)},
        target=autotune.target("progress", at_least=0.95, max_seconds=max_seconds),
        trials=trials,
        name="line",
        confirm={"max_runs": 12, "num_seeds": 2},
        search={"max_retakes": 0},
        tracking="none",
    )
    print("---")
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_study_continues_with_a_higher_limit_and_with_its_confirmation_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(CONTINUED)
    ran = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    first, second, third, _ = ran.stdout.split("---\n")
    assert "nothing reached" in first
    study = read_study("line", tmp_path / "outputs/line")
    outcomes = [result.outcome for result in finished_results(study).values()]
    assert (outcomes[:2], len(outcomes)) == ([Outcome.TIMED_OUT] * 2, 5)
    assert Outcome.REACHED in outcomes[2:]
    assert set(outcomes[2:]) <= {Outcome.REACHED, Outcome.CAPPED}
    recorded = yaml.safe_load((tmp_path / "outputs/line/recording/study.yaml").read_text())
    assert (recorded["max_train_seconds"], recorded["outcomes"][0]) == (5, "TIMED_OUT")
    lines = [line for line in (second + third).splitlines() if line.startswith("confirmation run ")]
    assert [line.split()[2] for line in lines] == [f"{n + 1}" for n in range(len(lines))], (
        "no run is made again"
    )
    assert "confirmation run 1 " in second


def call(space: Any, **baseline: Any) -> dict[str, Any]:
    return {"training": fit, "space": space, "target": TARGET, "baseline": baseline}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "needs a training function with space= and target="),
        (
            {"training": fit, "experiment": "cnn"},
            "needs a training function with space= and target=",
        ),
        ({"experiment": "cnn", "trails": 3}, "trails: no such key"),
        ({"experiment": "cnn", "space": {}}, "needs a training function with space= and target="),
        ({"training": fit}, "needs a training function with space= and target="),
        (call({"lr": [1]}), r"tune\(fit\): baseline: lr, a key of the space, needs a value"),
        (
            call({"lr": [1]}, lr=1) | {"target": 0.9},
            "needs a training function with space= and target=",
        ),
        (
            call({"lrr": [1]}, lr=1),
            r"tune\(fit\): lrr: no such argument \(did you mean lr\?\); it takes lr, depth, report",
        ),
        (call({"lr": [1]}, lr=1, x=2), "x: no such argument; it takes lr, depth, report"),
        (
            {
                **call({"optimizer": ["adam"], "optimizer.lr": [1]}),
                "training": autotune.command("python a.py {optimizer} {optimizer.lr}"),
                "baseline": {"optimizer": "adam", "optimizer.lr": 1},
            },
            "optimizer has a value, so optimizer.lr cannot stand beneath it; give one of these",
        ),
        (call({"depth": "log"}, lr=1), "depth: found 'log'; give a list"),
        (call({"depth": 1}, lr=1), "space: depth: found 1; give a list"),
        (call({"depth": [fit]}, lr=1), "depth: found function, not numbers"),
    ],
)
def test_a_wrong_call_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said) as raised:
        autotune.tune(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("refused", [{"experiment": "cnn", "trails": 3}, {"experiment": "nope"}])
def test_a_refusal_shows_a_scripts_line_and_no_frames_of_autotunes(
    refused: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AutotuneError) as raised:
        autotune.tune(**refused)
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count('File "') <= 2, shown
    assert "During handling" not in shown
    assert "direct cause" not in shown


@pytest.mark.parametrize(
    ("domain", "written"),
    [
        (autotune.log(1e-4, 1e-1), {"type": "float", "low": 1e-4, "high": 1e-1, "log": True}),
        (autotune.uniform(0, 1), {"type": "float", "low": 0.0, "high": 1.0}),
        (autotune.integer(1, 6), {"type": "int", "low": 1, "high": 6}),
        (autotune.power_of_two(16, 256), {"type": "power_of_two", "low": 16, "high": 256}),
        ([32, 64], [32, 64]),
        ((True, None, "relu"), [True, None, "relu"]),
        (range(3), [0, 1, 2]),
        ([np.float64(0.5)], [0.5]),
        (
            optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
            {"type": "float", "low": 1e-4, "high": 1e-1, "log": True},
        ),
        (
            optuna.distributions.FloatDistribution(0, 1, step=0.25),
            {"type": "float", "low": 0.0, "high": 1.0, "step": 0.25},
        ),
        (
            optuna.distributions.IntDistribution(1, 9, step=2),
            {"type": "int", "low": 1, "high": 9, "step": 2},
        ),
        (optuna.distributions.CategoricalDistribution(("a", "b")), ["a", "b"]),
    ],
)
def test_a_domain_is_written_as_a_search_space_file_has_it(domain: Any, written: Any) -> None:
    assert api._domain("key", domain) == written


@pytest.mark.parametrize("limits", [{}, {"at_least": 1, "at_most": 2}])
def test_a_target_has_one_direction(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="needs one of at_least= and at_most="):
        autotune.target("loss", max_seconds=1, **limits)


def test_a_study_without_a_result_exports_nothing(tmp_path: Path) -> None:
    result = autotune.TuneResult("none", tmp_path)
    assert result.best is None
    assert result.speed_up is None
    with pytest.raises(StudyError, match="study none has nothing confirmed to export"):
        result.export(tmp_path / "best.yaml")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.5, 3.0, (2.0, (1.5, 3.0))),
        (1.5, None, (2.0, (1.5, math.inf))),
        (0.9, 3.0, (None, None)),
        (0.0, None, (None, None)),
    ],
)
def test_a_speed_up_that_is_not_shown_is_none(
    tmp_path: Path, low: float, high: float | None, expected: tuple[object, object]
) -> None:
    speed_up = {"ratio": 2.0, "low": low, "high": high, "num_pairs": 2, "claim": "measured"}
    write_json(
        tmp_path / "best.json",
        {"overrides": [], "best": {"num_runs": 2}, "speed_up": speed_up},
    )
    result = autotune.TuneResult("one", tmp_path)
    assert (result.speed_up, result.speed_up_interval) == expected


@pytest.mark.parametrize("values", ["{lr} {model.width}", "{config_file}"])
def test_devices_and_keys_beneath_others_are_searched_where_the_configuration_has_them(
    tmp_path: Path, values: str
) -> None:
    space = {"lr": [0.1, 1.0], "model.width": [8, 16], "devices": [1, 2]}
    command = autotune.command(f"torchrun --nproc_per_node={{devices}} t.py {values}")
    baseline = {"lr": 0.1, "model.width": 8, "devices": 2}
    target = autotune.target("accuracy", at_least=0.9, max_seconds=60)
    arguments = api._write_function(tmp_path, command, space, target, baseline)
    assert arguments[-1] == "allowed_targets=[autotune.script]"
    [path] = (tmp_path / "function" / "experiment").glob("*.yaml")
    written = yaml.safe_load(path.read_text())
    assert written["parallelism"] == {"num_workers": 2}
    assert written["training"]["model"] == {"width": 8}
    assert list(written["search_space"][0]) == [
        "training.lr",
        "training.model.width",
        "parallelism.num_workers",
    ]
    composed = Composer([arguments[0], arguments[-1]], [str(tmp_path / "function")]).compose().trial
    assert (composed.num_workers, composed.num_processes) == (2, 1), "a command starts its own"


@pytest.mark.parametrize("launcher", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_study_in_one_of_several_processes_is_refused_before_it_writes_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(launcher, "2")
    said = rf"tune: was called in one of 2 processes \({launcher}\); start it without torchrun"
    with pytest.raises(ConfigError, match=said):
        autotune.tune(**call({"lr": [1]}, lr=1))
    with pytest.raises(ConfigError, match=said):
        tune_command(["experiment=cnn"])
    with pytest.raises(ConfigError, match=said.replace("tune", "compare", 1)):
        compare_command(["experiment=cnn", "a=[]", "b=[optimizer.lr=0.2]"])
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("slurm", "is_refused"),
    [
        ("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=1", True),
        # the first of eight on a node, which may have an eighth of the node
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=1 PMI_SIZE=8", True),
        # a step with a task a node, as Ray has it on SLURM
        ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2", True),
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 PMI_SIZE=2", False),
        # the shell of srun --ntasks=8 --pty, and the seven beside it
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=1 SLURM_PTY_PORT=1", False),
        ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=1", True),
        # srun --ntasks=1, a batch script's own shell, that of salloc
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_NTASKS=1", False),
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_NNODES=2", False),
        ("SLURM_NTASKS=8 SLURM_NNODES=2", False),
    ],
)
def test_tasks_of_slurm_beside_the_first_are_refused(
    monkeypatch: pytest.MonkeyPatch, slurm: str, is_refused: bool
) -> None:
    for pair in slurm.split():
        monkeypatch.setenv(*pair.split("="))
    said = r"^tune: was called in task \d of \d that srun has started .*; start it once, with srun"
    with pytest.raises(ConfigError, match=said) if is_refused else nullcontext():
        refuse_within_training()
