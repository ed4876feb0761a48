"""The MLflow tracker against real stores: SQLite files, and a server started here."""

import json
import logging
import math
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.utils.validation import _validate_metric

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.tracking import mlflow_store, mlflow_tracker
from autotune.tracking.mlflow_fields import plain_key
from autotune.tracking.mlflow_tracker import MlflowTracker
from autotune.tracking.tracker import FinishedRun, NoTracker, StudyInfo, TrackedTrial
from tests.execution.test_spool import largest_file
from tests.support.patience import PATIENCE_SECONDS, exit_code, wait_until

pytestmark = [pytest.mark.store, pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")]

STARTED_AT = 1_700_000_000.0


def make_evaluation(step: int, **changes: Any) -> Evaluation:
    values: dict[str, Any] = {
        "step": step,
        "epoch": step / 10,
        "samples": 64 * step,
        "build_seconds": 0.5,
        "prepare_seconds": 0.25,
        "train_seconds": 0.1 * step,
        "evaluate_seconds": 0.01 * step,
        "metric": 0.9,
        "loss": 0.3,
        "samples_per_second": 640.0,
        "peak_memory_bytes": 10_000_000,
        "energy_joules": None,
        "metrics": {"f1": 0.8, "loss": 7.0},
    }
    return Evaluation(**{**values, **changes})


def make_run(number: int = 0, outcome: Outcome = Outcome.REACHED, num_evaluations: int = 3, **changes: Any) -> FinishedRun:
    values = {"optimizer": "sgd", "optimizer.lr": 0.1 * (number + 1)}
    overrides = ("optimizer=sgd", f"optimizer.lr={0.1 * (number + 1)}")
    config = {"optimizer": {"lr": 0.1 * (number + 1)}, "batch_size": 64, "target": {"metric": "accuracy"}}
    trial = TrackedTrial(
        name=f"trial-{number}",
        phase="search",
        trial=number,
        values=values,
        overrides=overrides,
        config=config,
        seed=number,
        started_at=STARTED_AT,
    )
    fields: dict[str, Any] = {
        "trial": number,
        "values": values,
        "overrides": overrides,
        "seed": number,
        "outcome": outcome,
        "evaluations": tuple(make_evaluation(step) for step in range(1, num_evaluations + 1)),
        "started_at": STARTED_AT,
        "stopped_at": STARTED_AT + 100.0,
        "fingerprint": {"torch": "2.13.0", "device": "cpu"},
    }
    return trial, TrialResult(**{**fields, **changes}), 1.5 if outcome is Outcome.REACHED else None


def tell(tracker: MlflowTracker, run: FinishedRun) -> None:
    trial, result, score = run
    tracker.start(trial)
    for evaluation in result.evaluations:
        tracker.evaluate(trial.name, evaluation)
    tracker.finish(trial, result, score)


def close(tracker: MlflowTracker, **changes: Any) -> None:
    tracker.close(**{"status": "FINISHED", "metrics": {}, "tags": {}, "artifacts": [], **changes})


@pytest.fixture
def info(tmp_path: Path) -> StudyInfo:
    return StudyInfo(
        name="cnn-1",
        kind="study",
        workload="simple_cnn-digits",
        experiment="cnn",
        folder=str(tmp_path / "outputs" / "cnn-1"),
        settings={"target.value": 0.98, "sampler": "tpe", "num_trials": 40},
        tags={"team": "vision"},
    )


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A new database, made once: MLflow takes a second or two for it."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path.read_bytes()


@pytest.fixture
def uri(tmp_path: Path, empty_store: bytes) -> str:
    (tmp_path / "mlflow.db").write_bytes(empty_store)
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def runs_of(uri: str, experiment_name: str = "cnn") -> list[Run]:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(experiment_name)
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))


def parent_of(uri: str) -> Run:
    (parent,) = [run for run in runs_of(uri) if run.data.tags["autotune.phase"] == "study"]
    return parent


def children_of(uri: str, experiment_name: str = "cnn") -> dict[str, Run]:
    children = [run for run in runs_of(uri, experiment_name) if "mlflow.parentRunId" in run.data.tags]
    assert len({run.data.tags["autotune.run"] for run in children}) == len(children)
    return {run.data.tags["autotune.run"]: run for run in children}


def steps_of(uri: str, run: Run, key: str = "metric") -> list[int]:
    return sorted(point.step for point in MlflowClient(uri).get_metric_history(run.info.run_id, key))


def artifact(uri: str, run: Run, name: str) -> str:
    return Path(MlflowClient(uri).download_artifacts(run.info.run_id, name)).read_text()


