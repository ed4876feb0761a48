"""Trials that are paused: they leave their worker, go on where they stood, and outlive the process that paused them."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.config.space_files import read_search_space
from autotune.contention import Contention
from autotune.execution.task_run import TaskRun, TrialTask, WorkerReport
from autotune.execution.trial_manager import TrialManager
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.search.policy import SearchPolicy
from autotune.search.stopping import CapAtIncumbent, Decision
from autotune.space import Suggestion
from autotune.tracking.tracker import TrackedTrial
from tests.support.pausing import PausesAtFirst
from tests.support.records import make_evaluation, make_trial_task

MakeTask = Callable[..., TrialTask]
OBJECTIVE = AmortisedTime(num_trainings=1)
SIZES = (16, 32, 64)


class Told:
    """What tracker and listeners are told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def start(self, trial: TrackedTrial) -> None:
        self.events.append(("start", trial.trial))

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        self.events.append(("evaluate", name))

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        self.events.append(("finish", trial.trial))

    def close(self, **settings: Any) -> None:
        pass

    def trial_started(self, trial: int, overrides: tuple[str, ...]) -> None:
        self.events.append(("started", trial))

    def evaluated(self, trial: int, evaluation: Evaluation) -> None:
        pass

    def trial_paused(self, trial: int) -> None:
        self.events.append(("paused", trial))

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        pass

    def trial_lost(self, trial: int, how: str) -> None:
        self.events.append((how, trial))


class Session:
    """One process of a study, its workers played by the test."""

    def __init__(self, study: optuna.Study, folder: Path, *, points: Sequence[int] = SIZES, room: int = 2, num_trials: int = 3) -> None:
        composer = Composer(["experiment=cnn"])
        self.told = Told()
        self.sampler = PausesAtFirst([Suggestion({"batch_size": size}) for size in points])
        self.policy = SearchPolicy(
            study=study,
            space=read_search_space([{"batch_size": list(SIZES)}], composer),
            baseline=None,
            has_baseline=False,
            stopping=CapAtIncumbent(objective=OBJECTIVE, cap_margin=1),
            objective=OBJECTIVE,
            target=Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=10.0),
            seed=0,
            num_trials=num_trials,
            max_errors_in_a_row=3,
            scheduler=self.sampler,
            is_kept=lambda trial: (folder / f"trial-{trial}").is_dir(),
        )
        self.trials = TrialManager(
            policy=self.policy,
            composer=composer,
            tracker=self.told,
            listeners=(self.told,),
            make_task=lambda name, config, cap_seconds, deadline_seconds: make_trial_task(
                config, folder, name=name, cap_seconds=cap_seconds, deadline_seconds=deadline_seconds
            ),
            has_room=lambda tasks: len(tasks) < room,
            state_folder=lambda trial: folder / f"trial-{trial}",
            trial_deadline_seconds=100.0,
            max_retries=2,
            max_retakes=2,
            time_budget_seconds=None,
            unsuitable=lambda config: None,
            on_last_trial=lambda: self.told.events.append(("no more", 0)),
        )

    def begin(self, key: str) -> TrialTask:
        task = self.trials.next_task(key)
        assert task is not None
        self.trials.started(key)
        return task

    def begin_and_pause(self, key: str) -> None:
        task = self.begin(key)
        assert self.trials.reported(key, report(1)) is Decision.PAUSE
        assert task.state_folder is not None
        Path(task.state_folder).mkdir(exist_ok=True)  # what a worker does

    def go_on(self) -> tuple[str, TrialTask]:
        assert self.trials.next_task("unused") is None
        resumed = self.trials.resumed()
        assert resumed is not None
        self.trials.started(resumed[0])
        return resumed


def report(step: int, outcome: Outcome | None = None, *, can_pause: bool = True) -> WorkerReport:
    evaluation = make_evaluation(float(step), step=step, outcome=outcome)
    return WorkerReport(evaluation=evaluation, outcome=outcome, can_pause=can_pause)


@pytest.fixture
def study() -> optuna.Study:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))


