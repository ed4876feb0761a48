"""Running the search on Ray Tune: its searcher asks the policy, its scheduler tells it, and Ray runs the workers.

Ray's own experiment state, loggers and signal handling are off: the study's storage is what resumes.
"""

import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import TuneError
from ray.tune.experiment import Trial
from ray.tune.result import EXPR_RESULT_FILE
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from autotune.execution.trial_manager import TrialManager
from autotune.execution.worker import TrialWorker
from autotune.search.stopping import Decision


def run_search(trial_manager: TrialManager, *, folder: Path, interrupt: threading.Event) -> None:
    """Run trials until the policy suggests no more, or ``interrupt`` is set; what then still runs is given up.

    Args:
        folder: where Ray writes what it must; emptied before and after.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _leave_mlflow_out()
    try:
        tune.run(
            TrialWorker,
            name="search",
            num_samples=-1,
            search_alg=PolicySearcher(trial_manager),
            scheduler=PolicyScheduler(trial_manager),
            callbacks=[_StartCallback(trial_manager)],
            stop=_InterruptStopper(trial_manager, interrupt),
            reuse_actors=True,
            storage_path=str(folder),
            trial_name_creator=str,
            trial_dirname_creator=lambda trial: trial.trial_id,
            raise_on_failed_trial=False,
            verbose=0,
        )
    except TuneError as error:  # Ray's wrapper about what the policy or the storage raised
        if isinstance(error.__context__, Exception):
            raise error.__context__ from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    trial_manager.interrupt_all()


def _leave_mlflow_out() -> None:
    """Have Ray's own integration, imported to count callbacks, do without MLflow: that takes seconds to import, and nobody uses it here."""
    known = sys.modules.get("mlflow")
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # what Python itself takes as: there is none
    try:
        import ray.air.integrations.mlflow  # noqa: F401, PLC0415  # while there is none
    finally:
        del sys.modules["mlflow"]
        if known is not None:
            sys.modules["mlflow"] = known


class PolicySearcher(Searcher):  # type: ignore[misc]  # ray has no types
    """Asks the policy for Ray Tune's trials, when there is a worker for one: Ray itself would ask one trial ahead."""

    def __init__(self, trial_manager: TrialManager) -> None:
        super().__init__()
        self._trial_manager = trial_manager

    def suggest(self, trial_id: str) -> Any:
        """The next trial's task; None where there is none now, or that there is no more."""
        task = self._trial_manager.next_task(trial_id)
        if task is not None:
            return {"task": task}
        return Searcher.FINISHED if self._trial_manager.is_finished else None

    def save(self, checkpoint_path: str) -> None:
        """Write nothing: the study's storage is what resumes."""

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """A trial that ended here has ended for the policy already, unless Ray ended it with the whole search."""
        self._trial_manager.interrupted(trial_id)


class PolicyScheduler(FIFOScheduler):  # type: ignore[misc]  # ray has no types
    """Passes workers' reports to the policy and its decisions back, and takes paused trials up when the policy says so."""

    def __init__(self, trial_manager: TrialManager) -> None:
        super().__init__()
        self._trial_manager = trial_manager
        self._paused: dict[str, Any] = {}
        self._new: list[Any] = []

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """A new trial, that no worker is being started for yet."""
        self._new.append(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """A paused trial that is to go on, with its new task, else the first new one; paused ones that have ended leave Ray too.

        Ray gives a worker that is free to the trial chosen here, and stops the one that is being started for it: so that is never one of
        those that wait for theirs, or short trials would run on one worker for ever. Ray starts workers for the other new ones itself.
        """
        new, self._new = self._new, []
        for key, trial in list(self._paused.items()):
            if trial.status == Trial.PAUSED and not self._trial_manager.is_alive(key):
                del self._paused[key]
                tune_controller.stop_trial(trial)
        resumed = self._trial_manager.resumed()
        if resumed is not None:
            key, task = resumed
            trial = self._paused[key]
            if trial.status == Trial.PAUSED:  # else its state is still being written
                trial.set_config({"task": task})
            if trial.status in (Trial.PAUSED, Trial.PENDING):
                return trial
        return next((trial for trial in new if trial.status == Trial.PENDING), None)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
        """Whether the trial goes on. An unfit worker is asked once more, which ends its process."""
        report = result["report"]
        decision = self._trial_manager.reported(trial.trial_id, report)
        if decision is Decision.PAUSE:
            self._paused[trial.trial_id] = trial
            return str(TrialScheduler.PAUSE)
        return str(TrialScheduler.CONTINUE if decision is Decision.CONTINUE or result["is_unfit"] else TrialScheduler.STOP)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """A worker is gone: for a trial that had not ended, that is its end."""
        self._trial_manager.died(trial.trial_id, _why(trial))


def _why(trial: Any) -> str:
    """What Ray wrote of a worker's end, less its own heading."""
    path = Path(trial.error_file or "")
    text = path.read_text(errors="replace") if path.is_file() else ""
    said = text.partition("\n")[2].strip()
    return f"the worker died: {said}" if said else "the worker died"


class _StartCallback(tune.Callback):  # type: ignore[misc]  # ray has no types
    def __init__(self, trial_manager: TrialManager) -> None:
        self._trial_manager = trial_manager

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._trial_manager.started(trial.trial_id)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Leave each trial the file of results that Ray reads at the end, and would warn of: it is empty, as Ray's loggers are off."""
        for trial in trials:
            results = Path(trial.storage.trial_fs_path) / EXPR_RESULT_FILE
            results.parent.mkdir(parents=True, exist_ok=True)
            results.touch()


class _InterruptStopper(Stopper):  # type: ignore[misc]  # ray has no types
    """Ends all trials at once on an interrupt, or when the search met an error that every trial would meet."""

    def __init__(self, trial_manager: TrialManager, interrupt: threading.Event) -> None:
        self._trial_manager = trial_manager
        self._interrupt = interrupt

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray writes its experiment state with it, and nothing reads that

    def stop_all(self) -> bool:
        return self._interrupt.is_set() or self._trial_manager.refusal is not None