def test_a_study_is_a_parent_run_in_its_experiment(info: StudyInfo, uri: str, tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("<html>")
    (tmp_path / "winner.yaml").write_text("batch_size: 64")
    tracker = MlflowTracker(info, uri=uri)
    artifacts = [tmp_path / "winner.yaml", tmp_path / "report", tmp_path / "absent.png"]
    close(tracker, metrics={"speed_up": 2.5}, tags={"autotune.best": "7"}, artifacts=artifacts)
    parent = parent_of(uri)
    assert parent.info.run_name == "cnn-1"
    assert MlflowClient(uri).get_experiment(parent.info.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"
    assert parent.info.status == "FINISHED"
    assert parent.data.params == {"target.value": "0.98", "sampler": "tpe", "num_trials": "40"}
    assert parent.data.metrics == {"speed_up": 2.5}
    assert (
        parent.data.tags.items()
        >= {"team": "vision", "autotune.study": "cnn-1", "autotune.workload": "simple_cnn-digits", "autotune.best": "7"}.items()
    )
    assert artifact(uri, parent, "winner.yaml") == "batch_size: 64"
    assert artifact(uri, parent, "report/index.html") == "<html>"


def test_the_curve_of_the_best_score_goes_on_to_the_last_trial(info: StudyInfo, uri: str) -> None:
    runs = [(*make_run(number)[:2], score) for number, score in enumerate((2.0, 1.5, None, 1.7))]
    tracker = MlflowTracker(info, uri=uri)
    for run in runs:
        tell(tracker, run)
    close(tracker)
    history = MlflowClient(uri).get_metric_history(parent_of(uri).info.run_id, "best_score")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (2, 1.5), (4, 1.5)]


def test_a_studys_own_run_has_its_description_and_the_best_score_so_far(info: StudyInfo, uri: str) -> None:
    scores = [2.0, None, 1.5, 1.7, 1.2]
    runs = [(trial, result, score) for number, score in enumerate(scores) for trial, result, _ in [make_run(number)]]
    tracker = MlflowTracker(info, uri=uri)
    for run in runs[:3]:
        tell(tracker, run)
    close(tracker, status="KILLED")
    resumed = MlflowTracker(info, uri=uri, finished=runs[:3])
    for run in runs[3:]:
        tell(resumed, run)
    close(resumed, tags={"autotune.description": "**2.19x** faster"})
    parent = parent_of(uri)
    assert parent.data.tags["mlflow.note.content"] == "**2.19x** faster"
    assert "autotune.description" not in parent.data.tags
    history = MlflowClient(uri).get_metric_history(parent.info.run_id, "best_score")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (3, 1.5), (5, 1.2)]


def test_a_run_that_other_programs_have_spoilt_says_so(info: StudyInfo, uri: str) -> None:
    tracker = MlflowTracker(info, uri=uri)
    why = "it waited 5.82 s of 10.00 s for a CPU while other programs used 1.6 CPUs"
    tell(tracker, make_run(7, contention=why))
    tell(tracker, make_run(8))
    close(tracker)
    runs = children_of(uri)
    assert runs["trial-7"].data.tags["autotune.contention"] == why
    assert "autotune.contention" not in runs["trial-8"].data.tags


def test_a_database_is_asked_for_child_runs_as_a_server_is(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = MlflowTracker(info, uri=uri)
    for number in range(3):
        tell(tracker, make_run(number))
    tracker.start(make_run(3)[0])
    close(tracker)
    client, parent = mlflow_store.open_store(uri), parent_of(uri)
    MlflowClient(uri).delete_run(children_of(uri)["trial-1"].info.run_id)

    def found() -> list[tuple[str, str, str, str, str]]:
        tags = ("autotune.run", "autotune.outcome")
        runs = mlflow_store.child_runs(client, parent.info.experiment_id, parent.info.run_id, tags)
        return [(run.run_id, run.run_name, run.status, *(run.tags[tag] for tag in tags)) for run in runs]

    of_database = found()
    monkeypatch.setattr(mlflow_store, "has_transactions", lambda _: False)
    assert of_database == found()
    assert {run[3]: run[2] for run in of_database} == {"trial-0": "FINISHED", "trial-2": "FINISHED", "trial-3": "KILLED"}


def test_a_trial_is_a_child_run_with_its_point_and_its_end(info: StudyInfo, uri: str) -> None:
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(7, test_metric=0.97))
    close(tracker)
    run = children_of(uri)["trial-7"]
    assert run.info.run_name == "7: optimizer=sgd, lr=0.8"
    assert run.data.params == {"optimizer": "sgd", "optimizer.lr": "0.8"}
    expected = {
        "mlflow.parentRunId": parent_of(uri).info.run_id,
        "autotune.study": "cnn-1",
        "autotune.trial": "7",
        "autotune.phase": "search",
        "autotune.outcome": "REACHED",
        "autotune.seed": "7",
        "mlflow.source.name": "autotune",
    }
    assert run.data.tags.items() >= expected.items()
    assert len(run.data.tags["autotune.fingerprint"]) == 12
    assert run.info.status == "FINISHED"
    assert (run.info.start_time, run.info.end_time) == (1_700_000_000_000, 1_700_000_100_000)
    for key, value in {
        "time_to_target_seconds": 0.55,
        "cold_seconds": 1.05,
        "score": 1.5,
        "test_metric": 0.97,
        "accuracy": 0.9,
        "f1": 0.8,
        "loss": 0.3,
    }.items():
        assert run.data.metrics[key] == pytest.approx(value)
    assert "batch_size: 64" in artifact(uri, run, "config.yaml")
    assert artifact(uri, run, "overrides.yaml").splitlines()[0] == "- optimizer=sgd"
    assert "2.13.0" in artifact(uri, run, "fingerprint.json")


