"""The trials that are being trained or paused, between the policy, which decides, and the
workers, which train.
"""

import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path

from autotune.config.compose import Composed, Composer
from autotune.config.schema import TrialConfig
from autotune.errors import AutotuneError, ClusterError, ConfigError, DataError, InvalidTrialError
from autotune.execution.devices import Devices
from autotune.execution.live_run import LiveRun
from autotune.execution.task import (
    WORKER_ENDED,
    TrialTask,
    WorkerReport,
    report_of_end,
    warn_once,
)
from autotune.failure import Failure, FailureKind
from autotune.files import STATE_FILE
from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.reporting.study_files import StudyTables
from autotune.reporting.terminal import StudyDisplay
from autotune.search.scheduler import Done, Resume, Scheduler, Start, Trial, Wait
from autotune.search.stopping import Decision
from autotune.tracking.tracker import TrackedTrial, Tracker, search_name
from autotune.tracking.writer import TrackerWriter

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_MAX_REJECTED_IN_A_ROW = 1000


class TrialStage(Enum):
    """Where a trial stands that was handed out and has not ended."""

    RUNNING = auto()
    """A worker trains it, or is about to begin."""
    PAUSING = auto()
    """Its worker is writing its state."""
    PAUSED = auto()
    """Its state is written, and it has no worker."""


@dataclass(kw_only=True)
class _ManagedTrial(LiveRun):
    trial: Trial
    stage: TrialStage
    handed_out_at: float = field(default_factory=time.time)
    """Unix time at which the trial was handed to its current worker."""
    stored_at: float = field(default_factory=time.time)
    """Unix time at which evaluations were last stored."""
    waits_since: float | None = field(default_factory=time.time)
    """Unix time since which the trial waits for a worker, or at which its waiting was last told;
    None while it has one."""
    pausable_at: float = 0.0
    """Unix time until which the trial is not paused, since it could not be saved."""
    is_tried_elsewhere: bool = False
    """Whether the trial continues on another device, since its own may be at fault."""


