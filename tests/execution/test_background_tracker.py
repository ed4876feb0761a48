"""A tracker in a process of its own: what it is told arrives in order, and waits while something is timed."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.execution import background_tracker
from autotune.execution.background_tracker import BackgroundTracker, TrackerOpening, TrackerProcess
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.search.stored_trials import finished_results
from autotune.search.study import confirmations, read_study
from autotune.tracking.tracker import FinishedRun, StudyInfo, TrackedTrial
from tests.patience import wait_until


class FileTracker:
    """Writes a line of all that it is told."""

    def __init__(self, info: StudyInfo, *, finished: Sequence[FinishedRun] = (), path: str) -> None:
        self._path = Path(path)

    def start(self, trial: TrackedTrial) -> None:
        self._write(f"start {trial.name}")

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        self._write(f"evaluate {name}")

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        self._write(f"finish {trial.name}")

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        while self._path.with_name("slow").exists():
            time.sleep(0.1)
        self._write(f"close {status}")

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{time.monotonic()} {line}\n")  # a clock that all processes of a machine share


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "told"


@pytest.fixture
def tracker(path: Path) -> Iterator[BackgroundTracker]:
    node = {"_target_": f"{__name__}.FileTracker", "path": str(path)}
    info = StudyInfo(name="a", kind="study", workload="b", experiment="c", folder=str(path.parent), settings={}, tags={})
    opening = TrackerOpening(node=node, allowed_targets=(__name__,), log_path=path.parent / "log", info=info)
    made = BackgroundTracker(lambda: opening, TrackerProcess(node))
    made.wait()
    yield made
    made.close_if_open(is_interrupt=True)


def test_a_study_in_a_hurry_leaves_a_slow_tracker_behind(tracker: BackgroundTracker, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.with_name("slow").touch()
    tracker.hurry()
    tracker.close_if_open(is_interrupt=True)
    assert not path.exists(), "the tracker has not closed"
    assert "resuming it writes what is missing" in caplog.text


def run(name: str) -> TrackedTrial:
    return TrackedTrial(name=name, phase="confirm", trial=0, values={}, overrides=(), config={}, seed=0, started_at=0.0)


def told(path: Path) -> list[tuple[float, str]]:
    if not path.is_file():
        return []
    return [(float(at), what) for at, _, what in (line.partition(" ") for line in path.read_text().splitlines())]


def test_a_tracker_that_keeps_no_models_is_not_told_of_one(tracker: BackgroundTracker, path: Path) -> None:
    tracker.log_model(dict)  # type: ignore[arg-type]  # never called
    tracker.close(status="FINISHED", metrics={}, tags={}, artifacts=[])
    assert [what for _, what in told(path)] == ["close FINISHED"]


def test_what_is_told_while_runs_are_timed_is_written_after_them_and_in_order(tracker: BackgroundTracker, path: Path) -> None:
    with tracker.held():
        tracker.start(run("first"))
        tracker.start(run("second"))
        time.sleep(0.5)
        ended_at = time.monotonic()
    tracker.start(run("third"))
    tracker.close(status="FINISHED", metrics={}, tags={}, artifacts=[])
    assert [what for _, what in told(path)] == ["start first", "start second", "start third", "close FINISHED"]
    assert min(at for at, _ in told(path)) >= ended_at


def test_what_is_told_before_runs_are_timed_waits_for_them_too_where_the_tracker_was_asked_to_hold(
    tracker: BackgroundTracker, path: Path
) -> None:
    tracker.hold()
    tracker.start(run("first"))
    time.sleep(0.5)
    with tracker.held():
        began_at = time.monotonic()
    tracker.close(status="FINISHED", metrics={}, tags={}, artifacts=[])
    assert [what for _, what in told(path)] == ["start first", "close FINISHED"]
    assert min(at for at, _ in told(path)) >= began_at


def test_a_tracker_that_holds_is_closed_without_waiting(tracker: BackgroundTracker, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_tracker, "MAX_HOLD_SECONDS", 1e6)
    tracker.hold()
    tracker.start(run("first"))
    tracker.close(status="FINISHED", metrics={}, tags={}, artifacts=[])
    assert [what for _, what in told(path)] == ["start first", "close FINISHED"]


def test_long_runs_are_written_while_they_are_timed(tracker: BackgroundTracker, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_tracker, "MAX_HOLD_SECONDS", 0.1)
    with tracker.held():
        tracker.start(run("long"))
        wait_until(lambda: [what for _, what in told(path)] == ["start long"])


def test_a_study_that_ends_while_it_is_timed_is_closed(tracker: BackgroundTracker, path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), tracker.held():
        tracker.start(run("cut short"))
        raise KeyboardInterrupt
    tracker.close_if_open(is_interrupt=True)
    assert [what for _, what in told(path)] == ["start cut short", "close KILLED"]


@pytest.mark.slow
def test_a_study_is_not_written_while_its_confirmation_is_timed(commands: Any, tmp_path: Path) -> None:
    path = tmp_path / "told"
    folders = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[2])))
    said = replace(commands, environment={**commands.environment, "PYTHONPATH": folders}).run(
        *("experiment=cnn_smoke", "target.value=0.9", "evaluate_every_samples=1000", "epochs=10", "optimizer.lr=interval(1e-3,1)"),
        *("search.num_trials=10", "study.name=held", f"allowed_targets=[{__name__}]"),
        *("tracking=none", f"tracking._target_={__name__}.FileTracker", f"+tracking.path={path}"),
        folder=tmp_path,
    )
    assert (said.returncode, said.stderr) == (0, ""), said.stdout
    study = read_study("held", tmp_path / "outputs/held")
    stopped = [f"finish trial-{number}" for number, result in finished_results(study).items() if result.outcome is Outcome.STOPPED]
    assert stopped, "trials were paused as the search ended"
    last_run_ended_at = max(result.stopped_at for result in confirmations(study).values()) + time.monotonic() - time.time()
    assert all(at >= last_run_ended_at for at, what in told(path) if what in stopped)
    assert {what for _, what in told(path)} >= set(stopped)