def test_a_trial_that_has_ended_soon_is_written_in_one_go(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = MlflowTracker(info, uri=uri)
    written: list[str] = []
    log_batch = MlflowClient.log_batch
    monkeypatch.setattr(MlflowClient, "log_batch", lambda self, run_id, **parts: (written.append(run_id), log_batch(self, run_id, **parts)))
    trial, result, score = make_run()
    tracker.start(trial)
    for each in result.evaluations:
        tracker.evaluate(trial.name, each)
    time.sleep(1.5)  # the writing thread wakes every second
    assert written == []
    tracker.finish(trial, result, score)
    wait_until(lambda: "trial-0" in children_of(uri) and children_of(uri)["trial-0"].info.status == "FINISHED")
    run = children_of(uri)["trial-0"]
    assert written.count(run.info.run_id) == 1
    close(tracker)
    assert "batch_size: 64" in artifact(uri, run, "config.yaml")
    assert run.data.params["optimizer"] == "sgd"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(Outcome.MISSED, "FINISHED"), (Outcome.CAPPED, "FINISHED"), (Outcome.OUT_OF_MEMORY, "FAILED"), (Outcome.CONTENDED, "FINISHED")],
)
def test_a_run_that_did_not_reach_the_target_says_how_it_ended(info: StudyInfo, uri: str, outcome: Outcome, status: str) -> None:
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(outcome=outcome))
    close(tracker)
    run = children_of(uri)["trial-0"]
    assert run.info.status == status
    assert run.data.tags["autotune.outcome"] == outcome
    assert "time_to_target_seconds" not in run.data.metrics


def test_an_error_is_kept_with_its_traceback(info: StudyInfo, uri: str) -> None:
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(outcome=Outcome.ERRORED, num_evaluations=0, error="Traceback: boom"))
    close(tracker)
    assert artifact(uri, children_of(uri)["trial-0"], "error.txt") == "Traceback: boom"


def test_live_evaluations_carry_the_time_they_were_made(info: StudyInfo, uri: str) -> None:
    tracker = MlflowTracker(info, uri=uri)
    before = time.time()
    tell(tracker, make_run())
    after = time.time()
    close(tracker)
    history = MlflowClient(uri).get_metric_history(children_of(uri)["trial-0"].info.run_id, "metric")
    assert [point.step for point in history] == [1, 2, 3]
    assert all(before - 0.001 <= point.timestamp / 1000 <= after + 0.001 for point in history)


def test_evaluations_told_afterwards_carry_the_time_their_phases_add_up_to(info: StudyInfo, uri: str) -> None:
    trial, result, score = make_run()
    tracker = MlflowTracker(info, uri=uri)
    tracker.finish(trial, result, score)
    close(tracker)
    history = MlflowClient(uri).get_metric_history(children_of(uri)["trial-0"].info.run_id, "loss")
    assert [point.timestamp for point in history] == [1_700_000_000_860, 1_700_000_000_970, 1_700_000_001_080]


def test_values_that_are_not_finite_are_left_out(info: StudyInfo, uri: str) -> None:
    diverged = make_evaluation(4, metric=math.nan, loss=math.inf)
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(outcome=Outcome.DIVERGED, evaluations=(make_evaluation(3), diverged)))
    close(tracker)
    run = children_of(uri)["trial-0"]
    assert steps_of(uri, run, "loss") == [3]
    assert steps_of(uri, run, "train_seconds") == [3, 4]


def test_a_long_trial_with_many_parameters_exceeds_no_batch(info: StudyInfo, uri: str) -> None:
    trial, result, score = make_run(num_evaluations=400)
    trial = replace(trial, values={f"key.{number}": "x" * 10_000 if number == 0 else number for number in range(150)})
    tracker = MlflowTracker(replace(info, tags={f"tag{number}": "x" for number in range(150)}), uri=uri)
    tell(tracker, (trial, result, score))
    close(tracker)
    run = children_of(uri)["trial-0"]
    assert steps_of(uri, run) == list(range(1, 401))
    assert len(run.data.params) == 150
    assert len(run.data.params["key.0"]) == 6000
    assert re.search(r" ... \[cut, [0-9a-f]{8}\]$", run.data.params["key.0"])


def test_every_metric_gets_a_key_of_its_own_and_none_keeps_its_run_out(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "GIVE_UP_SECONDS", 1.0)
    names = [
        "MAP@k",
        "MAP_k",
        "val/MAP@k",
        "@",
        "%",
        "_",
        "",
        ".",
        "..",
        "/..",
        "../b",
        "a//b",
        "a/../b",
        "/loss",
        "loss/",
        "x" * 251,
        "x" * 252,
    ]
    names += ["loss-deadbeef", "score", "loss", "train_seconds", "a b", "a\nb", "\ud800", "F₁", "lr:0"]
    metrics = {name: 1000.0 + number for number, name in enumerate(names)}
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(evaluations=(make_evaluation(2**70, metrics=metrics),)))
    close(tracker)
    assert tracker.num_unwritten == 0
    found = children_of(uri)["trial-0"].data.metrics
    kept = {key: value for key, value in found.items() if value in metrics.values()}
    assert kept.keys() >= {"MAP_k", "_", "a b", "F₁"}
    assert sorted(kept.values()) == list(metrics.values())
    assert (found["MAP_k"], found["score"], found["loss"]) == (1001.0, 1.5, 0.3)