@dataclass(kw_only=True, eq=False)
class TrialManager:
    """Holds the trials that were handed out and have not ended, by key: the trial id that Ray Tune
    knows a trial by.

    A paused trial is handed out again with a new key, by this process or a later one.
    """

    policy: Scheduler
    composer: Composer
    tracker: Tracker | TrackerWriter
    listeners: tuple[StudyTables | StudyDisplay, ...]
    """Told of each trial that starts or is resumed, of its evaluations, and of how it leaves its
    worker."""
    make_task: Callable[..., TrialTask]
    """Makes a worker's task from the run's name, its configuration, and other fields by name."""
    has_room: Callable[[Sequence[TrialTask]], bool]
    """Whether another trial can be trained beside the given tasks."""
    state_folder: Callable[[str], Path]
    """Folder for the states of a run, by its name."""
    unsuitable: Callable[[TrialConfig], str | None]
    """Why these machines cannot run a configuration; None if they can."""
    max_retries: int
    """How often in a row a trial is resumed that was lost and made no progress."""
    max_retakes: int
    """How often the point of a trial is tried again whose times were spoilt by something else on
    the machine. After a few trials in a row for which that did not help, others are only marked."""
    time_budget_seconds: float | None
    """Time limit of the search, from the start of its first trial; None means no limit."""
    max_concurrent_trials: int | None = None
    """Maximum number of trials that are trained at the same time; None means no limit."""
    on_waiting: Callable[[TrialTask], object] = lambda task: None
    """Called now and then with the task of a trial that no worker has begun for a while."""
    has_notice: Callable[[], bool] = lambda: False
    """Whether the search is to end as soon as all running trials are saved."""
    on_end: Callable[[], object] = lambda: None
    """Called after the result of a trial was stored."""
    done: Done | None = field(default=None, init=False)
    """Why the search has ended; None while it goes on."""
    refusal: AutotuneError | None = field(default=None, init=False)
    """Error that every trial would meet: the data cannot be read, the baseline cannot be made, or
    no suggestion can be run."""

    def __post_init__(self) -> None:
        self._began_at: float | None = None
        """When the first trial started, by the monotonic clock; None before."""
        self._num_in_vain = 0
        """Number of trials in a row that were kept and marked as spoilt, however often their
        points had been tried."""
        self._trials: dict[str, _ManagedTrial] = {}
        self._devices = Devices()
        self.policy.is_everywhere = self._is_everywhere
        self._resumed: Trial | None = None
        """Trial that is to continue as soon as its state is written."""
        for trial, curve in self.policy.begun:
            begun = self._managed(trial, self._composed(trial), TrialStage.PAUSED)
            begun.curve = curve
            self._trials[begun.tracked.name] = begun

    @property
    def is_over(self) -> bool:
        """Whether no further trial may be started: the time budget is spent, or the search met
        an error.
        """
        return self.has_failed or self._seconds_left <= 0

    @property
    def has_failed(self) -> bool:
        """Whether the search ends since every further trial would fail: running and paused trials
        are kept, for the same command to continue.
        """
        return self.refusal is not None or self.policy.error is not None

    @property
    def _seconds_left(self) -> float:
        """Seconds that are left of the time budget; 0 or less once it is spent."""
        seconds = math.inf if self.time_budget_seconds is None else self.time_budget_seconds
        return seconds - (time.monotonic() - self._began_at if self._began_at is not None else 0.0)

    @property
    def is_finished(self) -> bool:
        """Whether the search has ended: no trial is being trained, and none will be."""
        stages = {managed.stage for managed in self._trials.values()}
        is_done = self.done is not None and not self.has_failed
        return is_done and stages <= {TrialStage.PAUSED}

    @property
    def _at_work(self) -> list[_ManagedTrial]:
        """The trials that have a worker, or wait for one; not those that are being paused."""
        return [each for each in self._trials.values() if each.stage is TrialStage.RUNNING]

    def next_task(self, key: str) -> TrialTask | None:
        """The task of the next trial, which then has this key.

        None if there is no worker for it or it is not yet time for one, or if the search has no
        more trials, in which case the paused trials are ended.
        """
        self._tell_of_waiting()
        num_at_work = len(self._at_work)
        is_full = num_at_work >= (self.max_concurrent_trials or math.inf)
        if self.has_notice() or is_full or not self._has_room():
            return None
        if self._resumed is not None:
            return self._resume(self._resumed, key)
        for _ in range(_MAX_REJECTED_IN_A_ROW):
            match Done("budget") if self.is_over else self.policy.suggest():
                case Wait():
                    return None
                case Done() as done:
                    self.done = done
                    break
                case Resume(trial):
                    return self._resume(trial, key)
                case Start(trial):
                    try:
                        composed = self._composed(trial)
                        reason = self.unsuitable(composed.trial)
                    except InvalidTrialError as error:
                        reason = str(error)
                    if reason is None:
                        self._trials[key] = self._managed(trial, composed, TrialStage.RUNNING)
                        return self._trials[key].task
                    self.policy.reject(trial.number, reason)
        else:
            self.refusal = ConfigError(
                f"search_space: {_MAX_REJECTED_IN_A_ROW} suggestions in a row cannot be run"
            )
            self.done = Done("error")
        for other, managed in list(self._trials.items()):
            if managed.stage is TrialStage.PAUSED and not self.has_failed:
                self._end(other, Outcome.STOPPED, None)
        return None

    def _has_room(self, *more: TrialTask) -> bool:
        """Whether another trial can be trained beside those at work, the workers that rest, and
        ``more``.
        """
        at_work = [managed.task for managed in self._at_work]
        return self.has_room([*at_work, *self._devices.resting, *more])

    def _tell_of_waiting(self) -> None:
        now = time.time()
        for managed in self._at_work:
            if managed.waits_since is not None and now - managed.waits_since > _PATIENCE_SECONDS:
                managed.waits_since = now
                self.on_waiting(managed.task)

    def started(self, key: str) -> None:
        """Note that a worker has begun or resumed a trial."""
        if (managed := self._trials.get(key)) is None:
            return
        is_first = not managed.started_at
        managed.begun()
        managed.handed_out_at, managed.waits_since = managed.reported_at, None
        self._devices.begun(managed.trial.suggestion)
        self._began_at = self._began_at or time.monotonic()
        if is_first:
            self.tracker.start(managed.tracked)
        for listener in self.listeners:
            listener.trial_started(managed.trial.number, managed.tracked.overrides)

    def reported(self, key: str, report: WorkerReport) -> Decision:
        """Take a worker's report on a trial, and end or pause the trial if that is due.

        Returns:
            Whether the trial goes on, is paused or stops.
        """
        managed = self._trials[key]
        if managed.reported(report):
            self.policy.rewind(managed.trial.number, managed.curve)
        if report.unsaved is not None:
            line = report.unsaved.partition("\n")[0]
            logger.warning("%s: was not paused, and continues: %s", managed.tracked.name, line)
        decision = Decision.CONTINUE
        if report.evaluation is not None:
            self._devices.worked(report.devices)
            evaluation = report.evaluation
            if managed.curve.add(evaluation):
                self.tracker.evaluate(managed.tracked.name, evaluation)
            for listener in self.listeners:
                listener.evaluated(managed.trial.number, evaluation)
            if report.outcome is None:
                may_pause = report.can_pause and time.time() >= managed.pausable_at
                may_pause = may_pause and _has_room_for_states(self.state_folder("").parent)
                decision = self.policy.observe(
                    managed.trial.number, evaluation, may_pause=may_pause
                )
        outcome = report.outcome or _OUTCOME_OF[decision]
        if outcome is None and self._seconds_left <= 0:
            outcome = Outcome.STOPPED
        if outcome is None:
            if self.has_notice() and managed.is_saved_by(report):
                self.interrupted(key)
                return Decision.STOP
            if decision is Decision.PAUSE:
                self._devices.ended_well(report.devices)
                self._pause(managed)
            elif report.is_saved or time.time() - managed.stored_at > _STORE_EVERY_SECONDS:
                self._store(managed)
            return decision
        if outcome is Outcome.INVALID and (report.is_data_missing or managed.trial.is_baseline):
            self.refusal = self.refusal or (DataError if report.is_data_missing else ConfigError)(
                report.error or "refused"
            )
        self._end(key, outcome, report.failure)
        return Decision.CONTINUE if self._rests(key, managed, report) else Decision.STOP

    def _rests(self, key: str, managed: _ManagedTrial, report: WorkerReport) -> bool:
        """Whether a worker rests whose trial has ended, so that its device gets no other one."""
        failure = report.failure
        if failure is None:
            self._devices.ended_well(report.devices)
        if failure is None or failure.device is None:
            return False
        is_left_out = failure.device in self._devices.left_out
        if not is_left_out and (not managed.is_tried_elsewhere or self._devices.is_one_waiting):
            return False
        self._devices.rest(key, managed.task, failure.device, managed.trial.suggestion)
        if not (self._at_work or self._devices.is_one_waiting or self._has_room()):
            reasons = [f"{name}: {why}" for name, why in self._devices.left_out.items()]
            self.refusal = self.refusal or ClusterError(
                f"no device is left to train on ({'; '.join(reasons)}); once they work, the same"
                " command continues the study"
            )
        return True

    def goes_on(self, key: str) -> bool:
        """Whether a worker that rests takes trials again, or ends with the search."""
        is_any_training = any(managed.waits_since is None for managed in self._at_work)
        is_needed = self.is_over or not (is_any_training or self._has_room())
        return self._devices.goes_on(key, is_needed=is_needed) or self.is_finished

    def _has_others(self, task: TrialTask, device: str) -> bool:
        """Whether another trial may be trained on another device than a task that failed."""
        if task.num_gpus:
            return bool(self._at_work) or self._has_room(task)
        return bool(self._devices.others([device]))

    def _is_everywhere(self, devices: Collection[str | None]) -> bool:
        """Whether trials failed on several devices, or on the only one."""
        return len(devices) > 1 or not self._devices.others(devices)

    def died(self, key: str, reason: str, kind: FailureKind) -> None:
        """End a trial whose worker died before it reported how the trial ended. One that was to be
        paused is, at its last state.
        """
        managed = self._trials.get(key)
        if managed is None:
            self._devices.gone(key)
            return
        if managed.stage is TrialStage.PAUSING:  # as it was to leave its worker, in any case
            name, line = managed.tracked.name, reason.partition("\n")[0]
            logger.warning("%s: was paused at its last state, since it ended: %s", name, line)
            managed.pausable_at = time.time() + _UNPAUSABLE_SECONDS
            self.paused(key)
            return
        report = report_of_end(
            managed.task,
            seconds=time.time() - max(managed.reported_at, managed.handed_out_at),
            reason=reason,
            kind=kind,
            is_out_of_budget=self._seconds_left <= -_GRACE_SECONDS,
        )
        assert report.outcome is not None, "its worker is gone"
        self._end(key, report.outcome, report.failure)

    def interrupt_all(self) -> None:
        """Give up all running and paused trials, because the search ends; see ``interrupted``."""
        for key in list(self._trials):
            self.interrupted(key)

    def interrupted(self, key: str) -> None:
        """Give up a running or paused trial; a resumed study continues it from its last state."""
        managed = self._trials.pop(key, None)
        if managed is not None:
            self._store(managed)
            self.policy.interrupt(managed.trial.number)

    @property
    def is_saved(self) -> bool:
        """Whether no running trial is left that a notice may still have saved."""
        return not any(
            managed.stage is TrialStage.PAUSING or managed.can_save
            for managed in self._trials.values()
            if managed.stage is not TrialStage.PAUSED
        )

    def _store(self, managed: _ManagedTrial) -> None:
        managed.stored_at = time.time()
        self.policy.store(managed.trial.number, managed.curve)

    def _composed(self, trial: Trial) -> Composed:
        return self.composer.compose_suggestion(trial.suggestion, seed=trial.seed)

    def _managed(self, trial: Trial, composed: Composed, stage: TrialStage) -> _ManagedTrial:
        tracked = _tracked(trial, composed)
        task = self.make_task(
            tracked.name,
            composed.trial,
            cap_seconds=trial.cap_seconds,
            budget_seconds=self._budget_seconds(),
            number=trial.number,
            is_resumed=stage is TrialStage.PAUSED,
        )
        return _ManagedTrial(trial=trial, tracked=tracked, task=task, stage=stage)

    def _budget_seconds(self) -> float:
        return max(1.0, self._seconds_left) + _GRACE_SECONDS

    def _pause(self, managed: _ManagedTrial) -> None:
        """Note that a trial is to leave its worker, which writes its state."""
        managed.stage = TrialStage.PAUSING
        managed.stored_at = time.time()
        self.policy.pause(managed.trial.number, managed.curve)
        for listener in self.listeners:
            listener.trial_paused(managed.trial.number)

    def paused(self, key: str) -> None:
        """Note that a trial's state is written, and that its worker takes another trial."""
        managed = self._trials.pop(key, None)
        if managed is None:
            return
        managed.left_worker()
        managed.stage = TrialStage.PAUSED
        self._trials[managed.tracked.name] = managed
        if self.done is not None and not self.has_failed:
            self._end(managed.tracked.name, Outcome.STOPPED, None)

    def unsaved(self, key: str) -> bool:
        """Note that the state of a trial that was to be paused could not be written; whether the
        trial continues on its worker, and is not paused for a while.
        """
        managed = self._trials.get(key)
        if managed is not None and self.done is not None and not self.has_failed:
            self._end(key, Outcome.STOPPED, None)
            return False
        if managed is None:
            return False
        managed.stage, managed.pausable_at = TrialStage.RUNNING, time.time() + _UNPAUSABLE_SECONDS
        number = managed.trial.number
        if self._resumed is not None and self._resumed.number == number:
            self._resumed = None
        else:
            self.policy.unpause(number)
        for listener in self.listeners:
            listener.trial_started(number, managed.tracked.overrides)
        return True

    def _resume(self, trial: Trial, key: str) -> TrialTask | None:
        """Continue a paused trial with a new key; None while its state is being written."""
        name = search_name(trial.number)
        managed, self._resumed = self._trials.pop(name, None), None
        if managed is None:
            if any(other.trial.number == trial.number for other in self._trials.values()):
                self._resumed = trial
            return None
        managed.trial, managed.stage = trial, TrialStage.RUNNING
        managed.handed_out_at = managed.waits_since = time.time()
        managed.task = replace(
            managed.task,
            cap_seconds=trial.cap_seconds,
            budget_seconds=self._budget_seconds(),
            is_resumed=True,
        )
        self._trials[key] = managed
        return managed.task

    def _end(self, key: str, outcome: Outcome, failure: Failure | None) -> None:
        managed = self._trials.pop(key)
        is_out_of_budget = self._seconds_left <= 0
        if is_out_of_budget and failure is not None and failure.kind is FailureKind.DEADLINE:
            outcome = Outcome.STOPPED
            message = _told_of_budget(failure.message)
            failure = replace(failure, message=message, device=None)  # which may do well
        result = managed.result(outcome, failure)
        if self._is_resumed(managed, result, failure):
            return
        withdrawn = self._withdrawn(result)
        score = self.policy.finish(result, managed.curve) if withdrawn is None else None
        self.tracker.finish(managed.tracked, withdrawn or result, score)
        shutil.rmtree(self.state_folder(managed.tracked.name), ignore_errors=True)
        for listener in self.listeners:
            if withdrawn is None:
                listener.trial_finished(result, score)
            else:
                listener.trial_withdrawn(withdrawn)
        self.on_end()

    def _is_resumed(
        self, managed: _ManagedTrial, result: TrialResult, failure: Failure | None
    ) -> bool:
        """Have a trial whose worker is gone continue from its last state, unless that was done too
        often in vain, or it is the configuration's fault; whether it is.
        """
        number = managed.trial.number
        most = 0 if failure is None else self._most_tries(managed, result, failure)
        has_progressed = result.outcome is Outcome.LOST and managed.has_progressed
        if not most or not self.policy.lost(number, most=most, has_progressed=has_progressed):
            managed.is_tried_elsewhere = False
            return False
        name = managed.tracked.name
        logger.info("%s: %s; it continues from its last state", name, result.error_line)
        managed.lost_worker()
        self._store(managed)
        managed.stage = TrialStage.PAUSED
        self._trials[name] = managed
        for listener in self.listeners:
            listener.trial_withdrawn(replace(result, outcome=Outcome.LOST))
        return True

    def _withdrawn(self, result: TrialResult) -> TrialResult | None:
        """What to tell in place of the result of a trial whose point is tried again, since its
        times were spoilt; None if it is not.
        """
        why, name = result.contention, search_name(result.trial)
        if why is not None:
            may_retake = not self.is_over and self.done is None and self._num_in_vain < _MAX_IN_VAIN
            may_retake = may_retake and result.is_worth_retaking
            is_retaken = may_retake and self.policy.retry(result.trial, most=self.max_retakes)
            again = "its configuration is tried again" if is_retaken else "it is kept, and marked"
            logger.info("%s: %s; %s", name, why, again)
            if is_retaken:
                return replace(result, outcome=Outcome.CONTENDED, error=why)
        if result.outcome.is_timed:
            self._num_in_vain = 0 if why is None else self._num_in_vain + result.is_worth_retaking
        return None

    def _most_tries(self, managed: _ManagedTrial, result: TrialResult, failure: Failure) -> int:
        """How often in a row a trial that failed continues, if that may not be the configuration's
        fault. Notes what its device did.
        """
        seconds = result.stopped_at - managed.handed_out_at
        has_others = failure.device is not None and self._has_others(managed.task, failure.device)
        is_suspect = has_others and self._devices.is_suspect(failure, seconds=seconds)
        self._devices.failed(
            failure, managed.trial.suggestion, line=result.error_line, seconds=seconds
        )
        is_of_device = failure.is_of_device or self._devices.fails_again(failure)
        managed.is_tried_elsewhere = has_others and (is_suspect or is_of_device)
        if is_of_device and failure.device in self._devices.left_out:
            return sys.maxsize  # the failures of this device say nothing of the point
        if result.outcome is Outcome.LOST:
            # where nothing works, as after a driver's fault, each device fails for itself
            return self.max_retries * max(1, self._devices.num_broken)
        return min(int(is_suspect or failure.is_tried_twice), self.max_retries)


