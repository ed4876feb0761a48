"""Runs in turns: units of which one worker makes one run after another, and what becomes of the
rest of a unit where a run is lost, fails or has spoilt times.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.config.command_line import Interrupt
from autotune.config.schema import TrialConfig
from autotune.confirm.turns import Turns, compiled_anew
from autotune.contention import Contention
from autotune.errors import ClusterError, WorkerError
from autotune.execution.cluster import ClusterSize
from autotune.execution.launcher import Launcher
from autotune.execution.process_group import ProcessGroup
from autotune.execution.task import TrialTask, WorkerReport
from autotune.execution.trial_manager import TrialManager
from autotune.failure import Failure, FailureKind
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.policy import CONFIRM, Decision, Run
from autotune.space import Suggestion
from tests.execution.test_trial_manager import make_trials, report
from tests.support.records import make_evaluation, make_trial_task

__all__ = ["make_trials"]

MakeTurns = Callable[..., TrialManager]


def planned(trial: int, race_round: int) -> Run:
    return Run(
        number=2 * race_round + trial,
        name=f"confirm-{trial}-{race_round}",
        suggestion=Suggestion({"batch_size": 16 * (trial + 1)}),
        seed=race_round,
        phase=CONFIRM,
        trial=trial,
        round=race_round,
        may_have_begun=True,
    )


def pair(race_round: int) -> list[Run]:
    return [planned(0, race_round), planned(1, race_round)]


@pytest.fixture
def ended() -> list[tuple[str, TrialResult]]:
    """The runs that have ended, by name, with their results."""
    return []


@pytest.fixture
def make_turns(make_trials: Any, ended: list[tuple[str, TrialResult]]) -> MakeTurns:
    def on_end(run: Run, result: TrialResult) -> float | None:
        ended.append((run.name, result))
        if result.outcome is Outcome.ERRORED:
            raise WorkerError("it fails", "traceback")
        return 1.0

    def make(*batches: list[list[Run]], **settings: Any) -> TrialManager:
        trials, _ = make_trials(policy=Turns(batches, on_end), **settings)
        return trials

    return make


def begin(trials: TrialManager, key: str) -> list[TrialTask]:
    tasks = trials.next_tasks(key)
    if tasks:
        trials.started(key)
    return tasks


def names(tasks: list[TrialTask]) -> list[str]:
    return [task.name for task in tasks]


def test_a_worker_makes_a_unit_in_turns_and_the_next_batch_waits_for_all(
    make_turns: MakeTurns, ended: list[tuple[str, TrialResult]]
) -> None:
    trials = make_turns([pair(0), pair(1)], [pair(2)])
    first, second = begin(trials, "a"), begin(trials, "b")
    assert (names(first), names(second)) == (
        ["confirm-0-0", "confirm-1-0"],
        ["confirm-0-1", "confirm-1-1"],
    )
    assert [task.config.batch_size for task in first] == [16, 32]
    assert [task.config.seed for task in second] == [1, 1]
    assert all(task.is_resumed for task in first), "an earlier process may have begun them"
    for _ in range(2):
        assert trials.reported("a", report()) is Decision.CONTINUE
        last = trials.reported("a", report(Outcome.REACHED))
        assert trials.next_tasks("c") == [], "the other worker may be slower"
    assert last is Decision.STOP
    for _ in range(2):
        last = trials.reported("b", report(Outcome.REACHED, test_metric=0.5))
    assert [name for name, _ in ended] == [*names(first), *names(second)]
    assert [(result.trial, result.seed) for _, result in ended] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [result.test_metric for _, result in ended] == [None, None, 0.5, 0.5]
    assert names(begin(trials, "c")) == ["confirm-0-2", "confirm-1-2"]
    assert not trials.is_finished
    for _ in range(2):
        trials.reported("c", report(Outcome.REACHED))
    assert trials.next_tasks("d") == []
    assert trials.is_finished


def test_a_run_that_is_lost_continues_and_the_rest_of_its_unit_follows_it(
    make_turns: MakeTurns, ended: list[tuple[str, TrialResult]]
) -> None:
    trials = make_turns([pair(0)], max_retries=2)
    begin(trials, "a")
    trials.reported("a", report(Outcome.REACHED))
    trials.reported("a", report())
    trials.died("a", "the worker died: its node has died", FailureKind.LOST)
    [task] = begin(trials, "b")
    assert (task.name, task.is_resumed) == ("confirm-1-0", True)
    trials.reported("b", report(Outcome.REACHED))
    trials = make_turns([pair(1)], max_retries=2)
    for key in ("a", "b", "c"):
        assert names(begin(trials, key)) == ["confirm-0-1", "confirm-1-1"]
        trials.died(key, "the worker died: its node has died", FailureKind.LOST)
    assert [result.outcome for _, result in ended[2:]] == [Outcome.LOST]
    assert names(begin(trials, "d")) == ["confirm-1-1"], "what fails of a pair is no reason"
    trials.reported("d", report(Outcome.REACHED))
    assert [name for name, _ in ended[2:]] == ["confirm-0-1", "confirm-1-1"]


def test_after_a_failure_the_rest_of_a_unit_gets_another_worker(make_turns: MakeTurns) -> None:
    trials = make_turns([pair(0)])
    begin(trials, "a")
    failure = Failure(kind=FailureKind.MEMORY, message="CUDA out of memory")
    of_memory = WorkerReport(evaluation=None, outcome=Outcome.OUT_OF_MEMORY, failure=failure)
    assert trials.reported("a", of_memory) is Decision.STOP
    assert names(begin(trials, "b")) == ["confirm-1-0"]


def test_an_error_of_who_keeps_the_runs_ends_them(make_turns: MakeTurns) -> None:
    trials = make_turns([pair(0)], max_retries=0)
    begin(trials, "a")
    failure = Failure(kind=FailureKind.USER_CODE, message="ValueError: boom")
    failed = WorkerReport(evaluation=None, outcome=Outcome.ERRORED, failure=failure)
    assert trials.reported("a", failed) is Decision.STOP
    assert trials.has_failed
    assert isinstance(trials.policy.error, WorkerError)


def test_a_configuration_that_no_machine_holds_any_more_is_told(make_turns: MakeTurns) -> None:
    trials = make_turns([pair(0)], unsuitable=lambda config: "it takes 8 GPU, and Ray has 4 GPU")
    assert trials.next_tasks("a") == []
    assert isinstance(trials.policy.error, ClusterError)
    assert str(trials.policy.error) == "cluster: confirm-0-0: it takes 8 GPU, and Ray has 4 GPU"


def test_a_machine_that_is_away_for_a_while_is_waited_for_and_ends_nothing(
    make_turns: MakeTurns, tmp_path: Path
) -> None:
    needs_gpu = (1, 1, 1, "pack")
    plan: Any = SimpleNamespace(
        trials_per_gpu=1,
        may_grow=False,
        resources=lambda config: (1, 1),
        placed=lambda config: needs_gpu,
        unsuitable=lambda config: None,
        state_folder=lambda run: tmp_path / run,
        config=SimpleNamespace(search=SimpleNamespace(max_retries=2, max_retakes=2)),
    )
    by_hand, told = make_turns(), list[str]()
    trials = TrialManager.of(
        plan,
        SimpleNamespace(  # type: ignore[arg-type]
            size_now=lambda: ClusterSize(((1, 0),)), draining=frozenset
        ),
        ClusterSize(((1, 1),)),
        policy=Turns([[pair(0)]], lambda run, result: None),
        interrupt=Interrupt(),
        note=told.append,
        tracker=by_hand.tracker,
        listeners=(),
        make_task=by_hand.make_task,
    )
    [first, _] = trials.next_tasks("a")
    trials.on_waiting(first)
    assert told == [
        "confirm-0-0 waits for machines: it takes 1 CPU and 1 GPU, and Ray has 1 CPU and 0 GPU"
    ]
    assert trials.policy.error is None


def spoilt(train_seconds: float) -> WorkerReport:
    contention = Contention(
        seconds=train_seconds,
        stopped_seconds=train_seconds / 2,
        waited_seconds=0.0,
        others_cpu_seconds=0.0,
        study_cpu_seconds=0.0,
    )
    evaluation = make_evaluation(train_seconds, outcome=Outcome.REACHED)
    return WorkerReport(evaluation=evaluation, outcome=Outcome.REACHED, contention=contention)


@pytest.mark.parametrize(("train_seconds", "times_made"), [(2.0, [3, 3, 3, 1]), (7200.0, [1] * 4)])
def test_a_run_whose_times_are_spoilt_is_made_again_if_it_is_short(
    make_turns: MakeTurns,
    ended: list[tuple[str, TrialResult]],
    train_seconds: float,
    times_made: list[int],
) -> None:
    trials = make_turns([pair(0), pair(1)], max_retakes=2)
    keys, made = iter(range(20)), list[str]()
    while tasks := begin(trials, key := str(next(keys))):
        decision = Decision.CONTINUE
        for task in tasks:
            if decision is Decision.CONTINUE:
                made.append(task.name)
                assert task.is_resumed == (made.count(task.name) == 1)
                decision = trials.reported(key, spoilt(train_seconds))
    assert [made.count(name) for name, _ in ended] == times_made, (
        "after three in vain, the machine is always that busy"
    )
    assert all("was stopped" in str(result.contention) for _, result in ended)


def test_after_a_notice_no_further_run_of_a_unit_begins(make_turns: MakeTurns) -> None:
    trials = make_turns([pair(0)])
    begin(trials, "a")
    trials.has_notice = lambda: True
    assert trials.reported("a", report(Outcome.REACHED)) is Decision.STOP
    assert trials.is_saved


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    with closing(Launcher()) as launcher, closing(ProcessGroup(launcher=launcher.address)) as group:
        yield group


@pytest.mark.slow
def test_the_first_compiled_run_of_a_comparison_compiles_and_later_ones_are_charged_it(
    group: ProcessGroup, trial_config: Callable[..., TrialConfig], tmp_path: Path
) -> None:
    def task(*overrides: str) -> TrialTask:
        return make_trial_task(trial_config("epochs=1", *overrides), tmp_path, num_cpus=1)

    def trained(task: TrialTask) -> Evaluation:
        *_, last = [report.evaluation for report in group.train(task) if report.evaluation]
        return last

    eager, compiled = task(), task("runtime.compile=default")
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "of-a-driver-that-was-killed").touch()
    with compiled_anew(tmp_path) as anew:
        assert anew(eager) == replace(eager, is_fresh=True)
        first = trained(anew(compiled))
        assert len(list((tmp_path / "compiled").iterdir())) == 2, (
            "what was compiled, and its record"
        )
        second = trained(anew(replace(compiled, config=replace(compiled.config, seed=5))))
    assert first.reused_build_seconds == 0
    assert 0 < second.reused_build_seconds < second.build_seconds
    assert not (tmp_path / "compiled").exists()