def outcomes(session: Session) -> dict[int, tuple[str, list[int]]]:
    return {number: (str(each.outcome), [e.step for e in each.evaluations]) for number, each in session.policy.results.items()}


def test_a_paused_trial_goes_on_under_its_key_as_one_run(study: optuna.Study, tmp_path: Path) -> None:
    session = Session(study, tmp_path)
    for key in "abc":
        session.begin_and_pause(key)
    assert (tmp_path / "trial-0").is_dir()
    key, task = session.go_on()
    assert (key, task.name, task.is_paused, task.cap_seconds) == ("a", "trial-0", True, math.inf)
    assert session.trials.reported("a", report(2, Outcome.REACHED)) is Decision.STOP
    assert outcomes(session) == {0: ("REACHED", [1, 2])}
    assert not (tmp_path / "trial-0").exists(), "its state is not needed any more"
    key, task = session.go_on()
    assert (key, task.cap_seconds) == ("b", 2.0), "the cap is that of now"
    of_first = [event for event, of in session.told.events if of in (0, "trial-0")]
    assert of_first == ["start", "started", "evaluate", "paused", "started", "evaluate", "finish"]


def test_a_trial_that_cannot_be_kept_goes_on(study: optuna.Study, tmp_path: Path) -> None:
    session = Session(study, tmp_path)
    session.begin("a")
    assert session.trials.reported("a", report(1, can_pause=False)) is Decision.CONTINUE
    assert session.sampler.waiting == []


def test_no_trial_is_suggested_before_there_is_a_worker(study: optuna.Study, tmp_path: Path) -> None:
    session = Session(study, tmp_path, room=1)
    session.begin("a")
    assert session.trials.next_task("b") is None
    assert not session.trials.is_finished
    session.trials.reported("a", report(2, Outcome.REACHED))
    assert session.begin("b").name == "trial-1"


def test_trials_that_are_still_paused_at_the_end_are_stopped(study: optuna.Study, tmp_path: Path) -> None:
    session = Session(study, tmp_path, num_trials=2)
    session.begin_and_pause("a")
    session.begin_and_pause("b")
    session.sampler.waiting.clear()  # neither promises anything
    assert session.trials.next_task("c") is None
    assert session.trials.is_finished
    assert outcomes(session) == {0: ("STOPPED", [1]), 1: ("STOPPED", [1])}
    assert [event for event, _ in session.told.events][-3:] == ["no more", "finish", "finish"]
    assert not session.trials.is_alive("a")
    assert len(list(tmp_path.iterdir())) == 2, "a worker may still be writing there: the folders go with the search's, once Ray is done"


def test_a_worker_that_dies_while_it_keeps_a_state_ends_the_trial(study: optuna.Study, tmp_path: Path) -> None:
    session = Session(study, tmp_path)
    session.begin_and_pause("a")
    session.trials.died("a", "No space left on device")
    assert outcomes(session)[0][0] == "ERRORED"


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_another_process_goes_on_with_what_was_paused(study: optuna.Study, tmp_path: Path, end: str) -> None:
    before = Session(study, tmp_path)
    for key in "ab":
        before.begin_and_pause(key)
    before.begin("c")
    if end == "interrupted":
        before.trials.interrupt_all()
    (tmp_path / "trial-1").rmdir()  # its state is lost
    after = Session(study, tmp_path, points=())
    again = {after.begin(key).config.batch_size for key in "xy"}
    assert again == {32, 64}, "the lost one and the one that was running are proposed again"
    for key in "xy":
        after.trials.reported(key, report(5, Outcome.MISSED))
    task = after.begin("z")
    assert (task.name, task.is_paused) == ("trial-0", True)
    after.trials.reported("z", report(2, Outcome.REACHED))
    assert outcomes(after) == {3: ("MISSED", [5]), 4: ("MISSED", [5]), 0: ("REACHED", [1, 2])}
    assert after.trials.next_task("w") is None
    assert after.trials.is_finished


