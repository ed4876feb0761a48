"""A whole study whose search pauses trials: killed in the middle, and gone on with."""

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest

from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.search.stored_trials import finished_results, retried_number
from autotune.search.study import Study, read_study
from tests.support.patience import wait_until

pytestmark = pytest.mark.slow

_COMMAND = (
    "experiment=cnn_smoke",
    "search=freeze_thaw",
    "study.name=paused",
    "tracking=none",
    "confirm=none",
    "target.value=0.9",
    "evaluate_every_samples=1000",
    "epochs=10",
    "optimizer.lr=interval(1e-3,1)",
    "search.num_trials=10",
)


@pytest.fixture(scope="module")
def ended(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], Study]:
    """The study's folder, the trials that were paused as its first process was killed, and the study at its end."""
    folder = tmp_path_factory.mktemp("paused")
    kept = _kill_with_paused_trials(commands, folder)
    last = commands.run(*_COMMAND, folder=folder)
    assert (last.returncode, last.stderr) == (0, "")
    return folder, kept, read_study("paused", folder / "outputs/paused")


def _kill_with_paused_trials(commands: Any, folder: Path) -> set[str]:
    """Kill a study that has paused trials, and return their names."""
    states = folder / "outputs/paused/paused"
    process = commands.start(*_COMMAND, folder=folder)
    wait_until(lambda: len(list(states.glob("trial-*/*"))) >= 3, process=process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return {path.parent.name for path in states.glob("trial-*/state*")}


def _results(ended: tuple[Path, set[str], Study]) -> dict[int, TrialResult]:
    return finished_results(ended[2])


def test_every_trial_ends_once(ended: tuple[Path, set[str], Study]) -> None:
    results = _results(ended)
    assert len(results) == 10
    assert not [each for each in ended[2].trials if each.state.name in {"RUNNING", "WAITING"}]
    assert {str(each.outcome) for each in results.values()} <= {"REACHED", "CAPPED", "STOPPED", "MISSED"}
    assert any(each.outcome == "REACHED" for each in results.values())


def test_what_was_paused_in_the_first_process_ends_in_the_second(ended: tuple[Path, set[str], Study]) -> None:
    _, kept, study = ended
    again = {f"trial-{each.user_attrs['autotune:retry_of']}" for each in study.trials if "autotune:retry_of" in each.user_attrs}
    ended_trials = {f"trial-{number}" for number in _results(ended)}
    assert kept
    assert kept <= ended_trials | again
    assert kept & ended_trials, "a state that was kept is gone on from"


def test_curves_go_on_where_they_stood(ended: tuple[Path, set[str], Study]) -> None:
    for result in _results(ended).values():
        for one, other in itertools.pairwise(result.evaluations):
            assert one.step < other.step
            assert one.warm_seconds < other.warm_seconds
            assert one.build_seconds == other.build_seconds


def test_no_state_is_left_behind(ended: tuple[Path, set[str], Study]) -> None:
    assert not (ended[0] / "outputs/paused/paused").exists()


def test_a_study_goes_on_where_the_states_of_paused_trials_are_damaged(commands: Any, tmp_path: Path) -> None:
    names = _kill_with_paused_trials(commands, tmp_path)
    for name in names:
        (tmp_path / "outputs/paused/paused" / name / "state.pt").write_bytes(b"\0" * 100)
    last = commands.run(*_COMMAND, folder=tmp_path)
    assert (last.returncode, last.stderr) == (0, "")
    study = read_study("paused", tmp_path / "outputs/paused")
    trials, results = study.trials, finished_results(study)
    assert len(results) >= 10
    assert not {result.outcome for result in results.values()} & {Outcome.INVALID, Outcome.LOST, Outcome.ERRORED}
    damaged = {int(name.removeprefix("trial-")) for name in names}
    lost = {number for number in damaged if trials[number].state.name == "FAIL"}
    assert {results[number].outcome for number in damaged - lost} <= {Outcome.STOPPED}, "none of them can have gone on"
    assert {retried_number(trial) for trial in trials} >= lost


@pytest.mark.parametrize("budget", ["search.num_trials=2", "search.time_budget_seconds=0.1"])
def test_paused_trials_end_where_no_further_trial_may_be_started(commands: Any, tmp_path: Path, budget: str) -> None:
    assert _kill_with_paused_trials(commands, tmp_path)
    assert commands.run(*_COMMAND, budget, folder=tmp_path).returncode in (0, 3)
    study = read_study("paused", tmp_path / "outputs/paused")
    assert not [trial for trial in study.trials if trial.state.name == "RUNNING"]
    assert not (tmp_path / "outputs/paused/paused").exists()
