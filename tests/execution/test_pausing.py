"""Trials that are paused: they leave their worker, go on where they stood, and outlive the
process that paused them.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.config.compose import Composer
from autotune.config.space_files import read_search_space
from autotune.execution.task import TrialTask, WorkerReport
from autotune.execution.trial_manager import TrialManager
from autotune.failure import FailureKind
from autotune.measurement import Evaluation, Target
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.policy import Decision, Resume, Run
from autotune.search.stopping import CapAtIncumbent
from autotune.search.study import finished_results
from autotune.space import Suggestion
from tests.support.pausing import PausesAtFirst
from tests.support.policies import policy_over
from tests.support.records import make_evaluation, make_trial_task

MakeTask = Callable[..., TrialTask]
_KILLED = "the worker died: it was ended by SIGKILL"
OBJECTIVE = AmortisedTime(num_trainings=1)
SIZES = (16, 32, 64)


class Told:
    """What tracker and listeners are told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        names = {"trial_started": "started", "trial_paused": "paused"}

        def told(trial: Any = None, *rest: Any, **settings: Any) -> None:
            if name in ("start", "evaluate", "finish", *names):
                self.events.append((names.get(name, name), getattr(trial, "trial", trial)))

        return told


class Session:
    """One process of a study, its workers played by the test."""

    def __init__(
        self,
        study: optuna.Study,
        folder: Path,
        *,
        points: Sequence[int] = SIZES,
        room: int = 2,
        num_trials: int = 3,
    ) -> None:
        composer = Composer(["experiment=cnn"])
        self.told = Told()
        self.sampler = PausesAtFirst([Suggestion({"batch_size": size}) for size in points])
        self.policy = policy_over(
            read_search_space([{"batch_size": list(SIZES)}], composer),
            Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=10.0),
            study=study,
            stopping=CapAtIncumbent(objective=OBJECTIVE, cap_margin=1),
            objective=OBJECTIVE,
            num_trials=num_trials,
            sampler=self.sampler,
        )

        def make_task(run: Run) -> TrialTask:
            config = composer.compose_suggestion(run.suggestion, seed=run.seed).trial
            states = str(folder / run.name)
            return make_trial_task(
                config, folder, name=run.name, number=run.number, state_folder=states
            )

        self.trials = TrialManager(
            policy=self.policy,
            tracker=self.told,
            listeners=(self.told,),
            make_task=make_task,
            has_room=lambda tasks: len(tasks) < room,
            state_folder=lambda run: folder / run,
            max_retries=2,
            max_retakes=2,
            time_budget_seconds=None,
            unsuitable=lambda config: None,
        )

    def begin(self, key: str) -> TrialTask:
        [task] = self.trials.next_tasks(key)
        self.trials.started(key)
        return task

    def begin_and_pause(self, key: str) -> None:
        task = self.begin(key)
        assert self.trials.reported(key, report(1)) is Decision.PAUSE
        assert task.state_folder is not None
        Path(task.state_folder).mkdir(exist_ok=True)  # what a worker does
        self.trials.paused(key)

    def go_on(self, key: str) -> TrialTask:
        task = self.begin(key)
        assert task.is_resumed
        return task


def report(
    step: int, outcome: Outcome | None = None, *, can_pause: bool = True, **more: Any
) -> WorkerReport:
    evaluation = make_evaluation(float(step), step=step, outcome=outcome)
    return WorkerReport(evaluation=evaluation, outcome=outcome, can_pause=can_pause, **more)


@pytest.fixture
def study() -> optuna.Study:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))


def outcomes(session: Session) -> dict[int, tuple[str, list[int]]]:
    return {
        number: (str(each.outcome), [e.step for e in each.evaluations])
        for number, each in session.policy.results.items()
    }


