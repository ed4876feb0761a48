"""The W&B tracker: what it writes offline, read back by W&B's own reader of its files."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb

from autotune.errors import ConfigError
from autotune.outcome import Outcome
from autotune.tracking import wandb_tracker
from autotune.tracking.tracker import BestScore, StudyInfo
from autotune.tracking.wandb_tracker import WandbTracker
from tests.support.patience import wait_until
from tests.support.tracked import close, make_evaluation, make_info, make_run, tell


@pytest.fixture(autouse=True)
def stop_service() -> Iterator[None]:
    yield
    wandb.teardown()


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyInfo:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return make_info(tmp_path / "cnn-1")


def read(folder: Path) -> dict[str, Any]:
    """A run as W&B's own reader of the file shows it, with all that was logged as ``history``."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", str(folder), "--json"]
    run, records = (
        subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout
        for more in (["--summary"], [])
    )
    items = [json.loads(line) for line in records.splitlines()]
    about = next(item["run"] for item in items if item["type"] == "run")
    history = [item["history"]["item"] for item in items if item["type"] == "history"]
    return {
        **json.loads(run),
        "group": about["run_group"],
        "job_type": about["job_type"],
        "history": history,
    }


def written(info: StudyInfo) -> dict[str, dict[str, Any]]:
    """The study's runs by displayed name; no run is there twice."""
    runs = [read(folder) for folder in Path(info.folder, "wandb").glob("offline-run-*")]
    assert len({run["name"] for run in runs}) == len(runs)
    return {run["name"]: run for run in runs}


def curve(run: dict[str, Any], key: str) -> list[tuple[int, float]]:
    return [(row["_step"], row[key]) for row in run["history"]]


def kill_service(info: StudyInfo) -> None:
    """Kill W&B's service, once it has written the files of the runs that have ended, which it
    does some milliseconds later.
    """
    ended = [
        next(file.parent.glob("*.wandb")) for file in Path(info.folder, "wandb").glob("*/ended")
    ]
    wait_until(lambda: all(file.stat().st_size > 100 for file in ended))
    for child in psutil.Process().children(recursive=True):
        if "wandb-core" in child.name():
            child.kill()
    # nobody else waits for it, and the object that holds the process would warn of that
    wandb.setup().ensure_service()._proc.join()


@pytest.mark.slow
def test_a_study_is_a_group_with_a_run_a_trial_and_one_of_its_own(info: StudyInfo) -> None:
    trial, result, score = make_run(num_evaluations=3)
    tracker = WandbTracker(info)
    tracker.start(trial)
    tracker.evaluate(trial.name, result.evaluations[0])
    tracker.finish(trial, result, score)
    confirmed = replace(trial, name="confirm-0-1", phase="confirm")
    tell(tracker, (confirmed, result, score))
    tell(tracker, make_run(1, Outcome.CAPPED))
    tags = {"autotune.best_trial": "1", "autotune.description": "Twice as fast"}
    close(
        tracker,
        metrics={"speed_up": 2.5},
        tags=tags,
        best_scores=[BestScore(1, 1.5, 0.0), BestScore(2, 1.5, 1.0)],
    )
    runs = written(info)
    run, confirm, study = (
        runs["0: optimizer=sgd, lr=0.1"],
        runs["confirm-0-1: optimizer=sgd, lr=0.1"],
        runs["cnn-1"],
    )
    assert {each["group"] for each in runs.values()} == {"cnn-1"}
    assert {each["project"] for each in runs.values()} == {"cnn"}
    assert [each["job_type"] for each in (run, confirm, study)] == ["search", "confirm", "study"]
    assert (
        run["config"].items()
        >= {
            "optimizer": "sgd",
            "optimizer.lr": 0.1,
            "autotune.trial": "0",
            "autotune.outcome": "REACHED",
        }.items()
    )
    assert (
        curve(run, "accuracy")
        == curve(run, "metric")
        == [(each.step, each.metric) for each in result.evaluations]
    )
    assert curve(run, "train_seconds") == [
        (each.step, each.train_seconds) for each in result.evaluations
    ]
    assert (
        run["summary"].items()
        >= {
            "score": 1.5,
            "time_to_target_seconds": result.time_to_target_seconds,
            "f1": 0.8,
        }.items()
    )
    assert (run["tags"], run["state"]) == (["REACHED"], "finished")
    assert (study["tags"], study["notes"], study["summary"]["speed_up"]) == (
        ["FINISHED"],
        "Twice as fast",
        2.5,
    )
    assert (
        study["config"].items()
        >= {
            **info.settings,
            "autotune.best_trial": "1",
            "autotune.workload": "simple_cnn-digits",
        }.items()
    )
    assert curve(study, "best_score") == [(1, 1.5), (2, 1.5)]