@given(st.sets(st.text(alphabet=st.sampled_from("aA_-./ @%:é\n\ud8000d"), max_size=12) | st.text(max_size=300), min_size=2, max_size=8))
def test_keys_of_different_names_differ_and_mlflow_takes_them(names: set[str]) -> None:
    keys = {plain_key(name) for name in names}
    assert len(keys) == len(names)
    for key in keys:
        _validate_metric(key, 1.0, 0, 0)


def test_long_and_odd_params_and_tags_stay_apart(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "GIVE_UP_SECONDS", 1.0)
    trial, result, score = make_run(error="Traceback: \ud800", outcome=Outcome.ERRORED)
    values = {"opt@a": "x" * 7000 + "1", "opt_a": "x" * 7000 + "2", "k" * 300: "\ud800", "nul": "a\0b", "..": [1, 2]}
    tracker = MlflowTracker(replace(info, name="n" * 250, tags={"..": "1", "a@b": "2", "a_b": "3"}), uri=uri)
    tell(tracker, (replace(trial, values=values), result, score))
    close(tracker)
    assert tracker.num_unwritten == 0
    run, tags = children_of(uri)["trial-0"], parent_of(uri).data.tags
    assert len(run.data.params) == 5
    assert run.data.params["opt_a"] not in {value for key, value in run.data.params.items() if key != "opt_a"}
    assert all(len(value) <= 6000 for value in run.data.params.values())
    assert sorted(tags[key] for key in tags if not key.startswith(("autotune.", "mlflow."))) == ["1", "2", "3"]
    assert artifact(uri, run, "error.txt") == "Traceback: \\ud800"


def test_what_a_store_refuses_keeps_only_itself_out(
    info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_batch = MlflowClient.log_batch

    def refuse(self: MlflowClient, run_id: str, **kinds: Any) -> None:
        if any(entry.key in ("f1", "optimizer") for entries in kinds.values() for entry in entries):
            raise MlflowException("not this one", INVALID_PARAMETER_VALUE)
        log_batch(self, run_id, **kinds)

    monkeypatch.setattr(MlflowClient, "log_batch", refuse)
    monkeypatch.setattr(mlflow_tracker, "GIVE_UP_SECONDS", 1.0)
    tracker = MlflowTracker(info, uri=uri)
    for number in range(3):  # several are written in one transaction first
        tell(tracker, make_run(number))
    close(tracker)
    assert tracker.num_unwritten == 0
    for run in children_of(uri).values():
        assert run.data.metrics["accuracy"] == 0.9
        assert "f1" not in run.data.metrics
        assert run.data.params.keys() == {"optimizer.lr"}
    assert len([line for line in caplog.messages if "MLflow refuses" in line]) == 1


def test_a_running_trial_can_be_watched(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "WRITE_EVERY_SECONDS", 0.0)
    tracker = MlflowTracker(info, uri=uri)
    trial, result, _ = make_run()
    tracker.start(trial)
    tracker.evaluate(trial.name, result.evaluations[0])
    wait_until(lambda: [step for run in children_of(uri).values() for step in steps_of(uri, run)] == [1])
    assert children_of(uri)["trial-0"].info.status == "RUNNING"
    close(tracker)


def test_no_run_is_left_open_after_close(info: StudyInfo, uri: str) -> None:
    tracker = MlflowTracker(info, uri=uri)
    trial, result, _ = make_run()
    tracker.start(trial)
    tracker.evaluate(trial.name, result.evaluations[0])
    close(tracker, status="KILLED")
    close(tracker, status="FINISHED")
    assert {run.info.status for run in runs_of(uri)} == {"KILLED"}
    run = children_of(uri)["trial-0"]
    assert run.data.tags["autotune.outcome"] == "INTERRUPTED"
    assert steps_of(uri, run) == [1]


def abandon(tracker: MlflowTracker) -> None:
    """Leave the store as a killed driver does: all that was told is written, nothing is ended."""
    wait_until(tracker._queue.empty)
    tracker._queue.put(None)
    tracker._thread.join()


def test_a_resumed_study_completes_what_its_killed_driver_left(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "WRITE_EVERY_SECONDS", 0.0)
    complete, half_written, unknown, orphan = (make_run(number) for number in range(4))
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, complete)
    for trial, result, _ in (half_written, orphan):
        tracker.start(trial)
        tracker.evaluate(trial.name, result.evaluations[0])
    abandon(tracker)
    assert {name: run.info.status for name, run in children_of(uri).items()} == {
        "trial-0": "FINISHED",
        "trial-1": "RUNNING",
        "trial-3": "RUNNING",
    }

    resumed = MlflowTracker(
        replace(info, settings={**info.settings, "num_trials": 80}), uri=uri, finished=[complete, half_written, unknown]
    )
    assert parent_of(uri).info.status == "RUNNING"
    close(resumed)
    children = children_of(uri)
    assert {name: run.data.tags["autotune.outcome"] for name, run in children.items()} == {
        "trial-0": "REACHED",
        "trial-1": "REACHED",
        "trial-2": "REACHED",
        "trial-3": "INTERRUPTED",
    }
    for number in range(3):
        assert steps_of(uri, children[f"trial-{number}"]) == [1, 2, 3]
    parent = parent_of(uri)
    assert (parent.data.params["num_trials"], parent.data.tags["autotune.resumed.num_trials"]) == ("40", "80")
    assert {run.info.status for run in runs_of(uri)} == {"FINISHED", "KILLED"}


