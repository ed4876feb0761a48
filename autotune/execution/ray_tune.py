"""Making runs on Ray Tune: the searcher asks the policy for them, the scheduler tells it of
reports, and Ray runs the workers.

What is planned by several policies, one after another (the search, then the confirmation), is one
experiment of Ray's, so that the workers stay.

Ray's own experiment state, loggers and signal handling are off: a study resumes from its storage.
"""

import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import TuneError
from ray.tune.experiment import Trial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.result import EXPR_RESULT_FILE
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from autotune.config.command_line import Interrupt
from autotune.execution.cluster import RaySession
from autotune.execution.plan import TrainingPlan
from autotune.execution.ray_ranks import kind_of_death
from autotune.execution.trial_manager import TrialManager
from autotune.execution.worker import TrialWorker
from autotune.failure import FailureKind
from autotune.files import make_folder, replace_file
from autotune.policy import Decision


class Phases:
    """The trial managers of a study's phases, of which one has runs made at a time.

    Args:
        phases: yields a phase's trial manager; advanced once that has finished.
    """

    def __init__(self, phases: Iterator[TrialManager]) -> None:
        self._phases = phases
        self.now = next(phases)

    def advance(self) -> bool:
        """Begin the next phase; whether there is one."""
        following = next(self._phases, None)
        if following is not None:
            self.now = following
        return following is not None


def make_runs(
    phases: Generator[TrialManager, None, None],
    plan: TrainingPlan,
    connection: RaySession,
    interrupt: Interrupt,
) -> None:
    """Make the runs of all phases, or those until ``interrupt`` is set; after its notice, until the
    runs at work are saved.

    Runs that are at work then are given up.

    Args:
        phases: at least one; see ``Phases``.

    Raises:
        AutotuneError: every further run would fail, or Ray is gone.
    """
    folder = plan.folder / ".ray"  # for files that Ray cannot do without
    with closing(phases):
        trials = _make_runs(Phases(phases), folder, interrupt, connection.check)
    if (error := trials.refusal or trials.policy.error) is not None:
        raise error


def _make_runs(
    trials: Phases, folder: Path, interrupt: Interrupt, check_ray: Callable[[], None]
) -> TrialManager:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        tune.run(
            TrialWorker,
            name="runs",
            num_samples=-1,
            search_alg=PolicySearcher(trials),
            scheduler=PolicyScheduler(trials, check_ray),
            callbacks=[_Callback(trials)],
            stop=_InterruptStopper(trials, interrupt),
            reuse_actors=True,
            storage_path=str(folder),
            trial_name_creator=str,
            trial_dirname_creator=lambda trial: trial.trial_id,
            raise_on_failed_trial=False,
            verbose=0,
        )
    except TuneError as error:  # Ray wraps errors that the policy or the storage raised
        if isinstance(error.__context__, Exception):
            raise error.__context__ from error.__context__.__cause__  # which says what happened
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    trials.now.interrupt_all()
    return trials.now