def _told_of_budget(message: str) -> str:
    _, ended, rest = message.partition(WORKER_ENDED)
    return f"the study's time budget ended amid this trial{ended}{rest}"


def _has_room_for_states(folder: Path) -> bool:
    """Whether the disk of a folder has room for another saved state, beside those in the folders
    within it.

    Room is what the largest of those takes with all its files, twice, since a state is written
    beside the older one, and some megabytes for all other files.
    """
    try:
        states = [path.parent for path in folder.glob(f"*/*/{STATE_FILE}")]
        largest = max(map(_num_bytes, states), default=0)
        if shutil.disk_usage(folder).free >= 2 * largest + 8 * 2**20:
            return True
    except OSError:  # a state was deleted meanwhile, or the folder is another machine's
        return True
    warn_once(
        f"{folder}: the disk has no room for the states of paused trials; trials go on without"
        " being paused"
    )
    return False


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))


def _tracked(trial: Trial, composed: Composed) -> TrackedTrial:
    return TrackedTrial(
        name=search_name(trial.number),
        phase="search",
        trial=trial.number,
        values=trial.suggestion.values,
        overrides=tuple(trial.suggestion.as_overrides()),
        make_config=composed.trial.as_dict,
        seed=trial.seed,
        started_at=time.time(),
        retry_of=trial.retry_of,
    )


_MAX_IN_VAIN = 3
"""Trials in a row that trying again has not helped, after which others are only marked."""
_PATIENCE_SECONDS = 30.0
"""Seconds for which a trial waits for a worker until that is told, and told again."""
_STORE_EVERY_SECONDS = 30.0
"""Seconds after which evaluations of a running trial are stored."""
_UNPAUSABLE_SECONDS = 600.0
"""Seconds for which a trial is not paused that could not be saved."""
_GRACE_SECONDS = 30.0
"""Seconds that a trial may run past the study's time budget before its worker is ended."""

_OUTCOME_OF = {
    Decision.CONTINUE: None,
    Decision.PAUSE: None,
    Decision.CAP: Outcome.CAPPED,
    Decision.STOP: Outcome.STOPPED,
}