def test_resuming_twice_writes_nothing_twice(info: StudyInfo, uri: str) -> None:
    run = make_run()
    first = MlflowTracker(info, uri=uri)
    tell(first, run)
    close(first)
    for _ in range(2):
        again = MlflowTracker(info, uri=uri, finished=[run])
        again.finish(*run)
        close(again)
    assert list(children_of(uri)) == ["trial-0"]
    assert steps_of(uri, children_of(uri)["trial-0"]) == [1, 2, 3]


def test_a_study_goes_on_whose_runs_were_renamed_or_named_by_an_earlier_version(info: StudyInfo, uri: str) -> None:
    runs = [make_run(number) for number in range(2)]
    first = MlflowTracker(info, uri=uri)
    for run in runs:
        tell(first, run)
    close(first)
    renamed, earlier = (children_of(uri)[f"trial-{number}"].info.run_id for number in range(2))
    client = MlflowClient(uri)
    client.update_run(renamed, name="my favourite")
    client.update_run(earlier, name="trial-1")
    client.delete_tag(earlier, "autotune.run")
    close(MlflowTracker(info, uri=uri, finished=runs))
    assert sorted(run.info.run_name for run in runs_of(uri)) == ["cnn-1", "my favourite", "trial-1"]


def test_a_new_study_of_an_old_name_gets_its_own_parent(info: StudyInfo, uri: str) -> None:
    first = MlflowTracker(info, uri=uri)
    tell(first, make_run())
    close(first)
    close(MlflowTracker(info, uri=uri))
    close(MlflowTracker(replace(info, folder="elsewhere/cnn-1"), uri=uri))
    parents = [run for run in runs_of(uri) if run.data.tags["autotune.phase"] == "study"]
    assert len(parents) == 3


def test_mlflows_pages_offer_a_view_with_the_trials_best_first_and_keep_one_that_was_changed(info: StudyInfo, uri: str) -> None:
    client, tag = MlflowClient(uri), "mlflow.sharedViewState.autotune"
    tracker = MlflowTracker(replace(info, parameters=["optimizer", "optimizer.lr"]), uri=uri)
    tell(tracker, make_run())
    close(tracker)
    experiment = client.get_experiment_by_name("cnn")
    view = json.loads(experiment.tags[tag])
    state = json.loads(view["state"])
    assert view["name"] == "trials, best first"
    order = f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"
    (run,) = client.search_runs([experiment.experiment_id], state["searchFilter"], order_by=[order])  # as the page asks for it
    shown = {"metrics": run.data.metrics, "tags": run.data.tags, "params": run.data.params}
    columns = [column.partition(".") for column in state["selectedColumns"]]
    assert [shown[kind][key.strip("`")] for kind, _, key in columns] == [1.5, 0.9, "REACHED", "cnn-1", "sgd", "0.1"]
    assert tracker.page == f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey=autotune"
    close(MlflowTracker(replace(info, name="cnn-2", parameters=["optimizer.lr", *(f"key.{number}" for number in range(1000))]), uri=uri))
    columns = json.loads(json.loads(client.get_experiment_by_name("cnn").tags[tag])["state"])["selectedColumns"]
    assert columns[-1].startswith("params.`key.")
    assert len(client.get_experiment_by_name("cnn").tags[tag]) <= 5000
    changed = json.dumps({**view, "updatedAt": view["updatedAt"] + 1})
    client.set_experiment_tag(experiment.experiment_id, tag, changed)
    close(MlflowTracker(replace(info, name="cnn-3", parameters=["other"]), uri=uri))
    assert client.get_experiment_by_name("cnn").tags[tag] == changed
    client.set_experiment_tag(experiment.experiment_id, tag, "changed")
    close(MlflowTracker(replace(info, name="cnn-4", parameters=["other"]), uri=uri))
    assert client.get_experiment_by_name("cnn").tags[tag] == "changed"


def test_a_deleted_experiment_is_restored_and_said(info: StudyInfo, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    client = MlflowClient(uri)
    client.delete_experiment(client.create_experiment(info.experiment))
    with caplog.at_level(logging.INFO, logger="autotune.tracking"):
        close(MlflowTracker(info, uri=uri))
    assert [found.name for found in client.search_experiments()] == [info.experiment, "Default"]
    assert "restored" in caplog.text


def test_a_store_that_fails_for_a_while_costs_nothing(
    info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mlflow_tracker, "RETRY_AFTER_SECONDS", 0.0)
    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "log_batch", fail, raising=True)
        with pytest.raises(ConfigError, match="database is locked"):
            MlflowTracker(info, uri=uri)
    tracker = MlflowTracker(info, uri=uri)
    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "log_batch", fail)
        tell(tracker, make_run(0))
        tell(tracker, make_run(1))
        wait_until(lambda: tracker._num_failures > 3)
    close(tracker)
    children = children_of(uri)
    assert {name: (run.info.status, steps_of(uri, run)) for name, run in children.items()} == {
        "trial-0": ("FINISHED", [1, 2, 3]),
        "trial-1": ("FINISHED", [1, 2, 3]),
    }
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING and record.name.startswith("autotune")]
    assert len(warnings) == 1