def test_what_an_earlier_process_paused_and_nobody_takes_up_is_stopped(study: optuna.Study, tmp_path: Path) -> None:
    before = Session(study, tmp_path, num_trials=1)
    before.begin_and_pause("a")
    after = Session(study, tmp_path, num_trials=1)
    after.sampler.waiting.clear()
    assert after.trials.next_task("x") is None
    assert outcomes(after) == {0: ("STOPPED", [1])}
    assert after.policy.num_trials_left == 0


@pytest.fixture
def make_task(trial_config: Callable[..., TrialConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()

    def make(**fields: Any) -> TrialTask:
        config = trial_config("epochs=3", "target.value=0.999", "model.widths=[8,16]")
        task = make_trial_task(config, tmp_path, name="trial-1", state_folder=str(tmp_path / "state"))
        return replace(task, **fields)

    yield make
    torch.set_num_threads(threads)


def run_to_end(run: TaskRun) -> list[tuple[int, float, float]]:
    found = []
    while True:
        each = run.next_report()
        assert each.evaluation is not None, each.error
        found.append((each.evaluation.step, each.evaluation.metric, each.evaluation.loss))
        if each.outcome is not None:
            run.close()
            return found


def test_a_worker_keeps_a_trial_and_another_run_goes_on_with_it(make_task: MakeTask) -> None:
    whole = run_to_end(TaskRun(make_task()))
    first = TaskRun(make_task())
    begun = first.next_report()
    assert begun.can_pause
    first.keep()
    first.close()
    assert run_to_end(TaskRun(make_task(is_paused=True))) == whole[1:]


def test_a_state_that_is_damaged_loses_the_trial_and_not_its_point(make_task: MakeTask, study: optuna.Study, tmp_path: Path) -> None:
    first = TaskRun(make_task())
    first.next_report()
    first.keep()
    first.close()
    state = tmp_path / "state/state.pt"
    state.write_bytes(state.read_bytes()[:-50])
    again = TaskRun(make_task(is_paused=True))
    said = again.next_report()
    again.close()
    assert (said.evaluation, said.outcome) == (None, Outcome.LOST)
    session = Session(study, tmp_path, points=SIZES[:1])
    session.begin_and_pause("a")
    key, task = session.go_on()
    assert session.trials.reported(key, said) is Decision.STOP
    assert session.trials.refusal is None
    how = f"{state}: is damaged: File is not a zip file"
    assert (how, 0) in session.told.events
    assert not Path(task.state_folder or "").exists()
    assert session.begin("b").config.batch_size == task.config.batch_size
    assert [trial.state.name for trial in study.trials] == ["FAIL", "RUNNING"]


def test_a_worker_says_what_it_cannot_keep(make_task: MakeTask, tmp_path: Path) -> None:
    def can_pause(task: TrialTask) -> bool:
        run = TaskRun(task)
        said = run.next_report().can_pause
        run.close()
        return said

    (tmp_path / "mine.py").write_text("def train(report):\n    report(0.5)\n")
    config = make_task().config
    own = replace(config, training={"_target_": "mine.train"}, allowed_targets=("mine",))
    assert not can_pause(make_task(config=own, code_folders=(str(tmp_path),)))
    assert not can_pause(make_task(state_folder=str(tmp_path / "of another machine" / "state")))
    assert not can_pause(make_task(state_folder=None))


def test_a_paused_trial_whose_times_are_spoilt_is_marked_and_not_taken_again_where_the_search_ends(
    study: optuna.Study, tmp_path: Path
) -> None:
    session = Session(study, tmp_path, num_trials=1)
    hogged = Contention(seconds=10.0, stopped_seconds=0.0, waited_seconds=6.0, others_cpu_seconds=16.0, study_cpu_seconds=0.5)
    task = session.begin("a")
    assert session.trials.reported("a", replace(report(1), contention=hogged)) is Decision.PAUSE
    Path(task.state_folder or "").mkdir()
    session.sampler.waiting.clear()
    assert session.trials.next_task("b") is None
    assert outcomes(session) == {0: ("STOPPED", [1])}
    assert session.policy.results[0].contention == hogged.reason