def test_a_paused_trial_goes_on_as_one_run(study: optuna.Study, tmp_path: Path) -> None:
    session = Session(study, tmp_path)
    for key in "abc":
        session.begin_and_pause(key)
    assert (tmp_path / "trial-0").is_dir()
    task = session.go_on("d")
    assert (task.name, task.cap_seconds) == ("trial-0", math.inf)
    assert session.trials.reported("d", report(2, Outcome.REACHED)) is Decision.STOP
    assert outcomes(session) == {0: ("REACHED", [1, 2])}
    assert not (tmp_path / "trial-0").exists(), "its state is not needed any more"
    task = session.go_on("e")
    assert (task.name, task.cap_seconds) == ("trial-1", 2.0), "the cap is that of now"
    of_first = [event for event, of in session.told.events if of in (0, "trial-0")]
    assert of_first == ["start", "started", "evaluate", "paused", "started", "evaluate", "finish"]


def test_a_trial_whose_state_is_being_written_goes_on_once_it_is(
    study: optuna.Study, tmp_path: Path
) -> None:
    session = Session(study, tmp_path, points=SIZES[:1], num_trials=1)
    task = session.begin("a")
    assert session.trials.reported("a", report(1)) is Decision.PAUSE
    assert not session.trials.next_tasks("b")
    Path(str(task.state_folder)).mkdir()
    session.trials.paused("a")
    assert session.go_on("c").name == "trial-0"