@pytest.mark.slow
def test_a_run_says_how_it_ended(info: StudyInfo) -> None:
    tracker = WandbTracker(info)
    tell(tracker, make_run(0, Outcome.CAPPED))
    tell(tracker, make_run(1, Outcome.ERRORED, num_evaluations=0, error="ValueError: boom"))
    trial, _, _ = make_run(2)
    tracker.start(trial)
    tracker.evaluate(trial.name, make_evaluation(1, metric=float("nan")))
    close(tracker)
    capped, errored, interrupted, _ = (run for _, run in sorted(written(info).items()))
    assert [(each["tags"], each["exit_code"]) for each in (capped, errored, interrupted)] == [
        (["CAPPED"], 0),
        (["ERRORED"], 1),
        (["INTERRUPTED"], 1),
    ]
    assert errored["notes"] == "ValueError: boom"
    assert "accuracy" not in interrupted["summary"]


@pytest.mark.slow
def test_what_a_killed_service_or_a_full_disk_cost_is_written_anew(
    info: StudyInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = WandbTracker(info)
    runs = [make_run(number) for number in range(3)]
    tell(tracker, runs[0])
    trial, result, _ = runs[1]
    tracker.start(trial)
    tracker.evaluate(trial.name, result.evaluations[0])
    kill_service(info)
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever W&B raises
        tracker.finish(*runs[1])

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("autotune.tracking.wandb_tracker.replace_file", refuse)
        with pytest.raises(OSError, match="No space left"):
            tell(tracker, runs[2])
    assert tracker.complete == {"trial-0"}
    for run in runs[1:]:
        tracker.finish(*run)
    close(tracker)
    found = written(info)
    assert len(found) == 4
    assert [len(run["history"]) for name, run in sorted(found.items()) if name != "cnn-1"] == [
        3,
        3,
        3,
    ]


def test_a_studys_files_are_its_own_runs(info: StudyInfo, tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    for name in ("best.yaml", "figures/search.png"):
        (tmp_path / name).write_text(name)
    tracker = WandbTracker(info)
    close(tracker, artifacts=[tmp_path / name for name in ("best.yaml", "figures", "nothing")])
    assert tracker.browse == f"wandb sync {info.folder}/wandb/offline-run-*"
    (folder,) = Path(info.folder, "wandb").glob("offline-run-*")
    assert [
        (folder / "files" / name).read_text() for name in ("best.yaml", "figures/search.png")
    ] == ["best.yaml", "figures/search.png"]


@pytest.mark.slow
def test_a_resumed_study_keeps_what_is_written_and_replaces_its_own_run(info: StudyInfo) -> None:
    runs = [make_run(number) for number in range(2)]
    first = WandbTracker(info)
    tell(first, runs[0])
    close(first, metrics={"speed_up": 1.0})
    (kept,) = (file.parent for file in Path(info.folder, "wandb").glob("*/ended"))
    resumed = WandbTracker(info)
    assert resumed.complete == {"trial-0"}
    resumed.finish(*runs[1])
    close(resumed, metrics={"speed_up": 2.0})
    assert kept.is_dir()
    found = written(info)
    assert len(found) == 3
    assert found["cnn-1"]["summary"]["speed_up"] == 2.0


@pytest.mark.slow
def test_a_server_that_is_gone_leaves_the_runs_on_the_disk(
    info: StudyInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_tracker, "_INIT_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    # the server answered when the study began
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    tracker = WandbTracker(info, mode="online")
    with pytest.raises(wandb.Error):
        tracker.start(make_run()[0])
    tell(tracker, make_run())
    close(tracker)
    assert len(written(info)) == 2


def test_what_cannot_work_is_one_line(info: StudyInfo) -> None:
    with pytest.raises(
        ConfigError,
        match=r"tracking.mode: found 'onlin', use one of offline, online, disabled$",
    ):
        WandbTracker(info, mode="onlin")
    with pytest.raises(ConfigError, match=r"tracking.mode=online: No API key configured"):
        WandbTracker(info, mode="online")