def test_runs_that_the_store_refuses_do_not_hold_up_the_others(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run = MlflowClient.create_run

    def refuse(self: MlflowClient, *args: Any, **rest: Any) -> Run:
        if args[2].get("autotune.run") in ("trial-0", "trial-1"):
            raise MlflowException("no")
        return create_run(self, *args, **rest)

    monkeypatch.setattr(MlflowClient, "create_run", refuse)
    monkeypatch.setattr(mlflow_tracker, "GIVE_UP_SECONDS", 1.0)
    tracker = MlflowTracker(info, uri=uri)
    for number in range(4):
        tell(tracker, make_run(number))
    close(tracker)
    assert sorted(children_of(uri)) == ["trial-2", "trial-3"]
    assert parent_of(uri).info.status == "FINISHED"


def test_a_store_that_is_gone_never_ends_the_study(
    info: StudyInfo,
    uri: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mlflow_tracker, "GIVE_UP_SECONDS", 1.0)
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(0))
    wait_until(lambda: "trial-0" in children_of(uri) and children_of(uri)["trial-0"].info.status == "FINISHED")
    (tmp_path / "mlflow.db").write_bytes(b"no longer a database" * 1000)
    tell(tracker, make_run(1))
    tell(tracker, make_run(2))
    close(tracker)
    messages = [record.getMessage() for record in caplog.records if record.name == "autotune.tracking"]
    assert "the study goes on" in messages[0]
    assert "MLflow did not take 2 runs and the study's own end" in messages[-1]
    assert len(messages) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_word_that_makes_no_sense_ends_no_thread(info: StudyInfo, uri: str) -> None:
    tracker = MlflowTracker(info, uri=uri)
    trial, result, _ = make_run(0)
    tracker.start(trial)
    tracker.evaluate(trial.name, replace(result.evaluations[0], metric="high"))  # type: ignore[arg-type]
    tell(tracker, make_run(1))
    close(tracker)
    assert {run.info.status for run in runs_of(uri)} == {"FINISHED", "KILLED"}


def test_runs_that_are_written_together_are_the_same_as_by_themselves(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(number, Outcome.CAPPED if number % 2 else Outcome.REACHED) for number in range(6)]
    sizes = []
    write_together = MlflowTracker._write_together

    def count(self: MlflowTracker) -> None:
        before = self._num_written
        write_together(self)
        sizes.append(self._num_written - before)

    monkeypatch.setattr(MlflowTracker, "_write_together", count)
    close(MlflowTracker(info, uri=uri, finished=runs))
    together = children_of(uri)
    assert max(sizes) == 6
    for run in together.values():
        MlflowClient(uri).delete_run(run.info.run_id)
    monkeypatch.setattr(MlflowTracker, "_write_together", lambda self: None)
    close(MlflowTracker(replace(info, name="cnn-2"), uri=uri, finished=runs))
    alone = children_of(uri)
    assert sorted(alone) == sorted(together)
    own = ("mlflow.parentRunId", "autotune.study")
    for name, run in alone.items():
        other = together[name]
        assert (run.data.params, run.data.metrics, run.info.status) == (other.data.params, other.data.metrics, other.info.status)
        assert (run.info.start_time, run.info.end_time) == (other.info.start_time, other.info.end_time)
        assert {key: tag for key, tag in run.data.tags.items() if key not in own} == {
            key: tag for key, tag in other.data.tags.items() if key not in own
        }
        for file in ("config.yaml", "overrides.yaml", "fingerprint.json"):
            assert artifact(uri, run, file) == Path(other.info.artifact_uri, file).read_text()


def test_one_run_that_a_database_refuses_costs_no_other_of_its_transaction(
    info: StudyInfo, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "GIVE_UP_SECONDS", 1.0)
    set_terminated = MlflowClient.set_terminated

    def refuse(self: MlflowClient, run_id: str, *args: Any, **rest: Any) -> None:
        if self.get_run(run_id).data.tags.get("autotune.run") == "trial-2":
            raise MlflowException("no")
        set_terminated(self, run_id, *args, **rest)

    monkeypatch.setattr(MlflowClient, "set_terminated", refuse)
    tracker = MlflowTracker(info, uri=uri, finished=[make_run(number) for number in range(5)])
    tracker.close(status="KILLED", metrics={}, tags={}, artifacts=[])
    ended = {name for name, run in children_of(uri).items() if run.info.end_time is not None}
    assert ended == {"trial-0", "trial-1", "trial-3", "trial-4"}
    assert tracker.num_unwritten == 1
    ids = {run.info.run_id for run in runs_of(uri)}
    folders = {path.name for path in (tmp_path / "mlruns" / "cnn").iterdir()}
    assert folders <= ids, "what the refused transaction wrote into files is gone"


def test_a_tracker_keeps_few_runs_that_a_store_does_not_take_and_writes_them_later(
    info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "RETRY_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(mlflow_tracker, "MAX_UNWRITTEN", 5)
    tracker = MlflowTracker(info, uri=uri)
    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "create_run", fail)
        told = 0
        while tracker.has_room:
            tell(tracker, make_run(told))
            told += 1
            time.sleep(0.2)
        assert told < 50
        assert tracker.num_unwritten == told
    wait_until(lambda: tracker.has_room)
    close(tracker)
    assert len(children_of(uri)) == told
    assert (tracker.num_unwritten, tracker.lacks_end) == (0, False)


