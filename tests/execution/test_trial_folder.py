"""The folder of a trial of the user's own code, and what it printed: how both are kept apart,
told and bounded.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.execution.task import TrialTask, WorkerReport, report_of_end
from autotune.execution.task_run import TaskRun
from autotune.execution.trial_folder import OUTPUT_FILE, delete_files, run_names
from autotune.failure import FailureKind, kind_of_exit
from autotune.measurement import Target, TrialResult
from autotune.outcome import Outcome
from tests.support.records import make_result, make_trial_task

MakeTask = Callable[..., TrialTask]


@pytest.fixture
def task(
    trial_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeTask:
    """Makes the task of a trial of a function here, of a study whose folder is ``study``."""
    (tmp_path / "study").mkdir()
    monkeypatch.chdir(tmp_path)

    def make(
        function: Callable[..., Any],
        *,
        name: str = "trial-3",
        max_train_seconds: float = 1e9,
        **arguments: Any,
    ) -> TrialTask:
        config = trial_config(
            training={"_target_": f"{__name__}.{function.__name__}", **arguments},
            target=Target(
                metric="score", value=1.0, mode="max", max_train_seconds=max_train_seconds
            ),
            allowed_targets=(__name__,),
            seed=5,
        )
        return make_trial_task(
            config,
            name=name,
            number=3,
            cap_seconds=1e9,
            deadline_seconds=600.0,
            working_folder=str(tmp_path),
            hang_folder=str(tmp_path / "study"),
        )

    return make


def trained(task: TrialTask) -> WorkerReport:
    """The last report of a task's training."""
    run = TaskRun(task, "127.0.0.1")
    try:
        while (report := run.next_report()).outcome is None:
            pass
    finally:
        run.close()
    return report


def error_of(task: TrialTask, report: WorkerReport) -> TrialResult:
    assert report.outcome is not None
    failed = TrialResult.of_failure(report.failure)
    return make_result(3, report.outcome, seed=5, stopped_at=0.0, **failed)


