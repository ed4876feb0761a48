"""Running the search on Ray Tune: the searcher asks the policy for trials, the scheduler tells it
of reports, and Ray runs the workers.

Ray's own experiment state, loggers and signal handling are off: a study resumes from its storage.
"""

import shutil
from collections.abc import Callable, Mapping
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
from autotune.execution.ray_ranks import kind_of_death
from autotune.execution.trial_manager import TrialManager
from autotune.execution.worker import TrialWorker
from autotune.failure import FailureKind
from autotune.files import make_folder, replace_file
from autotune.search.stopping import Decision


def run_search(
    trial_manager: TrialManager,
    *,
    folder: Path,
    interrupt: Interrupt,
    check_ray: Callable[[], None],
) -> None:
    """Run trials until the policy suggests no more, or ``interrupt`` is set; after its notice, when
    the running trials are saved.

    Trials that still run then are given up.

    Args:
        folder: folder for the files that Ray cannot do without; deleted before and after the
            search.
        check_ray: raises if Ray is gone; called before the death of a worker is held against its
            trial.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        tune.run(
            TrialWorker,
            name="search",
            num_samples=-1,
            search_alg=PolicySearcher(trial_manager),
            scheduler=PolicyScheduler(trial_manager, check_ray),
            callbacks=[_Callback(trial_manager)],
            stop=_InterruptStopper(trial_manager, interrupt),
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
    trial_manager.interrupt_all()


class PolicySearcher(Searcher):  # type: ignore[misc]  # ray has no types
    """Asks the policy for Ray Tune's next trial, but only when a worker is free for it: Ray
    itself would ask one trial ahead.
    """

    def __init__(self, trial_manager: TrialManager) -> None:
        super().__init__()
        self._trial_manager = trial_manager

    def suggest(self, trial_id: str) -> Any:
        """The task of the next trial.

        None if there is none at the moment, ``Searcher.FINISHED`` if there will be no more.
        """
        task = self._trial_manager.next_task(trial_id)
        if task is not None:
            return {"task": task}
        # while there is no trial at all, Ray asks on and on, and for nothing else
        is_over = self._trial_manager.is_finished or self._trial_manager.has_notice()
        return Searcher.FINISHED if is_over else None

    def save(self, checkpoint_path: str) -> None:
        """Write nothing: the study resumes from its storage."""

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Give up a trial that Ray ended together with the whole search.

        The policy knows of any other trial's end already.
        """
        self._trial_manager.interrupted(trial_id)


class PolicyScheduler(FIFOScheduler):  # type: ignore[misc]  # ray has no types
    """Passes workers' reports to the scheduler and its decisions to Ray.

    Ray pauses a trial only to have its worker write its state; the trial goes on as a new one of
    Ray's. One whose state cannot be written continues on its worker.
    """

    def __init__(self, trial_manager: TrialManager, check_ray: Callable[[], None]) -> None:
        super().__init__()
        self._trial_manager = trial_manager
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
                self._trial_manager.paused(trial.trial_id)
                tune_controller.stop_trial(trial)
            elif trial.is_saving:
                self._pausing.append(trial)
            elif trial.status == Trial.RUNNING:  # it could not be saved
                if self._trial_manager.unsaved(trial.trial_id):
                    # no public name
                    tune_controller._tune_controller._schedule_trial_train(trial)  # noqa: SLF001
                else:
                    tune_controller.stop_trial(trial)
        return next((trial for trial in new if trial.status == Trial.PENDING), None)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
        """Ray's decision on a trial after a report: go on, pause or stop."""
        if result["report"] is None:  # the worker rests
            goes_on = self._trial_manager.goes_on(trial.trial_id)
            return str(TrialScheduler.STOP if goes_on else TrialScheduler.CONTINUE)
        decision = self._trial_manager.reported(trial.trial_id, result["report"])
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
        self._trial_manager.died(trial.trial_id, reason, kind)


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

    def __init__(self, trial_manager: TrialManager) -> None:
        super().__init__()
        self._trial_manager = trial_manager

    def on_trial_result(self, *arguments: Any, **info: Any) -> None:
        """Print nothing."""

    on_trial_error = on_trial_complete = on_trial_result

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._trial_manager.started(trial.trial_id)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Create each trial's file of results, empty since Ray's loggers are off: Ray reads it
        at the end, and warns if it is missing.
        """
        for trial in trials:
            results = Path(trial.storage.trial_fs_path) / EXPR_RESULT_FILE
            replace_file(make_folder(results.parent) / results.name, "")


class _InterruptStopper(Stopper):  # type: ignore[misc]  # ray has no types
    """Stops all trials on an interrupt, or after an error that every trial would meet."""

    def __init__(self, trial_manager: TrialManager, interrupt: Interrupt) -> None:
        self._trial_manager = trial_manager
        self._interrupt = interrupt

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles the stopper into its experiment state, which nothing reads

    def stop_all(self) -> bool:
        if self._interrupt.notice.is_set() and self._trial_manager.is_saved:
            self._interrupt.set()
        return self._interrupt.is_set() or self._trial_manager.has_failed