def test_a_run_whose_end_came_too_late_is_completed_and_not_doubled(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "WRITE_EVERY_SECONDS", 0.0)
    trial, result, score = make_run()
    tracker = MlflowTracker(info, uri=uri)
    tracker.start(trial)
    tracker.evaluate(trial.name, result.evaluations[0])
    close(tracker, status="KILLED")
    assert children_of(uri)["trial-0"].data.tags["autotune.outcome"] == "INTERRUPTED"
    close(MlflowTracker(info, uri=uri, finished=[(trial, result, score)]))
    run = children_of(uri)["trial-0"]
    assert (run.info.status, run.data.tags["autotune.outcome"], steps_of(uri, run)) == ("FINISHED", "REACHED", [1, 2, 3])


def test_a_trial_that_goes_on_after_a_pause_goes_on_in_its_run(info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "WRITE_EVERY_SECONDS", 0.0)
    run = make_run()
    tracker = MlflowTracker(info, uri=uri)
    tracker.start(run[0])
    tracker.evaluate("trial-0", run[1].evaluations[0])
    close(tracker, status="KILLED")
    resumed = MlflowTracker(info, uri=uri)
    resumed.start(run[0])
    wait_until(lambda: children_of(uri)["trial-0"].info.status == "RUNNING")
    resumed.finish(*run)
    close(resumed)
    assert steps_of(uri, children_of(uri)["trial-0"]) == [1, 2, 3]


@pytest.mark.parametrize("argument", [*({"close_seconds": each} for each in (-1, math.nan, math.inf, "long")), {"log_model": [1]}])
def test_an_argument_of_a_wrong_type_is_refused(info: StudyInfo, argument: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^tracking\.{next(iter(argument))}: found"):
        MlflowTracker(info, **argument)


def test_a_full_disk_delays_runs_and_costs_none(
    info: StudyInfo, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mlflow_tracker, "RETRY_AFTER_SECONDS", 0.1)
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(0))
    wait_until(lambda: tracker.num_unwritten == 0)
    with largest_file((tmp_path / "mlflow.db").stat().st_size):
        for number in range(1, 80):
            tell(tracker, make_run(number, num_evaluations=20))
        wait_until(lambda: tracker._num_failures > 1)
    close(tracker)
    assert len(children_of(uri)) == 80
    assert {run.info.status for run in runs_of(uri)} == {"FINISHED"}
    warnings = [record.getMessage() for record in caplog.records if record.name == "autotune.tracking"]
    assert len(warnings) == 1
    assert "the study goes on" in warnings[0]


def fail(*args: object, **rest: object) -> None:
    raise MlflowException("database is locked")


