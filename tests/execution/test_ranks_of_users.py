"""Trainings of a user's own over two processes: each library's program ends, is paused and goes
wrong as a training of one process does, and leaves nothing behind.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.config.schema import COMMAND, TrialConfig
from autotune.errors import DataError
from autotune.execution.launcher import Launcher
from autotune.execution.process_group import ProcessGroup
from autotune.execution.task import TrialTask, WorkerReport
from autotune.outcome import Outcome
from tests.support import ranks_of_users
from tests.support.patience import wait_until
from tests.support.records import make_trial_task

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SCRIPT = Path(ranks_of_users.__file__)
SLOW = pytest.mark.slow
PROGRAMS = [
    "ddp",
    pytest.param("fsdp2", marks=SLOW),
    pytest.param("lightning", marks=SLOW),
    pytest.param("lightning_spawn", marks=SLOW),
    pytest.param("hugging_face", marks=SLOW),
    pytest.param("accelerate", marks=SLOW),
    pytest.param("torchrun ddp", marks=SLOW),
    pytest.param("python lightning", marks=SLOW),  # whose launcher starts the second process
]
ENDS = {
    "nan": Outcome.DIVERGED,
    "memory": Outcome.OUT_OF_MEMORY,
    "kill": Outcome.LOST,
    "hang": Outcome.TIMED_OUT,
}


@pytest.fixture
def make_task(trial_config: Callable[..., TrialConfig], tmp_path: Path) -> Callable[..., TrialTask]:
    def make(program: str, fault: str | None = None, epochs: int = 4, **fields: Any) -> TrialTask:
        config = trial_config(
            "target.value=0.9999",
            "target.max_train_seconds=300",
            "seed=11",
            "allowed_targets=[tests,autotune.script]",
            "parallelism.num_workers=2",
        )
        launcher, _, name = program.rpartition(" ")
        training: dict[str, Any] = {
            "_target_": f"{ranks_of_users.__name__}.{name}",
            "fault": fault,
            "epochs": epochs,
        }
        if launcher:
            words = f"{SCRIPT} {name} {epochs} -{fault or ''}"
            size = "--nproc_per_node={devices}" if launcher == "torchrun" else ""
            training = {"_target_": COMMAND, "command": f"{launcher} {size} {words}"}
        task = make_trial_task(replace(config, training=training), tmp_path, num_cpus=2)
        return replace(task, **{"deadline_seconds": 200.0, **fields})

    return make


@pytest.fixture(autouse=True)
def nothing_is_left(launcher: Launcher) -> Iterator[None]:
    """Made before ``group``, so that this looks after it was closed."""
    yield
    wait_until(lambda: _are_gone(launcher))


def _are_gone(launcher: Launcher) -> bool:
    """Whether no process of a training is left."""
    return not psutil.Process(launcher._process.pid).children(recursive=True)


def trained(group: ProcessGroup, task: TrialTask) -> list[WorkerReport]:
    group.begin(task)
    reports = [group.next_report()]
    while reports[-1] is not None and reports[-1].outcome is None:
        reports.append(group.next_report())
    return [report for report in reports if report is not None]


def curve(reports: list[WorkerReport]) -> list[tuple[int, float, float]]:
    return [
        (each.evaluation.step, each.evaluation.epoch, each.evaluation.metric)
        for each in reports
        if each.evaluation is not None
    ]


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_reports_once_an_epoch_and_a_pause_changes_nothing(
    group: ProcessGroup, make_task: Callable[..., TrialTask], tmp_path: Path, program: str
) -> None:
    whole = trained(group, make_task(program))
    assert [epoch for _, epoch, _ in curve(whole)] == [1, 2, 3, 4], whole[-1].error
    assert whole[-1].outcome is Outcome.MISSED
    assert not whole[0].fingerprint.get("warnings")
    assert {each.evaluation.num_workers for each in whole if each.evaluation} == {2}
    state = str(tmp_path / "state")
    group.begin(make_task(program, state_folder=state))
    first = [group.next_report() for _ in range(2)]
    assert [each is not None and each.can_pause for each in first] == [True, True]
    group.keep()
    group.end()
    rest = trained(group, make_task(program, state_folder=state, is_resumed=True))
    assert curve([*filter(None, first), *rest]) == curve(whole), rest[-1].error


@pytest.mark.parametrize("program", ["ddp", pytest.param("fsdp2", marks=SLOW)])
def test_one_process_alone_finds_itself_where_several_devices_may_be_tuned(
    group: ProcessGroup, make_task: Callable[..., TrialTask], program: str, tmp_path: Path
) -> None:
    task = replace(make_task(program), state_folder=str(tmp_path / "paused"))
    alone = {**task.config.parallelism, "num_workers": 1, "_target_": "a strategy of several"}
    task = replace(task, config=replace(task.config, parallelism=alone))
    assert [epoch for _, epoch, _ in curve(trained(group, task))] == [1, 2, 3, 4]


def test_all_ranks_write_into_the_folder_of_the_trial(
    group: ProcessGroup, make_task: Callable[..., TrialTask], tmp_path: Path
) -> None:
    logs = str(tmp_path / "mlflow")
    reports = trained(group, make_task("writing", number=3, logs_folder=logs))
    assert reports[-1].outcome is Outcome.MISSED, reports[-1].error
    folder = tmp_path / "trials" / "trial-0"
    output = (folder / "output.txt").read_text().splitlines()
    assert sorted(output) == ["rank 0 prints 4 None", "rank 1 prints 4 None"]
    told = [(folder / f"rank-{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    assert [trial for trial, _ in told] == [
        f"TrialInfo(number=3, name='trial-0', folder={folder!r}, seed=11)"
    ] * 2
    # what the second one logs to MLflow is not the trial's, nor of another run
    assert [f"{logs}/trial-0" in line for _, line in told] == [True, False]
    assert f"11 logs file://{tempfile.gettempdir()}/autotune-" in told[1][1]


@pytest.mark.parametrize(
    ("script", "num_told"),
    [
        ("report()", 1),  # without torchrun
        (
            "from multiprocessing import get_context, util\n"
            "other = get_context('spawn').Process(target=util.debug, args=('',))\n"
            "if __name__ == '__main__':\n"
            "    other.start(); report(); other.join()",
            0,
        ),
    ],
)
def test_a_command_that_leaves_devices_idle_is_told(
    group: ProcessGroup,
    make_task: Callable[..., TrialTask],
    tmp_path: Path,
    script: str,
    num_told: int,
) -> None:
    file = tmp_path / "script.py"
    file.write_text(f"def report():\n    print('{{\"accuracy\": 0.1}}')\n\n{script}")
    task = make_task("python ddp")
    training = {**(task.config.training or {}), "command": f"python {file}"}
    first, last = trained(group, replace(task, config=replace(task.config, training=training)))
    assert last.outcome is Outcome.MISSED
    told = first.fingerprint.get("warnings", [])
    assert len(told) == num_told
    assert all("2 devices, and its command trains in one process: torchrun" in t for t in told)


@pytest.mark.parametrize(
    ("mistake", "outcome", "told"),
    [
        ("exit", Outcome.ERRORED, "SystemExit: 0"),
        ("abort", Outcome.ERRORED, "rank 1: the worker died: it was ended by SIGABRT"),
        ("raise", Outcome.ERRORED, "[rank1]: ValueError: a shard is broken\nall that it printed: "),
        pytest.param(
            "leave", Outcome.TIMED_OUT, "rank 1 has returned; not ended at its deadline", marks=SLOW
        ),
        ("return", Outcome.INVALID, "autotune.report: reduce='mean': rank 1 has returned; each"),
        ("no mean", Outcome.INVALID, "autotune.report: reduce='mean': rank 1 reports no"),
        ("worker", Outcome.INVALID, "autotune: was called in process"),
    ],
)
def test_a_mistake_on_the_second_rank_is_told(
    group: ProcessGroup,
    make_task: Callable[..., TrialTask],
    mistake: str,
    outcome: Outcome,
    told: str,
) -> None:
    reports = trained(group, make_task("alike_but", mistake, deadline_seconds=60.0))
    assert [metric for *_, metric in curve(reports)] == [0.1, 0.2]
    assert (reports[-1].outcome, told in (reports[-1].error or "")) == (outcome, True), reports[
        -1
    ].error
    if outcome is Outcome.INVALID:
        assert (reports[-1].error or "").startswith(told)


def test_a_rank_that_is_killed_while_a_state_is_written_is_told(
    group: ProcessGroup, make_task: Callable[..., TrialTask], tmp_path: Path
) -> None:
    group.begin(make_task("killed_while_saving", state_folder=str(tmp_path / "state")))
    first = group.next_report()
    assert first is not None
    assert first.can_pause
    with pytest.raises(DataError, match=r"cannot be written: rank 1: the worker died: .* SIGKILL"):
        group.keep()


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_ends_at_its_cap(
    group: ProcessGroup, make_task: Callable[..., TrialTask], program: str
) -> None:
    last = trained(group, make_task(program, epochs=5000, cap_seconds=0.5))[-1]
    assert last.outcome is Outcome.CAPPED, last.error


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fault", ranks_of_users.FAULTS)
def test_what_goes_wrong_in_one_rank_is_the_end_of_all_and_the_next_trial_trains(
    launcher: Launcher,
    group: ProcessGroup,
    make_task: Callable[..., TrialTask],
    program: str,
    fault: str,
) -> None:
    deadline = {"deadline_seconds": 30.0} if fault == "hang" else {}
    last = trained(group, make_task(program, fault, **deadline))[-1]
    assert last.outcome is ENDS[fault], last.error
    wait_until(lambda: _are_gone(launcher))
    assert trained(group, make_task(program, epochs=1))[-1].outcome is Outcome.MISSED