class PolicySearcher(Searcher):  # type: ignore[misc]  # ray has no types
    """Asks the policy for Ray Tune's next trial, but only when a worker is free for it: Ray
    itself would ask one trial ahead.
    """

    def __init__(self, trials: Phases) -> None:
        super().__init__()
        self._trials = trials

    def suggest(self, trial_id: str) -> Any:
        """The tasks of the next trial of Ray's.

        None if there are none at the moment, ``Searcher.FINISHED`` if there will be no more.
        """
        while not (tasks := self._trials.now.next_tasks(trial_id)):
            # while there is no trial at all, Ray asks on and on, and for nothing else
            if self._trials.now.has_notice():
                return Searcher.FINISHED
            if not self._trials.now.is_finished:
                return None
            if not self._trials.advance():
                return Searcher.FINISHED
        return {"tasks": tasks}

    def save(self, checkpoint_path: str) -> None:
        """Write nothing: the study resumes from its storage."""

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Give up a trial that Ray ended together with the whole search.

        The policy knows of any other trial's end already.
        """
        self._trials.now.interrupted(trial_id)


class PolicyScheduler(FIFOScheduler):  # type: ignore[misc]  # ray has no types
    """Passes workers' reports to the scheduler and its decisions to Ray.

    Ray pauses a trial only to have its worker write its state; the trial goes on as a new one of
    Ray's. One whose state cannot be written continues on its worker.
    """

    def __init__(self, trials: Phases, check_ray: Callable[[], None]) -> None:
        super().__init__()
        self._trials = trials
        self._check_ray = check_ray
        self._pausing: list[Any] = []
        self._new: list[Any] = []

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Note a new trial, for which no worker is being started yet."""
        self._new.append(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """The first new trial. Also ends trials for Ray whose state is written.

        Ray gives a free worker to the trial chosen here, and stops the worker that is being started
        for that trial. So a trial whose worker is starting is never chosen, or short trials would
        run on one worker for ever. Ray starts workers for the other new trials itself.
        """
        new, self._new = self._new, []
        pausing, self._pausing = self._pausing, []
        for trial in pausing:
            if trial.status == Trial.PAUSED:
                self._trials.now.paused(trial.trial_id)
                tune_controller.stop_trial(trial)
            elif trial.is_saving:
                self._pausing.append(trial)
            elif trial.status == Trial.RUNNING:  # it could not be saved
                if self._trials.now.unsaved(trial.trial_id):
                    # no public name
                    tune_controller._tune_controller._schedule_trial_train(trial)  # noqa: SLF001
                else:
                    tune_controller.stop_trial(trial)
        return next((trial for trial in new if trial.status == Trial.PENDING), None)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
        """Ray's decision on a trial after a report: go on, pause or stop."""
        if result["report"] is None:  # the worker rests
            goes_on = self._trials.now.goes_on(trial.trial_id)
            return str(TrialScheduler.STOP if goes_on else TrialScheduler.CONTINUE)
        decision = self._trials.now.reported(trial.trial_id, result["report"])
        if decision is Decision.PAUSE:
            self._pausing.append(trial)
            return str(TrialScheduler.PAUSE)
        return str(
            TrialScheduler.CONTINUE if decision is Decision.CONTINUE else TrialScheduler.STOP
        )

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Tell the trial manager that a trial's worker is gone, which ends a trial that had not
        ended.
        """
        self._check_ray()
        reason, kind = _death_of(trial)
        self._trials.now.died(trial.trial_id, reason, kind)


def _death_of(trial: Any) -> tuple[str, FailureKind]:
    """Why a worker died, which is the text of Ray's error file without its heading, and whose fault
    that is.
    """
    path = Path(trial.error_file or "")
    text = path.read_text(errors="replace") if path.is_file() else ""
    reason = text.partition("\n")[2].strip()
    kind = kind_of_death(trial.get_pickled_error())
    if "running low on memory" in reason:  # Ray keeps no exception of this one
        kind = FailureKind.MEMORY
    return f"the worker died: {reason}" if reason else "the worker died", kind


class _Callback(TrialProgressCallback):  # type: ignore[misc]  # ray has no types
    """Tells the trial manager of starts.

    It takes the place of Ray's own callback, which prints results.
    """

    def __init__(self, trials: Phases) -> None:
        super().__init__()
        self._trials = trials

    def on_trial_result(self, *arguments: Any, **info: Any) -> None:
        """Print nothing."""

    on_trial_error = on_trial_complete = on_trial_result

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._trials.now.started(trial.trial_id)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Create each trial's file of results, empty since Ray's loggers are off: Ray reads it
        at the end, and warns if it is missing.
        """
        for trial in trials:
            results = Path(trial.storage.trial_fs_path) / EXPR_RESULT_FILE
            replace_file(make_folder(results.parent) / results.name, "")


class _InterruptStopper(Stopper):  # type: ignore[misc]  # ray has no types
    """Stops all trials on an interrupt, or after an error that every trial would meet."""

    def __init__(self, trials: Phases, interrupt: Interrupt) -> None:
        self._trials = trials
        self._interrupt = interrupt

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles the stopper into its experiment state, which nothing reads

    def stop_all(self) -> bool:
        if self._interrupt.notice.is_set() and self._trials.now.is_saved:
            self._interrupt.set()
        return self._interrupt.is_set() or self._trials.now.has_failed
