"""A whole study whose search pauses trials: killed in the middle, and gone on with."""

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest

from autotune.search.study import finished_results, read_study
from tests.support.patience import wait_until

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


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_with_its_paused_trials(
    commands: Any, tmp_path: Path
) -> None:
    states = tmp_path / "outputs/paused/states"
    process = commands.start(*_COMMAND, folder=tmp_path)
    wait_until(lambda: len(list(states.glob("trial-*/*/state*"))) >= 3, process=process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {int(path.name.removeprefix("trial-")) for path in states.glob("trial-*")}
    commands.succeed(*_COMMAND, folder=tmp_path)

    study = read_study("paused", tmp_path / "outputs/paused")
    results = finished_results(study)
    assert len(results) == 10
    assert not [each for each in study.trials if each.state.name in {"RUNNING", "WAITING"}]
    assert {str(each.outcome) for each in results.values()} <= {
        "REACHED",
        "CAPPED",
        "STOPPED",
        "MISSED",
    }
    assert kept
    assert kept <= {*results}, "what was kept is gone on from"
    for result in results.values():
        for one, other in itertools.pairwise(result.evaluations):
            assert one.step < other.step
            assert one.warm_seconds < other.warm_seconds
            assert one.build_seconds == other.build_seconds
    assert not states.exists()


_REFUSED = """
import errno, time
import autotune

def no_room(folder):
    raise OSError(errno.ENOSPC, "No space left on device")

def train(rate, report, checkpoint):
    begun = checkpoint.load().get("epoch", 0)
    with open("diary", "a") as diary:
        diary.write(f"{autotune.trial().number} from {begun}\\n")
    for epoch in range(begun + 1, 31):
        time.sleep(0.02)
        checkpoint.save({"epoch": epoch}, write_files=no_room)
        report(metric=1 - (1 - rate) ** epoch, epoch=epoch)
"""


@pytest.mark.slow
def test_trials_whose_states_cannot_be_written_are_trained_once(
    commands: Any, tmp_path: Path
) -> None:
    (tmp_path / "refused.py").write_text(_REFUSED)
    commands.succeed(
        "experiment=cnn_smoke",
        "allowed_targets=[refused]",
        "training={_target_: refused.train, rate: 0.1}",
        "search_space=[]",
        "training.rate=interval(0.01,0.2)",
        "search=freeze_thaw",
        "study.name=refused",
        "tracking=none",
        "confirm=none",
        "target.value=0.9",
        "search.num_trials=10",
        "search.max_retakes=0",
        folder=tmp_path,
    )
    begun = (tmp_path / "diary").read_text().splitlines()
    assert sorted(begun) == [f"{number} from 0" for number in range(10)]
    log = (tmp_path / "outputs/refused/autotune.log").read_text()
    assert "was not paused, and continues: " in log
    assert "No space left on device" in log
    results = finished_results(read_study("refused", tmp_path / "outputs/refused"))
    # STOPPED: one that was to be paused as the search was over
    outcomes = {"REACHED", "CAPPED", "MISSED", "STOPPED"}
    assert {str(each.outcome) for each in results.values()} <= outcomes
    assert all(each.lost_seconds == 0 for each in results.values())
