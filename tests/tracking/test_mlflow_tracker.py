"""The MLflow tracker against real stores: SQLite files, and a server started here."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_metric

from autotune.errors import ConfigError
from autotune.outcome import Outcome
from autotune.space import Suggestion
from autotune.tracking import mlflow_store, mlflow_tracker
from autotune.tracking.fields import plain_key
from autotune.tracking.mlflow_tracker import MlflowTracker
from autotune.tracking.tracker import BestScore, StudyInfo
from tests.support.patience import PATIENCE_SECONDS, exit_code, wait_until
from tests.support.tracked import STARTED_AT, close, make_evaluation, make_info, make_run, tell

pytestmark = pytest.mark.store


@pytest.fixture
def info(tmp_path: Path) -> StudyInfo:
    return make_info(tmp_path / "outputs" / "cnn-1", tags={"team": "vision"})


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
    return list(
        client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    )


def parent_of(uri: str) -> Run:
    (parent,) = [run for run in runs_of(uri) if run.data.tags["autotune.phase"] == "study"]
    return parent


def children_of(uri: str, experiment_name: str = "cnn") -> dict[str, Run]:
    children = [
        run for run in runs_of(uri, experiment_name) if "mlflow.parentRunId" in run.data.tags
    ]
    assert len({run.data.tags["autotune.run"] for run in children}) == len(children)
    return {run.data.tags["autotune.run"]: run for run in children}


def steps_of(uri: str, run: Run, key: str = "metric") -> list[int]:
    return sorted(
        point.step for point in MlflowClient(uri).get_metric_history(run.info.run_id, key)
    )


def artifact(uri: str, run: Run, name: str) -> str:
    return Path(MlflowClient(uri).download_artifacts(run.info.run_id, name)).read_text()


def test_a_study_is_a_parent_run_in_its_experiment(
    info: StudyInfo, uri: str, tmp_path: Path
) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("<html>")
    (tmp_path / "winner.yaml").write_text("batch_size: 64")
    tracker = MlflowTracker(info, uri=uri)
    artifacts = [tmp_path / "winner.yaml", tmp_path / "report", tmp_path / "absent.png"]
    close(tracker, metrics={"speed_up": 2.5}, tags={"autotune.best": "7"}, artifacts=artifacts)
    parent = parent_of(uri)
    assert parent.info.run_name == "cnn-1"
    assert (
        MlflowClient(uri).get_experiment(parent.info.experiment_id).tags["mlflow.experimentKind"]
        == "custom_model_development"
    )
    assert parent.info.status == "FINISHED"
    assert parent.data.params == {"target.value": "0.98", "num_trials": "40"}
    assert parent.data.metrics == {"speed_up": 2.5}
    assert (
        parent.data.tags.items()
        >= {
            "team": "vision",
            "autotune.study": "cnn-1",
            "autotune.workload": "simple_cnn-digits",
            "autotune.best": "7",
        }.items()
    )
    assert artifact(uri, parent, "winner.yaml") == "batch_size: 64"
    assert artifact(uri, parent, "report/index.html") == "<html>"


def test_a_studys_own_run_has_its_description_and_the_curve_of_the_best_score(
    info: StudyInfo, uri: str
) -> None:
    best = [BestScore(1, 2.0, STARTED_AT), BestScore(3, 1.5, STARTED_AT + 1)]
    for scores in (best[:1], best):  # as it is interrupted, and as it is taken up again
        close(
            MlflowTracker(replace(info, is_resumed=True), uri=uri),
            best_scores=scores,
            tags={"autotune.description": "**2.19x** faster"},
        )
    parent = parent_of(uri)
    assert parent.data.tags["mlflow.note.content"] == "**2.19x** faster"
    assert "autotune.description" not in parent.data.tags
    history = MlflowClient(uri).get_metric_history(parent.info.run_id, "best_score")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (3, 1.5)]


def test_a_trial_is_a_child_run_with_its_point_and_its_end(info: StudyInfo, uri: str) -> None:
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(7, test_metric=0.97, contention="it waited 5.82 s of 10.00 s for a CPU"))
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
        "autotune.contention": "it waited 5.82 s of 10.00 s for a CPU",
        "autotune.seed": "7",
        "mlflow.source.name": "autotune",
    }
    assert run.data.tags.items() >= expected.items()
    assert run.info.status == "FINISHED"
    assert (run.info.start_time, run.info.end_time) == (1_700_000_000_000, 1_700_000_100_000)
    for key, value in {
        "time_to_target_seconds": 0.3,
        "cold_seconds": 0.8,
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


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.MISSED, "FINISHED"),
        (Outcome.CAPPED, "FINISHED"),
        (Outcome.ERRORED, "FAILED"),
        (Outcome.CONTENDED, "FINISHED"),
    ],
)
def test_a_run_that_did_not_reach_the_target_says_how_it_ended(
    info: StudyInfo, uri: str, outcome: Outcome, status: str
) -> None:
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(outcome=outcome, error="Traceback: boom"))
    run = children_of(uri)["trial-0"]
    assert run.info.status == status
    assert run.data.tags["autotune.outcome"] == outcome
    assert "time_to_target_seconds" not in run.data.metrics
    assert artifact(uri, run, "error.txt") == "Traceback: boom"


def test_a_long_trial_with_many_and_odd_values_is_written_whole(info: StudyInfo, uri: str) -> None:
    values = {f"key.{number}": number for number in range(150)}
    odd = {"opt@a": "x" * 7000, "opt_a": "y" * 7000, "k" * 300: "\ud800", "nul": "a\0b"}
    tags = {f"tag{number}": "x" for number in range(150)} | {"..": "1", "a@b": "2", "a_b": "3"}
    trial, result, score = make_run(
        num_evaluations=400, error="Traceback: \ud800", outcome=Outcome.ERRORED
    )
    tracker = MlflowTracker(replace(info, tags=tags), uri=uri)
    tell(tracker, (replace(trial, suggestion=Suggestion({**values, **odd})), result, score))
    close(tracker)
    run = children_of(uri)["trial-0"]
    assert steps_of(uri, run) == list(range(1, 401))
    assert len(run.data.params) == 154
    assert run.data.params["opt_a"] == "y" * 6000
    assert artifact(uri, run, "error.txt") == "Traceback: \\ud800"
    assert [value for value in parent_of(uri).data.tags.values() if value in "123"] == [*"123"]


def test_every_metric_gets_a_key_of_its_own_and_none_keeps_its_run_out(
    info: StudyInfo, uri: str
) -> None:
    names = ["MAP@k", "MAP_k", "@", "_", "", "..", "../b", "a//b", "/loss", "x" * 251, "x" * 252]
    names += ["score", "loss", "train_seconds", "a b", "a\nb", "\ud800", "F₁", "lr:0"]
    metrics = {name: 1000.0 + number for number, name in enumerate(names)}
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run(evaluations=(make_evaluation(3, metrics=metrics),)))
    close(tracker)
    found = children_of(uri)["trial-0"].data.metrics
    kept = {key: value for key, value in found.items() if value in metrics.values()}
    assert kept.keys() >= {"MAP_k", "_", "a b", "F₁"}
    assert sorted(kept.values()) == list(metrics.values())
    assert (found["MAP_k"], found["score"], found["loss"]) == (1001.0, 1.5, 0.3)


@given(
    st.sets(
        st.text(alphabet=st.sampled_from("aA_-./ @%:é\n\ud8000d"), max_size=12)
        | st.text(max_size=300),
        min_size=2,
        max_size=8,
    )
)
def test_keys_of_different_names_differ_and_mlflow_takes_them(names: set[str]) -> None:
    keys = {plain_key(name) for name in names}
    assert len(keys) == len(names)
    for key in keys:
        _validate_metric(key, 1.0, 0, 0)


def test_a_running_trial_can_be_watched(
    info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "WRITE_EVERY_SECONDS", 0.0)
    tracker = MlflowTracker(info, uri=uri)
    trial, result, _ = make_run()
    tracker.start(trial)
    tracker.evaluate(trial.name, result.evaluations[0])
    run = children_of(uri)["trial-0"]
    assert (run.info.status, steps_of(uri, run)) == ("RUNNING", [1])


def test_a_resumed_study_completes_what_its_killed_driver_left(
    info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "WRITE_EVERY_SECONDS", 0.0)
    complete, half_written, unknown, orphan = (make_run(number) for number in range(4))
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, complete)
    for trial, result, _ in (half_written, orphan):
        tracker.start(trial)
        tracker.evaluate(trial.name, result.evaluations[0])
    assert {name: run.info.status for name, run in children_of(uri).items()} == {
        "trial-0": "FINISHED",
        "trial-1": "RUNNING",
        "trial-3": "RUNNING",
    }

    resumed = MlflowTracker(
        replace(info, settings={**info.settings, "num_trials": 80}, is_resumed=True), uri=uri
    )
    assert parent_of(uri).info.status == "RUNNING"
    assert resumed.complete == {"trial-0"}
    for run in (half_written, unknown):
        resumed.finish(*run)
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
    assert parent_of(uri).data.params["num_trials"] == "40"
    assert {run.info.status for run in runs_of(uri)} == {"FINISHED", "KILLED"}


_KILLED_AMID_A_RUN = """
import os, sys
from mlflow import MlflowClient
from autotune.tracking.mlflow_tracker import MlflowTracker
from tests.support.tracked import make_info, make_run, tell
MlflowClient.log_artifact = lambda *arguments: os._exit(9)
tell(MlflowTracker(make_info(sys.argv[1]), uri=sys.argv[2]), make_run())
"""


def test_a_driver_that_is_killed_while_it_writes_a_run_leaves_no_files(
    info: StudyInfo, uri: str, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", _KILLED_AMID_A_RUN, info.folder, uri]
    killed = subprocess.run(command, env={**os.environ, "TMPDIR": str(temporary)}, check=False)
    assert killed.returncode == 9
    assert not any(temporary.iterdir())
    resumed = MlflowTracker(replace(info, is_resumed=True), uri=uri)
    resumed.finish(*make_run())
    close(resumed)
    assert not any(Path(info.folder).iterdir())
    run = children_of(uri)["trial-0"]
    assert json.loads(artifact(uri, run, "fingerprint.json")) == {"torch": "2.13.0"}


def test_a_new_study_of_an_old_name_gets_its_own_parent(info: StudyInfo, uri: str) -> None:
    first = MlflowTracker(info, uri=uri)
    tell(first, make_run())
    close(first)
    close(MlflowTracker(info, uri=uri))
    close(MlflowTracker(replace(info, folder="elsewhere/cnn-1"), uri=uri))
    parents = [run for run in runs_of(uri) if run.data.tags["autotune.phase"] == "study"]
    assert len(parents) == 3


def test_mlflows_pages_offer_a_view_with_the_trials_best_first_and_keep_one_that_was_changed(
    info: StudyInfo, uri: str
) -> None:
    client, tag = MlflowClient(uri), "mlflow.sharedViewState.autotune"
    tracker = MlflowTracker(replace(info, parameters=["optimizer", "optimizer.lr"]), uri=uri)
    tell(tracker, make_run())
    close(tracker)
    experiment = client.get_experiment_by_name("cnn")
    view = json.loads(experiment.tags[tag])
    state = json.loads(view["state"])
    assert view["name"] == "trials, best first"
    order = f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"
    # as the page asks for it
    (run,) = client.search_runs([experiment.experiment_id], state["searchFilter"], order_by=[order])
    shown = {"metrics": run.data.metrics, "tags": run.data.tags, "params": run.data.params}
    columns = [column.partition(".") for column in state["selectedColumns"]]
    assert [shown[kind][key.strip("`")] for kind, _, key in columns] == [
        1.5,
        0.9,
        "REACHED",
        "cnn-1",
        "sgd",
        "0.1",
    ]
    assert (
        tracker.page
        == f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey=autotune"
    )
    changed = json.dumps({**view, "updatedAt": view["updatedAt"] + 1})
    client.set_experiment_tag(experiment.experiment_id, tag, changed)
    close(MlflowTracker(replace(info, name="cnn-3", parameters=["other"]), uri=uri))
    assert client.get_experiment_by_name("cnn").tags[tag] == changed


def test_a_run_whose_write_failed_midway_is_written_once(
    info: StudyInfo, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **rest: object) -> None:
        raise MlflowException("database is locked")

    tracker = MlflowTracker(info, uri=uri)
    for verb in ("log_batch", "log_artifact", "set_terminated"):
        with monkeypatch.context() as broken:
            broken.setattr(MlflowClient, verb, fail)
            with pytest.raises(MlflowException, match="database is locked"):
                tell(tracker, make_run(0))
        assert tracker.complete == set()
    tracker.finish(*make_run(0))
    assert tracker.complete == {"trial-0"}
    run = children_of(uri)["trial-0"]
    assert (run.info.status, steps_of(uri, run)) == ("FINISHED", [1, 2, 3])


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("nonsense://x", "no such kind of store"),
        ("localhost:5000", "no such kind of store"),
        ("sqlite:////proc/absent/x.db", "No such file"),
        ("http://me:secret@127.0.0.1:1", "Connection refused"),
        ([1], "no such kind of store"),
        ("postgresql://me:secret@127.0.0.1:1/db", "refused"),
    ],
)
def test_a_store_that_is_none_is_one_line(info: StudyInfo, uri: Any, said: str) -> None:
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
    tracker = MlflowTracker(info)
    close(tracker)
    assert tracker.browse == f"mlflow ui --backend-store-uri {other}"
    assert parent_of(other).info.run_name == "cnn-1"
    assert parent_of(other).info.artifact_uri.startswith(str(tmp_path / "elsewhere" / "mlruns"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    tracker = MlflowTracker(info)
    close(tracker)
    assert tracker.browse == "mlflow ui"
    assert parent_of(uri).info.artifact_uri.startswith(str(tmp_path / "mlruns"))


def test_a_new_store_is_made_without_a_word(info: StudyInfo, tmp_path: Path) -> None:
    script = (
        "from autotune.tracking.tracker import StudyEnd, StudyInfo\nfrom"
        " autotune.tracking.mlflow_tracker import MlflowTracker\ninfo = StudyInfo(name='s',"
        " kind='study', workload='w', experiment='e', folder='s', settings={},"
        " tags={})\nMlflowTracker(info).close(StudyEnd(status='FINISHED'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "mlflow.db").exists()


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
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, 15)
            exit_code(process)


@pytest.mark.slow
def test_a_server_keeps_the_same_study(
    info: StudyInfo, server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = make_run(0), make_run(1, Outcome.CAPPED)
    tracker = MlflowTracker(info, uri=server)
    tell(tracker, first)
    close(tracker, status="KILLED")
    resumed = MlflowTracker(replace(info, is_resumed=True), uri=server)
    resumed.finish(*first)
    tell(resumed, second)
    close(resumed)
    assert {name: run.info.status for name, run in children_of(server).items()} == {
        "trial-0": "FINISHED",
        "trial-1": "FINISHED",
    }
    assert "batch_size: 64" in artifact(server, children_of(server)["trial-0"], "config.yaml")
    assert steps_of(server, children_of(server)["trial-1"]) == [1, 2, 3]
    assert "View run" not in capfd.readouterr().out


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


_OPEN = """
import sys, warnings
warnings.simplefilter("ignore")
from autotune.tracking.mlflow_store import open_experiment
open_experiment(sys.argv[1], sys.argv[2], [])
"""


@pytest.mark.slow
def test_two_studies_that_begin_at_once_make_one_database(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    processes = [
        subprocess.Popen([sys.executable, "-c", _OPEN, uri, name], stderr=subprocess.DEVNULL)
        for name in ("one", "other")
    ]
    assert [process.wait(PATIENCE_SECONDS) for process in processes] == [0, 0]
    assert {
        experiment.name for experiment in mlflow_store.open_store(uri).search_experiments()
    } == {"Default", "one", "other"}
