"""Trials between the policy and the workers, driven by hand: what is handed out, stopped, given
up and refused.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config.compose import Composer
from autotune.config.space_files import read_search_space
from autotune.contention import Contention
from autotune.execution.task import TrialTask, WorkerReport
from autotune.execution.trial_manager import TrialManager
from autotune.failure import FailureKind
from autotune.measurement import Target, TrialResult
from autotune.outcome import Outcome
from autotune.policy import Decision, Run
from autotune.search.scheduler import Scheduler
from autotune.tracking.tracker import NoTracker, StudyInfo
from tests.support.policies import policy_over
from tests.support.records import make_evaluation, make_trial_task

MakeTrials = Callable[..., tuple[TrialManager, Scheduler]]


@pytest.fixture
def make_trials(tmp_path: Path) -> MakeTrials:
    def make(**changes: Any) -> tuple[TrialManager, Scheduler]:
        composer, fields = Composer(["experiment=cnn"]), changes.pop("task_fields", {})

        def make_task(run: Run) -> TrialTask:
            config = composer.compose_suggestion(run.suggestion, seed=run.seed).trial
            return make_trial_task(config, tmp_path, name=run.name, number=run.number, **fields)

        space = read_search_space([{"batch_size": [16, 32, 64]}], composer)
        policy = policy_over(
            space,
            Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=10.0),
            baseline=space.point_of(composer.compose().lookup),
            num_trials=20,
            may_repeat=True,
        )
        info = StudyInfo(
            name="s",
            kind="study",
            workload="w",
            experiment="e",
            folder=str(tmp_path),
            settings={},
            tags={},
        )
        settings = {
            "policy": policy,
            "max_retries": 2,
            "max_retakes": 2,
            "time_budget_seconds": None,
            "unsuitable": lambda config: None,
            "has_room": lambda tasks: True,
            "state_folder": lambda trial: tmp_path / "paused" / f"trial-{trial}",
        } | changes
        trials = TrialManager(
            tracker=NoTracker(info),
            listeners=(),
            **{"make_task": make_task, **settings},
        )
        return trials, policy

    return make


def report(outcome: Outcome | None = None, **changes: Any) -> WorkerReport:
    evaluation = make_evaluation(metric=0.95, outcome=outcome)
    return WorkerReport(**{"evaluation": evaluation, "outcome": outcome, **changes})


def begin(trials: TrialManager, key: str) -> TrialTask:
    [task] = trials.next_tasks(key)
    trials.started(key)
    return task


def only(policy: Scheduler) -> TrialResult:
    [result] = policy.results.values()
    return result


def test_a_trial_goes_on_until_its_worker_says_how_it_ended(make_trials: MakeTrials) -> None:
    trials, policy = make_trials()
    task = begin(trials, "a")
    assert (task.name, task.config.batch_size, task.cap_seconds) == ("trial-0", 64, math.inf)
    assert trials.reported("a", report()) is Decision.CONTINUE
    assert trials.reported("a", report(Outcome.REACHED)) is Decision.STOP
    assert (only(policy).outcome, len(only(policy).evaluations)) == (Outcome.REACHED, 2)


def test_the_time_budget_counts_from_the_first_trials_start(make_trials: MakeTrials) -> None:
    trials, policy = make_trials(time_budget_seconds=0.1)
    [task] = trials.next_tasks("a")
    time.sleep(0.15)
    assert not trials.is_over, "Ray may take its time to start a worker"
    trials.started("a")
    assert trials.reported("a", report()) is Decision.CONTINUE
    time.sleep(0.15)
    assert trials.is_over
    assert not trials.next_tasks("b")
    assert trials.reported("a", report()) is Decision.STOP
    assert only(policy).outcome is Outcome.STOPPED
    assert only(policy).stopped_at - only(policy).started_at >= 0.1, (
        "the same command again has no budget left"
    )
    assert task.budget_seconds < 100, "a hung trial cannot outlast the budget by much"


def test_a_trial_that_was_lost_with_its_machine_is_tried_again(make_trials: MakeTrials) -> None:
    trials, policy = make_trials()
    first = begin(trials, "a")
    begin(trials, "b")
    trials.died("a", "the worker died: its node has died", FailureKind.LOST)
    assert not policy.results, "a lost trial is no result"
    again = begin(trials, "c")
    assert (again.name, again.config.seed) == ("trial-0", first.config.seed)
    assert again.is_resumed
    assert trials._runs["c"].run.is_baseline
    trials.reported("c", report(Outcome.REACHED))
    assert list(policy.results) == [0]


@pytest.mark.parametrize(
    ("kind", "num_tries", "outcome"),
    [
        (FailureKind.LOST, 3, Outcome.LOST),
        (FailureKind.MEMORY, 2, Outcome.OUT_OF_MEMORY),
        (FailureKind.USER_CODE, 1, Outcome.ERRORED),
    ],
)
def test_a_point_whose_process_was_killed_from_outside_is_tried_again_first(
    make_trials: MakeTrials, kind: FailureKind, num_tries: int, outcome: Outcome
) -> None:
    reason = "how it ended"
    trials, policy = make_trials()
    heard = Heard()
    trials.listeners = (heard,)
    for number in range(num_tries):
        assert not policy.results
        assert begin(trials, str(number)).config.batch_size == 64, "the same point"
        trials.died(str(number), reason, kind)
    assert (only(policy).trial, only(policy).outcome) == (0, outcome)
    assert heard.withdrawn == [(0, Outcome.LOST, reason)] * (num_tries - 1)
    assert policy.error is None


def test_a_worker_that_died_past_its_deadline_hung(make_trials: MakeTrials, tmp_path: Path) -> None:
    trials, policy = make_trials()
    begin(trials, "a")
    (tmp_path / "hang-trial-0.txt").write_text('File "mine.py", line 3 in wait\n')
    time.sleep(0.1)
    trials.died("a", "the worker died", FailureKind.LOST)
    assert only(policy).outcome is Outcome.TIMED_OUT
    assert "line 3 in wait" in (only(policy).error or "")
    assert "nothing was heard of it for 0 s, and search.trial_deadline_seconds allows 60 s, or" in (
        only(policy).error_line
    )
    assert not list(tmp_path.iterdir())


def test_a_worker_that_died_long_after_its_last_report_only_hung(make_trials: MakeTrials) -> None:
    trials, policy = make_trials()
    begin(trials, "a")
    trials.reported("a", report())
    begin(trials, "b")
    for key, quiet_seconds in {"a": 50.0, "b": 70.0}.items():
        live = trials._runs[key]
        live.handed_out_at -= 5000.0
        live.reported_at = time.time() - quiet_seconds
        trials.died(key, "the worker died: exit code 1", FailureKind.USER_CODE)
    assert [result.outcome for result in policy.results.values()] == [
        Outcome.ERRORED,
        Outcome.TIMED_OUT,
    ]


_HOGGED = Contention(
    seconds=10.0,
    stopped_seconds=0.0,
    waited_seconds=6.0,
    others_cpu_seconds=16.0,
    study_cpu_seconds=0.5,
)


class Heard:
    """A listener that keeps which trials were taken again, and why."""

    def __init__(self) -> None:
        self.withdrawn: list[tuple[int, Outcome, str | None]] = []

    def trial_withdrawn(self, result: TrialResult) -> None:
        self.withdrawn.append((result.trial, result.outcome, result.error))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def test_a_trial_whose_times_are_spoilt_is_taken_again_at_most_twice_and_marked(
    make_trials: MakeTrials,
) -> None:
    trials, policy = make_trials()
    heard = Heard()
    trials.listeners = (heard,)
    for key in ("a", "b", "c"):
        task = begin(trials, key)
        assert task.config.batch_size == 64, "the same point"
        assert trials.reported(key, report(Outcome.REACHED, contention=_HOGGED)) is Decision.STOP
    assert [each[:2] for each in heard.withdrawn] == [(n, Outcome.CONTENDED) for n in (0, 1)]
    assert "other programs" in str(heard.withdrawn[0][2])
    kept = only(policy)
    assert (kept.trial, kept.outcome) == (2, Outcome.REACHED)
    assert kept.contention == _HOGGED.reason
    assert TrialResult.from_dict(kept.as_dict()) == kept
    assert (
        TrialResult.from_dict(
            {key: value for key, value in kept.as_dict().items() if key != "contention"}
        ).contention
        is None
    )
    assert trials.policy.num_trials_left == 19


def test_a_trial_of_two_hours_whose_times_are_spoilt_is_marked_and_not_taken_again(
    make_trials: MakeTrials,
) -> None:
    trials, policy = make_trials()
    heard = Heard()
    trials.listeners = (heard,)
    spoilt = replace(_HOGGED, seconds=7200.0, waited_seconds=0.0, shared_seconds=2160.0)
    ended = make_evaluation(7200.0, metric=0.95, outcome=Outcome.REACHED)
    for key in "abcd":
        begin(trials, key)
        trials.reported(key, report(Outcome.REACHED, evaluation=ended, contention=spoilt))
    assert not heard.withdrawn
    assert [result.contention for result in policy.results.values()] == [spoilt.reason] * 4
    begin(trials, "e")
    trials.reported("e", report(Outcome.REACHED, contention=_HOGGED))
    assert heard.withdrawn, "a short one is taken again: for none of them that was in vain"


def test_contention_of_a_paused_trial_counts_from_its_beginning(make_trials: MakeTrials) -> None:
    trials, policy = make_trials(max_retakes=0)
    begin(trials, "a")
    stretch = replace(_HOGGED, seconds=100.0, waited_seconds=0.0, shared_seconds=1.5)
    trials.reported("a", report(contention=stretch))
    trials._pause(trials._runs["a"])
    trials.paused("a")
    live = trials._runs.pop("trial-0")
    trials._runs["b"] = live
    for shared in (1.0, 3.0):  # since the process began to train
        assert live.result(Outcome.REACHED, None).contention is None
        trials.reported("b", report(contention=replace(stretch, shared_seconds=shared)))
    trials.reported("b", report(Outcome.REACHED))
    assert only(policy).contention == "other programs computed on its GPU for 4.5 s of 200.0 s"


def test_brakes_of_a_gpu_are_told_once_and_end_no_trial(
    make_trials: MakeTrials, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trials, policy = make_trials()
    brake = f"GPU-a of {tmp_path} is slowed down by heat"
    hot = replace(_HOGGED, waited_seconds=0.0, brakes=(brake,))
    for key in "ab":
        begin(trials, key)
        trials.reported(key, report(contention=hot))
        trials.reported(key, report(Outcome.REACHED, contention=hot))
    assert [result.contention for result in policy.results.values()] == [None, None]
    assert caplog.text.count(brake) == 1
