"""What a study cannot be run with: one line on stderr, exit code 2, nothing trained and nothing
run.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.config.command_line import EXIT_BAD_INPUT, run_command
from autotune.config.compose import Composer
from autotune.execution.cluster import RaySession
from autotune.execution.live_study import opened
from autotune.execution.plan import plan_study
from autotune.export import export_command
from autotune.search import storage
from autotune.training.device import local_capabilities
from autotune.tune_study import tune_command

Refusal = Callable[..., str]

_STOP = "study.folder=/dev/null/outputs"
"""Stops a study that passed every check, before Ray is started."""
_SMALL_SPACE = "search_space=[{batch_size:[32,64]}]"
"""Quickly checked; an override that follows replaces it."""


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimzer.lr=0.1", ["optimzer.lr", "no such key"]),
        ("batch_sise=8", ["batch_sise", "did you mean batch_size?"]),
        ("epochs=0", ["epochs: found 0.0", "above 0"]),
        ("optimizer.lr=-1", ["optimizer", "lr=-1", "-1"]),
        ("optimizer=lion", ["optimizer=lion", "adamw, "]),
        ("device=tpu", ["device: found 'tpu'", "auto, cpu, cuda"]),
        (
            "target.value=98",
            ["target.value: found 98, accuracy is a fraction of 0 to 1 (did you mean 0.98?)"],
        ),
        ("search.num_trials=null", ["search", "both null"]),
        ("+search.sampler.depth=3", ["search.sampler", "depth"]),
        ("warm_start=[nope]", ["warm_start: nope: is no study", "no folder with study.yaml"]),
        ("study.folder=s3://bucket/x", ["study.folder: found the URL s3://bucket/x"]),
        ("confirm.max_runs=3", ["confirm.max_runs", "found 3", "from 4"]),
        (
            "cluster.placement=heap",
            [
                "cluster.placement: found 'heap', use one of pack, spread, strict_pack,"
                " strict_spread"
            ],
        ),
        ("cluster.address=somewhere", ["cluster.address: found 'somewhere'", "HOST:PORT"]),
        ("study.name=../elsewhere", ["study.name: found '../elsewhere'"]),
        ("search_space=[]", ["search_space: the experiment has none"]),
        ("optimizer.lr=interval(1,0.1)", ["optimizer.lr", "1", "0.1"]),
        ("search.num_trials=choice(1,2)", ["search.num_trials", "setting of the study"]),
        ("=5", ["=5", "write key=value"]),
        ("--no-such-flag", ["--no-such-flag", "--help"]),
        ("experiment=no_such_experiment", ["experiment=no_such_experiment", "cnn_smoke"]),
    ],
)
def test_a_wrong_key_or_value_is_one_line(
    override: str, parts: list[str], refusal: Refusal
) -> None:
    said = refusal(
        "experiment=cnn_smoke", _SMALL_SPACE, "tracking=none", _STOP, "dry_run=true", override
    )
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("optimizer.lr: {type: float, low: 0.1, high: 1\n", ["bad.yaml line 2"]),
        (
            "optimizer.lr: {type: float, low: 0.1, high: 1, lgo: true}\n",
            ["bad.yaml", "optimizer.lr", "lgo"],
        ),
        ("optimizer.lr: {type: real, low: 0.1, high: 1}\n", ["bad.yaml", "optimizer.lr", "real"]),
        ("no.such.key: [1, 2]\n", ["bad.yaml", "no.such.key"]),
        ("optimizer: [sgd, adamw]\noptimizer.momentum: [0.8, 0.9]\n", ["bad.yaml", "momentum"]),
        ("\x00\x01", ["bad.yaml"]),
    ],
)
def test_a_bad_space_file_is_one_line(
    content: str, parts: list[str], refusal: Refusal, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    said = refusal("experiment=cnn_smoke", "search_space=[bad.yaml]", _STOP)
    assert [part for part in parts if part not in said] == [], said


def test_a_missing_data_set_is_one_line(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = refusal("experiment=cnn_cifar10", "data.root=empty", "dry_run=true")
    assert "empty" in said
    assert "data.download=true" in said


def test_no_arguments_list_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(tune_command, []) == EXIT_BAD_INPUT
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert all(f" {name}, " in said.err for name in ("cnn", "cnn_smoke", "cnn_fashion"))


@pytest.mark.parametrize("name", ["nope", "../nope"])
def test_exporting_a_study_that_is_not_there_is_one_line(name: str, refusal: Refusal) -> None:
    assert "no such study" in refusal(
        f"study={name}", "as=mine", "--config-dir", "my_conf", command=export_command
    )


def test_a_study_of_that_name_with_other_settings_is_one_line(
    refusal: Refusal, tmp_path: Path
) -> None:
    command = ("experiment=cnn_smoke", _SMALL_SPACE, "study.name=mine", "tracking=none")
    for budget in ("search.num_trials=9", "search.num_trials=12"):
        plan = plan_study(
            Composer([*command, f"study.folder={tmp_path}/outputs", budget]), local_capabilities()
        )
        with opened(plan, console=Console(), connection=RaySession(plan.config.cluster)):
            pass  # a budget may change
    said = refusal(*command, "target.value=0.95")
    assert "study.name=mine" in said
    assert "0.9" in said
    assert "0.95" in said


def test_a_study_that_runs_elsewhere_on_the_same_database_is_one_line(
    refusal: Refusal, tmp_path: Path
) -> None:
    database = f"search.storage=sqlite:///{tmp_path}/studies.db"
    command = ("experiment=cnn_smoke", _SMALL_SPACE, "study.name=mine", "tracking=none", database)
    plan = plan_study(
        Composer([*command, f"study.folder={tmp_path}/elsewhere"]), local_capabilities()
    )
    with opened(plan, console=Console(), connection=RaySession(plan.config.cluster)) as live:
        pass
    runs = {**storage.this_process(), **storage.process_facts(os.getppid()), "host": "node7"}
    live.study.set_user_attr(storage.DRIVER, {**runs, "at": time.time()})
    said = refusal(*command)
    assert said == (
        f"study.name=mine: process {os.getppid()} on node7 runs it; give another study.name"
    )


def test_a_cluster_that_is_not_there_is_one_line(refusal: Refusal) -> None:
    said = refusal("experiment=cnn_smoke", _SMALL_SPACE, "cluster.address=127.0.0.1:1")
    assert said.startswith("cluster.address: 127.0.0.1:1 does not answer (")


@pytest.mark.slow
def test_an_mlflow_server_that_does_not_answer_is_one_line(commands: Any, tmp_path: Path) -> None:
    ended = commands.run("experiment=cnn_smoke", "tracking.uri=http://127.0.0.1:1", folder=tmp_path)
    assert ended.returncode == EXIT_BAD_INPUT
    assert ended.stderr.startswith("autotune: tracking.uri: http://127.0.0.1:1: cannot be used")
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""
    assert not list(tmp_path.glob("**/trials.csv"))
