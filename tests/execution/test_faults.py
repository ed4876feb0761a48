"""A study whose trainings are stopped and killed: nothing of that is told as a configuration's
time or fault.
"""

import itertools
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.execution.conftest import Commands
from tests.support.patience import exit_code, wait_until
from tests.support.studies import rows_of

pytestmark = pytest.mark.slow

_MODULE = """
import json, os, pathlib, signal, time

FATES = {"confirm": ["is killed", "is stopped"]}
FATES["search"] = ["is trained", *FATES["confirm"]]

def train(lr):
    phase = "confirm" if pathlib.Path("outputs/faults/.weights").is_dir() else "search"
    with open("notes.jsonl", "a+") as file:
        file.seek(0)
        number = sum(json.loads(line)["phase"] == phase for line in file)
        fate = dict(enumerate(FATES[phase])).get(number, "is trained")
        note = {"phase": phase, "fate": fate, "lr": lr, "process": os.getpid()}
        note["niceness"] = os.getpriority(os.PRIO_PROCESS, 0)
        file.write(json.dumps(note) + "\\n")
    yield {"metric": 0.1}
    if fate == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fate == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    yield {"metric": 1.0}
"""
_STOP_SECONDS = 5.0
"""Twice what a trial may train."""
_EXPERIMENT = f"""# @package _global_
training: {{_target_: faulty.train, lr: 0.1}}
search_space: [{{training.lr: {{type: float, low: 1e-3, high: 1e-1, log: true}}}}]
target: {{value: 1.0, max_train_seconds: {_STOP_SECONDS / 2}}}
search: {{num_trials: 4, max_concurrent_trials: 1, max_retakes: 20, max_retries: 20}}
"""


def _notes(folder: Path) -> list[dict[str, Any]]:
    path = folder / "notes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _continue_stopped(folder: Path, phase: str) -> None:
    """Have the training of a phase that stops itself go on after a while."""

    def stopped() -> list[int]:
        notes = [
            note
            for note in _notes(folder)
            if (note["phase"], note["fate"]) == (phase, "is stopped")
        ]
        processes = [note["process"] for note in notes]
        return [each for each in processes if psutil.Process(each).status() == "stopped"]

    wait_until(lambda: bool(stopped()))
    (process,) = stopped()
    time.sleep(_STOP_SECONDS)
    os.kill(process, signal.SIGCONT)


def test_trainings_that_are_stopped_and_killed_are_trained_again(
    commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "faulty.py").write_text(_MODULE)
    (tmp_path / "my_conf/experiment").mkdir(parents=True)
    (tmp_path / "my_conf/experiment/faulty.yaml").write_text(_EXPERIMENT)
    arguments = [
        "experiment=faulty",
        "study.name=faults",
        "search=random",
        "stopping=none",
        "confirm=quick",
        "tracking=none",
    ]
    study = commands.start(
        *arguments, "--config-dir", "my_conf", "allowed_targets=[faulty]", folder=tmp_path
    )
    for phase in ("search", "confirm"):
        _continue_stopped(tmp_path, phase)
    assert exit_code(study) == 0, (tmp_path / "err.txt").read_text()

    notes, log = _notes(tmp_path), (tmp_path / "outputs/faults/autotune.log").read_text()
    assert {note["niceness"] for note in notes} == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert (
        len(
            re.findall(
                r"trial-\d+: the worker died: it was ended by SIGKILL; it continues from its last",
                log,
            )
        )
        == 1
    )
    assert (
        len(
            re.findall(
                r"trial-\d+: its process was stopped for [45].* its configuration is tried again",
                log,
            )
        )
        == 1
    )
    assert (
        len(
            re.findall(
                r"confirm-\d+-\d+: the worker died: it was ended by SIGKILL; it continues",
                log,
            )
        )
        == 1
    )
    assert (
        len(
            re.findall(
                r"confirm-\d+-\d+: its process was stopped for [45].*; its configuration is tried",
                log,
            )
        )
        == 1
    )
    searched = [note for note in notes if note["phase"] == "search"]
    for lost, again in itertools.pairwise(searched):
        if lost["fate"] != "is trained":
            assert again["lr"] == lost["lr"], "the same point, next"
    trials = rows_of(tmp_path / "outputs/faults/trials.csv")
    assert [trial["outcome"] for trial in trials] == ["REACHED"] * 4
    assert max(float(trial["train_seconds"]) for trial in trials) < _STOP_SECONDS / 2
    best = json.loads((tmp_path / "outputs/faults/best.json").read_text())
    assert best["best"]["num_reached"] == best["best"]["num_runs"] == 2