def printing() -> Iterator[Mapping[str, Any]]:
    os.write(1, b"to stdout\n")
    os.write(2, b"to stderr\n")
    subprocess.run(["echo", "of another program"], check=True)
    told = subprocess.run(
        [sys.executable, "-c", "import autotune; print(autotune.trial())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    trial = autotune.trial()
    assert {path.name for path in trial.folder.iterdir()} <= {OUTPUT_FILE}
    (trial.folder / "model.ckpt").write_text("weights")
    yield {
        "score": float(
            (trial.number, trial.name, trial.seed, str(trial)) == (3, trial.folder.name, 5, told)
        )
    }


def test_what_a_trial_writes_and_prints_lies_in_a_folder_of_its_own(
    task: MakeTask, tmp_path: Path, capfd: Any
) -> None:
    for name in ("trial-3", "confirm-3-1", "trial-3"):
        report = trained(task(printing, name=name))
        assert report.outcome is Outcome.REACHED, report.error
        folder = tmp_path / "study/trials" / name
        assert sorted(path.name for path in folder.iterdir()) == ["model.ckpt", OUTPUT_FILE]
        assert (folder / OUTPUT_FILE).read_text() == "to stdout\nto stderr\nof another program\n"
    os.write(1, b"after it\n")
    assert capfd.readouterr().out == "after it\n"
    assert autotune.trial() == replace(autotune.trial(), number=None, name=None, folder=tmp_path)


def silent() -> Iterator[Mapping[str, Any]]:
    yield {"score": float(autotune.trial().folder.is_dir())}


def test_a_trial_on_a_machine_without_the_studys_folder_has_a_temporary_one(
    task: MakeTask, tmp_path: Path
) -> None:
    assert (
        trained(replace(task(silent), hang_folder=str(tmp_path / "elsewhere"))).outcome
        is Outcome.REACHED
    )
    assert not (tmp_path / "elsewhere").exists()


def counting() -> Iterator[Mapping[str, Any]]:
    file = autotune.trial().folder / "log"
    os.write(1, b"a call\n")
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    yield {"score": 1.0, "calls": len(file.read_text())}


def test_a_resumed_trial_finds_its_folder_as_it_was_and_a_new_attempt_an_empty_one(
    task: MakeTask, tmp_path: Path
) -> None:
    for is_resumed, num_calls in ((False, 1), (True, 2), (False, 1)):
        report = trained(replace(task(counting), is_resumed=is_resumed))
        assert report.evaluation is not None
        assert report.evaluation.metrics == {"calls": num_calls}
        assert (
            tmp_path / "study/trials/trial-3" / OUTPUT_FILE
        ).read_text() == "a call\n" * num_calls


def chatty() -> Iterator[Mapping[str, Any]]:
    os.write(1, b"the first line\n")
    for _ in range(30):
        os.write(2, b"y" * 99_999 + b"\n")
    os.write(1, b"the last line\n")
    yield {"score": 1.0}


def test_of_a_long_output_the_begin_and_the_end_are_kept(task: MakeTask, tmp_path: Path) -> None:
    trained(task(chatty))
    output = (tmp_path / "study/trials/trial-3" / OUTPUT_FILE).read_bytes()
    assert output.startswith(b"the first line\n")
    assert output.endswith(b"the last line\n")
    assert b"\n[autotune left out what was here]\n" in output
    assert len(output) < 1_001_000


def printing_for_days() -> Iterator[Mapping[str, Any]]:
    output = autotune.trial().folder / OUTPUT_FILE
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # prints from a process of its own
    assert other.stdin is not None
    os.write(1, b"the first line\n")
    most = 0
    for epoch in range(12):
        other.stdin.write(b"y" * 999_999 + b"\n")
        other.stdin.write(b"epoch %d\n" % epoch)
        other.stdin.flush()
        while not output.read_bytes().endswith(b"epoch %d\n" % epoch):
            time.sleep(0.01)
        most = max(most, output.stat().st_size)
        yield {"score": 0.0, "bytes": most}
    other.communicate()


def test_a_long_output_is_cut_while_the_training_runs(task: MakeTask, tmp_path: Path) -> None:
    run, sizes = TaskRun(task(printing_for_days), "127.0.0.1"), list[float]()
    try:
        while (report := run.next_report()).evaluation is not None:
            sizes.append(report.evaluation.metrics["bytes"])
    finally:
        run.close()
    assert report.outcome is Outcome.MISSED, report.error
    assert len(sizes) == 12
    assert max(sizes) < 6_000_000
    output = (tmp_path / "study/trials/trial-3" / OUTPUT_FILE).read_bytes()
    assert output.startswith(b"the first line\n")
    assert output.endswith(b"epoch 11\n")
    assert output.count(b"[autotune left out what was here]") == 1


def test_what_a_run_left_is_deleted_but_for_its_output_and_no_link_is_followed(
    tmp_path: Path,
) -> None:
    study, precious = tmp_path / "study", tmp_path / "precious"
    for folder in (precious, study / "trials/trial-1/checkpoints/last", study / "trials/my_notes"):
        folder.mkdir(parents=True)
        (folder / "model.ckpt").write_text("weights")
    run = study / "trials/trial-1"
    (run / OUTPUT_FILE).write_text("epoch 1\n")
    (run / "data").symlink_to(precious)
    (run / "checkpoints/data").symlink_to(precious)
    (run / "best.ckpt").symlink_to(precious / "model.ckpt")
    (study / "trials/trial-2").symlink_to(precious)
    (study / "trials/confirm-1-0").mkdir()
    assert run_names(study) == {"trial-1", "trial-2", "confirm-1-0"}
    delete_files(study, [*run_names(study), "trial-9"])
    assert [path.name for path in run.iterdir()] == [OUTPUT_FILE]
    assert not (study / "trials/confirm-1-0").exists()
    assert (study / "trials/my_notes/model.ckpt").exists()
    assert (precious / "model.ckpt").read_text() == "weights"
    (study / "trials").rename(precious / "trials")  # to a larger disk
    (study / "trials").symlink_to(precious / "trials")
    delete_files(study, run_names(study))
    assert (run / OUTPUT_FILE).exists()


_STUDY = """
import autotune

def train(slope):
    (autotune.trial().folder / "checkpoints").mkdir()
    (autotune.trial().folder / "checkpoints" / "last.ckpt").write_text("weights")
    print("slope", slope)
    for epoch in range(1, 6):
        autotune.report(accuracy=min(1.0, epoch * slope), epoch=epoch)

if __name__ == "__main__":
    for keep in ("best", "all"):
        autotune.tune(
            train, name=keep, space={"slope": [0.1, 0.3, 0.5, 0.9, 1.0]}, baseline={"slope": 0.3},
            target=autotune.target("accuracy", at_least=0.9, max_seconds=60), trials=5,
            search="random", stopping="none", tracking="none", overrides=[f"trials.keep={keep}"],
            confirm={"num_candidates": 2, "num_seeds": 4, "max_runs": 8}, quiet=True,
        )
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_study_keeps_the_checkpoints_of_the_winner_and_of_the_baseline(
    commands: Any, tmp_path: Path
) -> None:
    (tmp_path / "study.py").write_text(_STUDY)
    ran = commands.python("study.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for keep in ("best", "all"):
        folder = tmp_path / "outputs" / keep
        best = json.loads((folder / "best.json").read_text())["trial"]
        runs = {path.name for path in (folder / "trials").iterdir()}
        kept = {path.parents[1].name for path in (folder / "trials").glob("*/*/last.ckpt")}
        assert {"trial-0", f"trial-{best}", "confirm-0-0"} <= runs
        assert all((folder / "trials" / run / OUTPUT_FILE).is_file() for run in runs)
        if keep == "all":
            assert kept == runs
            continue
        assert {"trial-0", f"trial-{best}"} == {run for run in kept if run.startswith("trial")}
        (confirmed,) = (run for run in kept if run.startswith("confirm"))
        assert confirmed.startswith(f"confirm-{best}-")


def failing() -> Iterator[Mapping[str, Any]]:
    os.write(1, b"reading the data\n")
    yield {"score": 0.5}
    raise ValueError("the data is empty\nwhich is told in two lines")


def test_an_error_is_told_by_its_exception_with_the_file_that_has_the_rest(
    task: MakeTask, tmp_path: Path
) -> None:
    result = error_of(task(failing), trained(task(failing)))
    assert (result.outcome, result.error_line) == (Outcome.ERRORED, "ValueError: the data is empty")
    assert Path(result.output_path or "").read_text() == "reading the data\n"


def killed() -> Iterator[Mapping[str, Any]]:
    print("reading the data")  # Python keeps it until a line ends, or it is killed
    print("the second process was not found\r10%|#")
    os.kill(os.getpid(), signal.SIGKILL)
    yield {"score": 0.5}


def test_what_a_killed_process_printed_last_is_told(task: MakeTask, tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=trained, args=(task(killed),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    report = report_of_end(
        task(killed),
        seconds=1.0,
        reason="the worker died: it was ended by SIGKILL",
        kind=kind_of_exit(process.exitcode),
    )
    path = tmp_path / "study/trials/trial-3" / OUTPUT_FILE
    said = f"the worker died: it was ended by SIGKILL; it last printed: 10%|# (all of it: {path})"
    assert (report.outcome, report.error) == (Outcome.LOST, said)
    assert error_of(task(killed), report).error_line == said


def test_what_a_rank_printed_of_the_end_of_another_one_is_not_told(
    task: MakeTask, tmp_path: Path
) -> None:
    output = tmp_path / "study/trials/trial-3" / OUTPUT_FILE
    output.parent.mkdir(parents=True)
    output.write_text("RuntimeError: [gloo] Connection closed by peer. Check the logs\n")
    reason = "rank 1 of the command was ended by SIGKILL"
    report = report_of_end(task(killed), seconds=1.0, reason=reason, kind=FailureKind.LOST)
    assert report.error == f"{reason}; its output: {output}"


def late() -> Iterator[Mapping[str, Any]]:
    time.sleep(0.2)
    yield {"score": 0.5}


def test_a_training_that_takes_all_of_its_time_to_its_first_evaluation_is_told_so(
    task: MakeTask,
) -> None:
    report = trained(task(late, max_train_seconds=0.1))
    assert report.outcome is Outcome.TIMED_OUT
    assert report.error is not None
    assert report.error.startswith("its first evaluation came after 0.")
    assert "belongs in: with autotune.building()" in report.error