def test_trials_that_are_still_paused_at_the_end_are_stopped(
    study: optuna.Study, tmp_path: Path
) -> None:
    session = Session(study, tmp_path, num_trials=2)
    session.begin_and_pause("a")
    session.begin_and_pause("b")
    session.sampler.waiting.clear()  # neither promises anything
    assert not session.trials.next_tasks("c")
    assert session.trials.is_finished
    assert outcomes(session) == {0: ("STOPPED", [1]), 1: ("STOPPED", [1])}
    assert [event for event, _ in session.told.events][-2:] == ["finish", "finish"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_another_process_goes_on_with_what_was_begun(
    study: optuna.Study, tmp_path: Path, end: str
) -> None:
    before = Session(study, tmp_path)
    for key in "ab":
        before.begin_and_pause(key)
    before.begin("c")
    if end == "interrupted":
        before.trials.interrupt_all()
    after = Session(study, tmp_path, points=())
    task = after.go_on("x")
    assert (task.name, task.config.batch_size) == ("trial-2", 64), "what was running comes first"
    after.trials.reported("x", report(5, Outcome.MISSED, earlier={}))
    assert [after.go_on(key).name for key in "yz"] == ["trial-0", "trial-1"]
    after.trials.reported("y", report(1, earlier={}, can_pause=False))  # its state is gone
    after.trials.reported("y", report(2, Outcome.REACHED))
    after.trials.reported("z", report(2, Outcome.REACHED, earlier={0: make_evaluation(1.0)}))
    assert outcomes(after) == {
        2: ("MISSED", [5]),
        0: ("REACHED", [1, 2]),
        1: ("REACHED", [1, 2]),
    }
    assert after.policy.results[0].lost_seconds == 1.0
    assert after.policy.results[1].lost_seconds == 0.0
    assert not after.trials.next_tasks("w")
    assert after.trials.is_finished
    stored = finished_results(study)
    assert {number: each.evaluations for number, each in stored.items()} == {
        number: each.evaluations for number, each in after.policy.results.items()
    }


def test_a_trial_that_is_lost_goes_on_from_its_last_state_as_the_same_trial(
    study: optuna.Study, tmp_path: Path
) -> None:
    session = Session(study, tmp_path, points=SIZES[:1], num_trials=1)
    session.begin_and_pause("a")
    (tmp_path / "trial-0").mkdir(exist_ok=True)
    task = session.go_on("b")
    for step in (2, 3, 4):
        session.trials.reported("b", report(step, can_pause=False))
    session.trials.died("b", _KILLED, FailureKind.LOST)
    assert (tmp_path / "trial-0").is_dir(), "its states stay"
    again = session.go_on("c")
    assert (again.name, again.number, again.config.seed) == (task.name, 0, task.config.seed)
    earlier = {0: make_evaluation(1.0, step=1), 1: make_evaluation(2.0, step=2)}
    session.trials.reported("c", report(3, can_pause=False, earlier=earlier))
    session.trials.reported("c", report(4, Outcome.REACHED))
    assert outcomes(session) == {0: ("REACHED", [1, 2, 3, 4])}
    assert session.policy.results[0].lost_seconds >= 2.0
    assert not (tmp_path / "trial-0").exists()


def test_a_trial_that_is_lost_again_and_again_is_given_up_only_without_progress(
    study: optuna.Study, tmp_path: Path
) -> None:
    session = Session(study, tmp_path, points=SIZES[:1], num_trials=1)
    earlier: dict[int, Evaluation] = {}
    for attempt in range(5):
        session.begin(str(attempt))
        at = len(earlier)
        for step in (at + 1, at + 2):
            evaluation = make_evaluation(float(step), step=step)
            session.trials.reported(
                str(attempt),
                report(step, can_pause=False, earlier=earlier if step == at + 1 else None),
            )
            earlier = {**earlier, step - 1: evaluation}
        session.trials.died(str(attempt), _KILLED, FailureKind.LOST)
        assert not session.policy.results
    for attempt in "xy":
        session.begin(attempt)
        session.trials.died(attempt, _KILLED, FailureKind.LOST)
    assert outcomes(session) == {0: ("LOST", [*range(1, 11)])}


def test_a_trial_that_cannot_be_saved_continues_and_is_not_paused_again_for_a_while(
    study: optuna.Study, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(study, tmp_path, points=[*SIZES, SIZES[0]], num_trials=4)
    session.begin("a")  # the baseline
    session.begin("b")
    assert session.trials.reported("b", report(1)) is Decision.PAUSE
    assert session.trials.unsaved("b")
    assert session.trials.reported("b", report(1, unsaved="/disk: is full")) is Decision.CONTINUE
    assert "trial-1: was not paused, and continues: /disk: is full" in caplog.text
    assert session.sampler.waiting == []
    session.trials._runs["b"].pausable_at = 0.0
    assert session.trials.reported("b", report(1)) is Decision.PAUSE
    session.trials._resumed = Resume(session.trials._runs["b"].run)  # chosen while it was saved
    assert session.trials.unsaved("b")
    session.trials.reported("a", report(2, Outcome.REACHED))
    assert session.begin("c").number != 1, "what continues is not begun again"
    session.trials.reported("b", report(2, Outcome.REACHED))
    assert outcomes(session)[1][0] == "REACHED"


def test_a_trial_whose_worker_dies_while_it_is_saved_is_paused_at_its_last_state(
    study: optuna.Study, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(study, tmp_path, points=SIZES[:1], num_trials=1)
    for key in ("a", "b", "c", "d", "e"):  # more often than a lost trial is tried again
        session.begin(key)
        assert session.trials.reported(key, report(1, earlier={})) is Decision.PAUSE
        reason = "the worker died: DataError: the command saved nothing"
        session.trials.died(key, reason, FailureKind.USER_CODE)
        assert f"trial-0: was paused at its last state, since it ended: {reason}" in caplog.text
        live = session.trials._runs["trial-0"]
        assert live.pausable_at > time.time()
        live.pausable_at = 0.0
    assert not session.policy.results
    session.go_on("f")
    session.trials.reported("f", report(2, Outcome.REACHED, earlier={}))
    assert outcomes(session) == {0: ("REACHED", [2])}


def test_a_notice_ends_the_search_once_running_trials_are_saved(
    study: optuna.Study, tmp_path: Path
) -> None:
    session = Session(study, tmp_path)
    session.begin("a")
    session.begin("b")
    session.trials.reported("b", report(2, can_pause=True))
    session.trials.has_notice = lambda: True
    assert not session.trials.next_tasks("c")
    assert not session.trials.is_saved
    saved = WorkerReport(evaluation=None, outcome=None, is_saved=True, earlier={})
    assert session.trials.reported("a", saved) is Decision.STOP
    assert session.trials.reported("b", report(3, is_saved=True)) is Decision.STOP
    assert session.trials.is_saved
    assert not session.policy.results
    after = Session(study, tmp_path)
    assert {after.go_on(key).name for key in "xy"} == {"trial-0", "trial-1"}