def test_a_server_that_does_not_answer_is_one_line(info: StudyInfo) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ConfigError, match="Connection refused") as caught:
        MlflowTracker(info, uri=uri)
    assert str(caught.value).startswith(f"tracking.uri: {uri}: cannot be used")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("nonsense://x", "no such kind of store"),
        ("localhost:5000", "no such kind of store"),
        ("sqlite:////proc/absent/x.db", "No such file"),
        ("postgresql://me:secret@127.0.0.1:1/db", "refused"),
    ],
)
def test_a_store_that_is_none_is_one_line(info: StudyInfo, uri: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        MlflowTracker(info, uri=uri)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_environments_store_is_used_unless_one_is_named(
    info: StudyInfo, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    other = f"sqlite:///{tmp_path / 'elsewhere' / 'other.db'}"
    (tmp_path / "elsewhere" / "other.db").write_bytes((tmp_path / "mlflow.db").read_bytes())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
    close(MlflowTracker(info))
    assert parent_of(other).info.run_name == "cnn-1"
    assert parent_of(other).info.artifact_uri.startswith(str(tmp_path / "elsewhere" / "mlruns"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    close(MlflowTracker(info))
    assert parent_of(uri).info.artifact_uri.startswith(str(tmp_path / "mlruns"))


def test_a_new_store_is_made_without_a_word(info: StudyInfo, tmp_path: Path) -> None:
    script = (
        "from autotune.tracking.tracker import StudyInfo\n"
        "from autotune.tracking.mlflow_tracker import MlflowTracker\n"
        "info = StudyInfo(name='s', kind='study', workload='w', experiment='e', folder='s', settings={}, tags={})\n"
        "MlflowTracker(info).close(status='FINISHED', metrics={}, tags={}, artifacts=[])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "mlflow.db").exists()


def test_the_records_come_without_mlflow() -> None:
    script = "import sys, autotune.tracking.tracker, autotune.tracking.mlflow_tracker; sys.exit('mlflow' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=True, timeout=PATIENCE_SECONDS
    )


def test_no_tracker_takes_the_same_words(info: StudyInfo) -> None:
    run = make_run()
    tracker = NoTracker(info, finished=[run])
    tracker.start(run[0])
    tracker.evaluate(run[0].name, make_evaluation(1))
    tracker.finish(*run)
    tracker.close(status="FINISHED", metrics={}, tags={}, artifacts=[])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_store: bytes) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "mlflow.db").write_bytes(empty_store)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, 15)
            exit_code(process)


@pytest.mark.slow
def test_a_server_keeps_the_same_study(info: StudyInfo, server: str, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(0), make_run(1, Outcome.CAPPED)
    tracker = MlflowTracker(info, uri=server)
    tell(tracker, first)
    close(tracker, status="KILLED")
    resumed = MlflowTracker(info, uri=server, finished=[first])
    tell(resumed, second)
    close(resumed)
    assert {name: run.info.status for name, run in children_of(server).items()} == {"trial-0": "FINISHED", "trial-1": "FINISHED"}
    assert "batch_size: 64" in artifact(server, children_of(server)["trial-0"], "config.yaml")
    assert steps_of(server, children_of(server)["trial-1"]) == [1, 2, 3]
    assert "View run" not in capfd.readouterr().out


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class Proxy(ThreadingHTTPServer):
    """A server in front of another one, which it stands for, or which it keeps from answering as it should."""

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.behind, self.fault = behind, ""
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that went away."""


class Passing(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.fault == "away":
            self.connection.close()
            return
        if self.server.fault == "500":
            self.send_error(500)
            return
        if self.server.fault == "slow":
            time.sleep(2.0)
        kept = {key: value for key, value in self.headers.items() if key.lower() in ("content-type", "accept")}
        asked = urllib.request.Request(self.server.behind + self.path, content or None, kept, method=self.command)
        try:
            with urllib.request.urlopen(asked, timeout=30) as reply:
                code, kind, body = reply.status, reply.headers.get("Content-Type", ""), reply.read()
        except urllib.error.HTTPError as error:
            code, kind, body = error.code, error.headers.get("Content-Type", ""), error.read()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815  # names of http.server

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with Proxy(server) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["away", "500", "slow"])
def test_a_server_that_fails_for_a_while_gets_every_run_once(
    fault: str, info: StudyInfo, server: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mlflow_tracker, "RETRY_AFTER_SECONDS", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    info = replace(info, name=f"fails-{fault}", experiment=f"fails-{fault}")
    tracker = MlflowTracker(info, uri=proxy.url)
    runs = [make_run(number) for number in range(6)]
    tell(tracker, runs[0])
    wait_until(lambda: tracker.num_unwritten == 0)
    proxy.fault = fault
    for run in runs[1:3]:
        began = time.monotonic()
        tell(tracker, run)
        assert time.monotonic() - began < 1.0, "whoever tells the tracker does not wait for the server"
    wait_until(lambda: tracker._num_failures > 1 or (fault == "slow" and tracker.num_unwritten < 2))
    proxy.fault = ""
    for run in runs[3:]:
        tell(tracker, run)
    close(tracker)
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name(info.experiment)
    found = client.search_runs([experiment.experiment_id], "tags.`autotune.phase` = 'search'")
    assert sorted(run.data.tags["autotune.run"] for run in found) == [f"trial-{number}" for number in range(6)]
    assert {run.info.status for run in found} == {"FINISHED"}
    warnings = [record for record in caplog.records if record.name == "autotune.tracking" and record.levelno >= logging.WARNING]
    assert len(warnings) == (0 if fault == "slow" else 1)


@pytest.mark.slow
def test_a_server_that_stays_away_is_given_up_and_a_later_process_writes_the_rest(
    info: StudyInfo, server: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "GIVE_UP_SECONDS", 3.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    info = replace(info, name="stays-away", experiment="stays-away")
    runs = [make_run(number) for number in range(4)]
    tracker = MlflowTracker(info, uri=proxy.url)
    proxy.fault = "away"
    for run in runs:
        tell(tracker, run)
    began = time.monotonic()
    close(tracker)
    assert time.monotonic() - began < 60.0
    assert (tracker.num_unwritten, tracker.lacks_end) == (4, True)
    proxy.fault = ""
    close(MlflowTracker(info, uri=proxy.url, finished=runs))
    client = MlflowClient(server)
    found = client.search_runs([client.get_experiment_by_name(info.experiment).experiment_id])
    assert sorted(run.data.tags.get("autotune.run", "study") for run in found) == ["study", *(f"trial-{number}" for number in range(4))]
    assert {run.info.status for run in found} == {"FINISHED"}


_OPEN = """
import os, sys, warnings
warnings.simplefilter("ignore")
from sqlalchemy import Engine, event
from autotune.tracking.mlflow_store import open_experiment

@event.listens_for(Engine, "after_cursor_execute")
def end(connection, cursor, statement, *_):
    if sys.argv[2] == "killed" and "CREATE TABLE logged_models" in statement:
        os._exit(9)

open_experiment(sys.argv[1], sys.argv[2])
"""


def _opening(uri: str, name: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", _OPEN, uri, name], stderr=subprocess.DEVNULL)


def test_a_new_database_is_whole_though_its_maker_was_killed(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert _opening(uri, "killed").wait(PATIENCE_SECONDS) == 9
    assert _opening(uri, "again").wait(PATIENCE_SECONDS) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_file_that_mlflow_did_not_make_to_the_end_is_one_line_that_says_so(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("create table logged_models (model_id text)")
    told = r"table logged_models already exists\); MLflow was ended .*; move the file away"
    with pytest.raises(ConfigError, match=told), mlflow_store.first_contact(uri):
        mlflow_store.open_experiment(uri, "any")


def test_two_studies_that_begin_at_once_make_one_database(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    processes = [_opening(uri, name) for name in ("one", "other")]
    assert [process.wait(PATIENCE_SECONDS) for process in processes] == [0, 0]
    assert {experiment.name for experiment in mlflow_store.open_store(uri).search_experiments()} == {"Default", "one", "other"}
