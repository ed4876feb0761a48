"""Trainings that are commands: each a process that reports through autotune or by lines of JSON."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import autotune
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Target
from autotune.outcome import Outcome
from autotune.training.run import check_training, start_training
from tests.patience import wait_until

MakeConfig = Callable[..., TrialConfig]

PRINTING = """
import json, sys, time
print("starting", sys.argv[1:])
for epoch in range(1, 5):
    print(json.dumps({"score": epoch * float(sys.argv[2]), "epoch": epoch, "lr": 1}))
    print("not json {")
print("[1, 2]")
"""
REPORTING = """
import os, sys, autotune
assert os.environ["AUTOTUNE_SEED"] == "7"
with autotune.building():
    pass
for epoch in range(1, 5):
    with autotune.evaluating():
        report = autotune.report if epoch > 1 else autotune.session.current().report  # as callbacks do
        report(epoch * float(sys.argv[2]), epoch=epoch)
"""
FAILING = """
import sys
print("reading", sys.argv[2])
sys.exit("there is no such file")
"""
HANGING = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "autotune-test-child"])
time.sleep(1)
print('{"score": 1.0}')
time.sleep(1000)
"""


@pytest.fixture
def own(trial_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    """Makes configurations that run a script with ``--by 0.25``."""

    def make(script: str, *, value: float = 1e9, command: str = "python {file} --by {by}", **arguments: Any) -> TrialConfig:
        (tmp_path / "script.py").write_text(script)
        return trial_config(
            training={
                "_target_": "autotune.script.run",
                "command": command.replace("{file}", str(tmp_path / "script.py")),
                **({"by": 0.25} | arguments),
            },
            target=Target(metric="score", value=value, mode="max", max_train_seconds=1e9),
            allowed_targets=("autotune.script",),
            seed=7,
        )

    return make


@pytest.mark.parametrize("script", [PRINTING, REPORTING])
def test_a_script_reports(own: MakeConfig, script: str) -> None:
    config = own(script)
    check_training(config)
    evaluations = list(start_training(config))
    assert [(evaluation.metric, evaluation.epoch) for evaluation in evaluations] == [(0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)]
    assert evaluations[-1].outcome is None
    assert evaluations[-1].metrics == ({"lr": 1} if script == PRINTING else {})


@pytest.mark.parametrize("script", [PRINTING, REPORTING])
def test_it_ends_at_the_target(own: MakeConfig, script: str) -> None:
    evaluations = list(start_training(own(script, value=0.5)))
    assert [evaluation.metric for evaluation in evaluations] == [0.25, 0.5]
    assert evaluations[-1].outcome is Outcome.REACHED


def test_a_script_that_fails_is_told_with_the_end_of_its_output(own: MakeConfig) -> None:
    with pytest.raises(RuntimeError, match=r"ended with exit code 1\nreading 0.25\nthere is no such file"):
        list(start_training(own(FAILING)))


def test_a_script_that_never_reports_is_one_line(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="ended without one evaluation"):
        list(start_training(own("print('hello')")))


def test_a_command_that_is_not_there_is_one_line(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="training: no-such-program: cannot be started: No such file or directory"):
        list(start_training(own("", command="no-such-program {by}")))


def test_nothing_that_a_script_started_outlives_its_trial(own: MakeConfig) -> None:
    training = start_training(own(HANGING))
    assert next(training).metric == 1

    def started() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if "autotune-test-child" in process.cmdline()]

    wait_until(lambda: len(started()) == 1)
    (child,) = started()
    wait_until(lambda: child.status() == psutil.STATUS_STOPPED)  # it stands still while its report is decided upon
    training.close()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_an_experiment_file_runs_no_command_unless_it_is_allowed(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"training._target_: found 'autotune.script.run'.*allowed_targets=\[autotune"):
        check_training(replace(own(PRINTING), allowed_targets=()))


@pytest.mark.parametrize("template", ["", "python train.py", "python 'train.py {lr}", "python train.py {0}", "python train.py {}"])
def test_a_template_without_names_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="command: "):
        autotune.command(template)
