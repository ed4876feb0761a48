"""A tracker in a process of its own: what it is told arrives in order, and waits while something is timed."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.errors import ConfigError
from autotune.execution import background_tracker
from autotune.execution.background_tracker import BackgroundTracker, TrackerOpening, TrackerProcess
from autotune.execution.spool import Spool
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.search.stored_trials import finished_results
from autotune.search.study import confirmations, read_study
from autotune.tracking.tracker import FinishedRun, FinishedRuns, RunEnd, StudyInfo, TrackedTrial
from tests.execution.test_spool import largest_file
from tests.support.patience import wait_until
from tests.tracking.test_mlflow_tracker import make_run


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
        self._write(f"close {status}")

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{time.monotonic()} {line}\n")  # a clock that all processes of a machine share


class BusyTracker(FileTracker):
    """Has no room for a word while a file ``busy`` lies beside its own, and hangs at its end where one named ``hang`` does."""

    num_unwritten = 0

    @property
    def has_room(self) -> bool:
        return not self._path.with_name("busy").exists()

    def close(self, **end: Any) -> None:
        while self._path.with_name("hang").exists():
            time.sleep(0.1)
        super().close(**end)


class NiceTracker(FileTracker):
    """Writes the niceness of its threads: that which hears of a run, and one that was begun then."""

    def start(self, trial: TrackedTrial) -> None:
        super().start(trial)
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        self._write_niceness()

    def close(self, **end: Any) -> None:
        self._write_niceness()
        super().close(**end)

    def _write_niceness(self) -> None:
        self._write(f"niceness {sorted(os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in threading.enumerate())}")


class LateTracker(FileTracker):
    """Asks for one run as it is made and for another as it is closed, and says beforehand which one, unless it is to say nothing."""

    def __init__(self, info: StudyInfo, *, finished: Sequence[FinishedRun] = (), path: str, lacking: Sequence[int] | None = None) -> None:
        super().__init__(info, path=path)
        self._finished = finished
        if lacking is not None:
            self.lacking = lacking
        self._write(f"made {[trial.name for trial, _, _ in finished[1:2]]} of {len(finished)}")

    def close(self, **end: Any) -> None:
        self._write(f"late {self._finished[3][0].name}")
        super().close(**end)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "told"


def opened(kind: str, path: Path, said: list[str], arguments: Mapping[str, Any] | None = None, **opening: Any) -> BackgroundTracker:
    node = {"_target_": f"{__name__}.{kind}", "path": str(path), **(arguments or {})}
    info = StudyInfo(name="a", kind="study", workload="b", experiment="c", folder=str(path.parent), settings={}, tags={})
    made = TrackerOpening(
        node=node, allowed_targets=(__name__,), log_path=path.parent / "log", info=info, rest_command="autotune record --push", **opening
    )
    tracker = BackgroundTracker(lambda: made, TrackerProcess(node), spool_folder=path.parent, say=said.append)
    tracker.wait()
    return tracker


@pytest.fixture
def said() -> list[str]:
    """What the user is told."""
    return []


@pytest.fixture
def tracker(path: Path, said: list[str]) -> Iterator[BackgroundTracker]:
    made = opened("FileTracker", path, said)
    yield made
    made.close_if_open(is_interrupt=True)


@pytest.fixture
def busy(path: Path, said: list[str]) -> Iterator[BackgroundTracker]:
    """A tracker that takes nothing until the file ``busy`` is deleted."""
    path.with_name("busy").touch()
    made = opened("BusyTracker", path, said)
    yield made
    made.close_if_open(is_interrupt=True)


def result_of(number: int) -> TrialResult:
    return TrialResult(
        trial=number,
        values={},
        overrides=(),
        seed=0,
        outcome=Outcome.MISSED,
        evaluations=(),
        started_at=0.0,
        stopped_at=1.0,
        fingerprint={},
    )


def end(tracker: BackgroundTracker, **changes: Any) -> None:
    tracker.close(**{"status": "FINISHED", "metrics": {}, "tags": {}, "artifacts": [], **changes})


def test_a_run_that_a_tracker_did_not_say_it_lacks_is_not_made_once_it_is_open(tmp_path: Path) -> None:
    ours, _theirs = Pipe()
    runs = background_tracker._RunsOnDemand(ours, Spool(tmp_path))
    runs.keep([])
    with pytest.raises(LookupError, match=r"finished\[3\]: is asked for after the tracker was made"):
        runs.run(3)


@pytest.mark.parametrize(("arguments", "made"), [({}, [1, 0, 2, 3, 4]), ({"lacking": [3, 1]}, [1, 3])])
def test_of_the_runs_that_ended_before_only_those_that_a_tracker_lacks_are_made(
    arguments: dict[str, Any], made: list[int], path: Path
) -> None:
    runs = [make_run(number) for number in range(5)]
    asked: list[int] = []

    def make(place: int) -> FinishedRun:
        asked.append(place)
        return runs[place]

    finished = FinishedRuns([RunEnd.of(run) for run in runs], make)
    tracker = opened("LateTracker", path, [], arguments, finished=finished)
    tracker.close(status="FINISHED", metrics={}, tags={}, artifacts=[])
    assert asked == made
    assert [line.partition(" ")[2] for line in path.read_text().splitlines()] == ["made ['trial-1'] of 5", "late trial-3", "close FINISHED"]


def test_a_study_in_a_hurry_leaves_a_slow_tracker_behind(busy: BackgroundTracker, path: Path, said: list[str]) -> None:
    path.with_name("hang").touch()
    busy.hurry()
    busy.close_if_open(is_interrupt=True)
    assert not path.exists(), "the tracker has not closed"
    assert said, "what is missing is told"


def run(name: str) -> TrackedTrial:
    return TrackedTrial(name=name, phase="confirm", trial=0, values={}, overrides=(), config={}, seed=0, started_at=0.0)


def told(path: Path) -> list[tuple[float, str]]:
    if not path.is_file():
        return []
    return [(float(at), what) for at, _, what in (line.partition(" ") for line in path.read_text().splitlines())]


def test_a_tracker_that_keeps_no_models_is_not_told_of_one(tracker: BackgroundTracker, path: Path) -> None:
    tracker.prepare_model(dict)
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a process less nice")
def test_a_tracker_gives_way_to_trainings_until_the_study_has_ended(path: Path, said: list[str]) -> None:
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    tracker = opened("NiceTracker", path, said)
    tracker.start(run("trial-0"))
    wait_until(lambda: path.exists() and "niceness" in path.read_text())
    end(tracker)

    assert [line.partition("niceness ")[2] for _, line in told(path) if "niceness" in line] == [
        str([niceness + 10] * 2),
        str([niceness] * 2),
    ]


def test_a_study_that_ends_while_it_is_timed_is_closed(tracker: BackgroundTracker, path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), tracker.held():
        tracker.start(run("cut short"))
        raise KeyboardInterrupt
    tracker.close_if_open(is_interrupt=True)
    assert [what for _, what in told(path)] == ["start cut short", "close KILLED"]


def test_a_tracker_that_falls_behind_is_told_of_later_and_says_so_meanwhile(
    busy: BackgroundTracker, path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_tracker, "_MAX_SPOOL_BYTES", 10_000)  # so that there are several files
    for number in range(300):
        busy.start(run(f"trial-{number}"))
        busy.finish(run(f"trial-{number}"), result_of(number), None)
    assert busy.num_behind == 300
    assert busy.backlog == "Busy: 300 runs behind"
    assert told(path) == []
    path.with_name("busy").unlink()
    end(busy)
    told_of = [what for _, what in told(path)]
    assert told_of == [f"{verb} trial-{number}" for number in range(300) for verb in ("start", "finish")] + ["close FINISHED"]
    assert (busy.num_behind, busy.is_complete) == (0, True)
    assert not [line for line in said if "lacks" in line]
    assert sorted(file.name for file in path.parent.iterdir()) == ["log", "told"], "nothing is left of what was not written yet"


def test_what_a_tracker_does_not_write_in_its_time_is_told_with_the_command_that_writes_it(
    busy: BackgroundTracker, path: Path, said: list[str]
) -> None:
    for number in range(3):
        busy.finish(run(f"trial-{number}"), result_of(number), None)
    end(busy, most_seconds=0.5)
    assert said == ["Busy lacks 3 runs; what is missing is written by\n  autotune record --push"]
    assert [what for _, what in told(path)] == ["close FINISHED"]
    assert not busy.is_complete


def test_a_tracker_that_hangs_at_its_end_is_killed(
    busy: BackgroundTracker, path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_tracker, "_GRACE_SECONDS", 0.5)
    path.with_name("busy").unlink()
    path.with_name("hang").touch()
    busy.finish(run("trial-0"), result_of(0), None)
    wait_until(lambda: len(told(path)) == 1)
    end(busy, most_seconds=0.5)
    assert "lacks the study's own end" in said[-1]


def test_a_full_disk_costs_a_tracker_runs_and_never_the_study(
    busy: BackgroundTracker, path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy.finish(run("trial-0"), result_of(0), None)
    with largest_file(10):
        for number in range(1, 4):
            busy.start(run(f"trial-{number}"))
            busy.finish(run(f"trial-{number}"), result_of(number), None)
    busy.finish(run("trial-4"), result_of(4), None)
    assert len(said) == 1
    assert "cannot be written: File too large" in said[0]
    path.with_name("busy").unlink()
    end(busy)
    assert [what for _, what in told(path)] == ["finish trial-0", "finish trial-4", "close FINISHED"]
    assert "lacks 3 runs; what is missing is written by" in said[-1]


def test_a_tracker_whose_process_is_killed_is_told_of_and_the_study_goes_on(busy: BackgroundTracker, said: list[str]) -> None:
    busy.finish(run("trial-0"), result_of(0), None)
    busy._process.kill()
    wait_until(lambda: bool(said))
    busy.finish(run("trial-1"), result_of(1), None)
    end(busy)
    assert said == [
        "the tracker's process was ended; the study goes on",
        "Busy lacks 2 runs and the study's own end; what is missing is written by\n  autotune record --push",
    ]


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


@pytest.mark.parametrize(
    ("library", "start"),
    [
        ("mlflow", "TrackerProcess({'_target_': 'autotune.tracking.mlflow_tracker.MlflowTracker'})"),
        ("safetensors", "ForkServer(is_quiet=True)"),
    ],
)
def test_a_process_that_still_imports_ends_with_the_study_that_was_killed(library: str, start: str, tmp_path: Path) -> None:
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text(
        "import os, time\nwith open('imports.part', 'w') as file: file.write(str(os.getpid()))\n"
        "os.replace('imports.part', 'imports')\ntime.sleep(3600)\n"
    )
    (tmp_path / "temporary").mkdir()
    code = (
        "import time\nfrom autotune.execution.background_tracker import TrackerProcess\n"
        f"from autotune.execution.fork_server import ForkServer\nstarted = {start}\ntime.sleep(3600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, start_new_session=True)
    wait_until((tmp_path / "imports").is_file, process=owner)
    owner.kill()
    owner.wait()
    process = int((tmp_path / "imports").read_text())
    wait_until(lambda: not _is_alive(process) and not list((tmp_path / "temporary").glob("autotune-*")))


def _is_alive(process: int) -> bool:
    """Whether a process has not ended; one that has ended stays as a zombie where nobody waits for orphans, as in some containers."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_that_is_away_is_told_before_a_process_is_started() -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"tracking\.uri: http://127\.0\.0\.1:1: cannot be used"):
        TrackerProcess({"_target_": "autotune.tracking.mlflow_tracker.MlflowTracker", "uri": "http://127.0.0.1:1"})
    assert psutil.Process().children() == before
