"""The runs that are being trained or paused, between the policy, which decides, and the workers,
which train: trials of a search, and runs of a confirmation or a comparison alike.
"""

import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from autotune.config.command_line import Interrupt
from autotune.config.schema import TrialConfig
from autotune.errors import AutotuneError, ClusterError, ConfigError, DataError, InvalidTrialError
from autotune.execution.cluster import ClusterSize, RaySession
from autotune.execution.devices import Devices
from autotune.execution.live_run import LiveRun, Stage
from autotune.execution.plan import TrainingPlan
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
from autotune.policy import SEARCH, Decision, Done, Policy, Resume, Run, Start, Wait
from autotune.reporting.runs_terminal import RunsDisplay
from autotune.reporting.study_files import StudyTables
from autotune.reporting.terminal import StudyDisplay
from autotune.tracking.tracker import Tracker
from autotune.tracking.writer import TrackerWriter

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_MAX_REJECTED_IN_A_ROW = 1000


@dataclass(kw_only=True, eq=False)
class TrialManager:
    """Holds the runs that were handed out and have not ended, by key: the id that Ray Tune knows
    the runs of one worker by, which follow one another.

    A paused run is handed out again with a new key, by this process or a later one.
    """

    policy: Policy
    tracker: Tracker | TrackerWriter
    listeners: tuple[StudyTables | StudyDisplay | RunsDisplay, ...]
    """Told of each run that starts or is resumed, of its evaluations, and of how it leaves its
    worker."""
    make_task: Callable[[Run], TrialTask]
    """Makes a worker's task for a run; raises InvalidTrialError if nothing can train its
    configuration."""
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
    time_budget_seconds: float | None = None
    """Time limit of the search, from the start of its first trial; None means no limit."""
    max_concurrent_trials: int | None = None
    """Maximum number of trials that are trained at the same time; None means no limit."""
    on_waiting: Callable[[TrialTask], object] = lambda task: None
    """Called now and then with the task of a trial that no worker has begun for a while."""
    save_drained: Callable[[], object] = lambda: None
    """Called often; has trainings saved whose machine is about to leave."""
    has_notice: Callable[[], bool] = lambda: False
    """Whether the search is to end as soon as all running trials are saved."""
    on_end: Callable[[], object] = lambda: None
    """Called after the result of a trial was stored."""
    devices: Devices = field(default_factory=Devices)
    """The devices that runs are trained on."""
    done: Done | None = field(default=None, init=False)
    """Why the policy has ended; None while it goes on."""
    refusal: AutotuneError | None = field(default=None, init=False)
    """Error that every trial would meet: the data cannot be read, the baseline cannot be made, or
    no suggestion can be run."""

    @classmethod
    def of(
        cls,
        plan: TrainingPlan,
        connection: RaySession,
        size: ClusterSize,
        *,
        interrupt: Interrupt,
        note: Callable[[str], None],
        **settings: Any,
    ) -> Self:
        """The trial manager for runs of a plan.

        Args:
            size: what the cluster had at the start: what does not fit there is never run, and what
                does not fit now waits.
            note: tells a line, such as that a run waits for machines.
            settings: further fields.
        """
        size = size.split(plan.trials_per_gpu)

        def size_now() -> ClusterSize:
            return connection.size_now().split(plan.trials_per_gpu)

        def has_room(tasks: Sequence[TrialTask]) -> bool:
            if not tasks:
                return True
            return plan.may_grow or size_now().has_room(tasks, *plan.resources(plan.trial))

        def unsuitable(config: TrialConfig) -> str | None:
            shortage = None if plan.may_grow else size.shortage(*plan.placed(config))
            return plan.unsuitable(config) or shortage

        def tell_of_waiting(task: TrialTask) -> None:
            if (shortage := size_now().shortage(*plan.placed(task.config))) is not None:
                note(f"{task.name} waits for machines: {shortage}")

        draining: frozenset[str] = frozenset()

        def save_drained() -> None:
            nonlocal draining
            if (hosts := connection.draining()) != draining:
                draining = hosts
                plan.save_on_hosts(hosts)
                if hosts:
                    note(f"{', '.join(sorted(hosts))} is being drained: what trains there is saved")

        return cls(
            has_room=has_room,
            unsuitable=unsuitable,
            on_waiting=tell_of_waiting,
            save_drained=save_drained,
            state_folder=plan.state_folder,
            max_retries=plan.config.search.max_retries,
            max_retakes=plan.config.search.max_retakes,
            has_notice=interrupt.notice.is_set,
            **settings,
        )

    def __post_init__(self) -> None:
        self._began_at: float | None = None
        """When the first trial started, by the monotonic clock; None before."""
        self._num_in_vain = 0
        """Number of trials in a row that were kept and marked as spoilt, however often their
        points had been tried."""
        self._runs: dict[str, LiveRun] = {}
        self._resumed: Resume | None = None
        """What is to continue as soon as its state is written."""
        self.policy.is_everywhere = self._is_everywhere
        self.policy.seconds_left = lambda: self._seconds_left
        for run, curve in self.policy.begun:
            self._runs[run.name] = self._live(run, Stage.PAUSED)
            self._runs[run.name].curve = curve

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
        stages = {live.stage for live in self._runs.values()}
        is_done = self.done is not None and not self.has_failed
        return is_done and stages <= {Stage.PAUSED}

    @property
    def _at_work(self) -> list[LiveRun]:
        """The runs that have a worker, or wait for one; not those that are being paused."""
        return [live for live in self._runs.values() if live.stage is Stage.RUNNING]

    def next_tasks(self, key: str) -> list[TrialTask]:
        """The tasks of the next worker, one after another, of which the first then has this key.

        Empty if there is no worker for them or it is not yet time for one, or if the policy has no
        more runs, in which case the paused ones are ended.
        """
        self._tell_of_waiting()
        self.save_drained()
        num_at_work = len(self._at_work)
        is_full = num_at_work >= (self.max_concurrent_trials or math.inf)
        if self.has_notice() or is_full or not self._has_room():
            return []
        if self._resumed is not None:
            return self._resume(self._resumed, key)
        for _ in range(_MAX_REJECTED_IN_A_ROW):
            match Done("budget") if self.is_over else self.policy.suggest():
                case Wait():
                    return []
                case Done() as done:
                    self.done = done
                    break
                case Resume() as resume:
                    return self._resume(resume, key)
                case Start(run, following):
                    try:
                        live = self._live(run, Stage.RUNNING)
                        reason = self.unsuitable(live.task.config)
                    except InvalidTrialError as error:
                        reason = str(error)
                    if reason is None:
                        return self._handed_out(key, live, following)
                    self.policy.reject(run.number, reason)
        else:
            self.refusal = ConfigError(
                f"search_space: {_MAX_REJECTED_IN_A_ROW} suggestions in a row cannot be run"
            )
            self.done = Done("error")
        for other, live in list(self._runs.items()):
            if live.stage is Stage.PAUSED and not self.has_failed:
                self._end(other, Outcome.STOPPED, None)
        return []

    def _handed_out(self, key: str, live: LiveRun, following: Sequence[Run]) -> list[TrialTask]:
        """Give a worker a run, and those that follow it there; their tasks."""
        live.following = tuple(self._live(run, Stage.RUNNING) for run in following)
        self._runs[key] = live
        return [live.task, *(other.task for other in live.following)]

    def _has_room(self, *more: TrialTask) -> bool:
        """Whether another trial can be trained beside those at work, the workers that rest, and
        ``more``.
        """
        at_work = [live.task for live in self._at_work]
        return self.has_room([*at_work, *self.devices.resting, *more])

    def _tell_of_waiting(self) -> None:
        now = time.time()
        for live in self._at_work:
            if live.waits_since is not None and now - live.waits_since > _PATIENCE_SECONDS:
                live.waits_since = now
                self.on_waiting(live.task)

    def started(self, key: str) -> None:
        """Note that a worker has begun or resumed a trial."""
        if (live := self._runs.get(key)) is None:
            return
        is_first = not live.run.started_at
        live.begun()
        self.devices.begun(live.run.suggestion)
        self._began_at = self._began_at or time.monotonic()
        if is_first:
            self.tracker.start(live.run)
        for listener in self.listeners:
            listener.trial_started(live.run.number, live.run.overrides)

    def reported(self, key: str, report: WorkerReport) -> Decision:
        """Take a worker's report on a trial, and end or pause the trial if that is due.

        Returns:
            Whether the trial goes on, is paused or stops.
        """
        live = self._runs[key]
        if live.reported(report):
            self.policy.rewind(live.run.number, live.curve)
        if report.unsaved is not None:
            line = report.unsaved.partition("\n")[0]
            logger.warning("%s: was not paused, and continues: %s", live.run.name, line)
        decision = Decision.CONTINUE
        if report.evaluation is not None:
            self.devices.worked(report.devices)
            evaluation = report.evaluation
            # of others, trackers are told at their end: one may be made again under its name
            if live.curve.add(evaluation) and live.run.phase == SEARCH:
                self.tracker.evaluate(live.run.name, evaluation)
            for listener in self.listeners:
                listener.evaluated(live.run.number, evaluation)
            if report.outcome is None:
                may_pause = report.can_pause and time.time() >= live.pausable_at
                may_pause = may_pause and _has_room_for_states(self.state_folder("").parent)
                decision = self.policy.observe(live.run.number, evaluation, may_pause=may_pause)
        outcome = report.outcome or _OUTCOME_OF[decision]
        if outcome is None and self._seconds_left <= 0:
            outcome = Outcome.STOPPED
        if outcome is None:
            if self.has_notice() and live.is_saved_by(report):
                self.interrupted(key)
                return Decision.STOP
            if decision is Decision.PAUSE:
                self.devices.ended_well(report.devices)
                self._pause(live)
            elif report.is_saved or time.time() - live.stored_at > _STORE_EVERY_SECONDS:
                self._store(live)
            return decision
        if outcome is Outcome.INVALID and (report.is_data_missing or live.run.is_baseline):
            self.refusal = self.refusal or (DataError if report.is_data_missing else ConfigError)(
                report.error or "refused"
            )
        self._end(key, outcome, report.failure)
        continues = self._rests(key, live, report) or key in self._runs
        return Decision.CONTINUE if continues else Decision.STOP

    def _rests(self, key: str, live: LiveRun, report: WorkerReport) -> bool:
        """Whether a worker rests whose trial has ended, so that its device gets no other one."""
        failure = report.failure
        if failure is None:
            self.devices.ended_well(report.devices)
        if failure is None or failure.device is None:
            return False
        is_left_out = failure.device in self.devices.left_out
        if not is_left_out and (not live.is_tried_elsewhere or self.devices.is_one_waiting):
            return False
        self.devices.rest(key, live.task, failure.device, live.run.suggestion)
        if not (self._at_work or self.devices.is_one_waiting or self._has_room()):
            reasons = [f"{name}: {why}" for name, why in self.devices.left_out.items()]
            self.refusal = self.refusal or ClusterError(
                f"no device is left to train on ({'; '.join(reasons)}); once they work, the same"
                " command continues the study"
            )
        return True

    def goes_on(self, key: str) -> bool:
        """Whether a worker that rests takes trials again, or ends with the search."""
        is_any_training = any(live.waits_since is None for live in self._at_work)
        is_needed = self.is_over or not (is_any_training or self._has_room())
        return self.devices.goes_on(key, is_needed=is_needed) or self.is_finished

    def _has_others(self, task: TrialTask, device: str) -> bool:
        """Whether another trial may be trained on another device than a task that failed."""
        if task.num_gpus:
            return bool(self._at_work) or self._has_room(task)
        return bool(self.devices.others([device]))

    def _is_everywhere(self, devices: Collection[str | None]) -> bool:
        """Whether trials failed on several devices, or on the only one."""
        return len(devices) > 1 or not self.devices.others(devices)

    def died(self, key: str, reason: str, kind: FailureKind) -> None:
        """End a trial whose worker died before it reported how the trial ended. One that was to be
        paused is, at its last state.
        """
        live = self._runs.get(key)
        if live is None:
            self.devices.gone(key)
            return
        if live.stage is Stage.PAUSING:  # as it was to leave its worker, in any case
            name, line = live.run.name, reason.partition("\n")[0]
            logger.warning("%s: was paused at its last state, since it ended: %s", name, line)
            live.pausable_at = time.time() + _UNPAUSABLE_SECONDS
            self.paused(key)
            return
        report = report_of_end(
            live.task,
            seconds=time.time() - max(live.reported_at, live.handed_out_at),
            reason=reason,
            kind=kind,
            is_out_of_budget=self._seconds_left <= -_GRACE_SECONDS,
        )
        assert report.outcome is not None, "its worker is gone"
        self._end(key, report.outcome, report.failure)

    def interrupt_all(self) -> None:
        """Give up all running and paused trials, because the search ends; see ``interrupted``."""
        for key in list(self._runs):
            self.interrupted(key)

    def interrupted(self, key: str) -> None:
        """Give up a running or paused trial; a resumed study continues it from its last state."""
        live = self._runs.pop(key, None)
        if live is not None:
            self._store(live)
            self.policy.interrupt(live.run.number)

    @property
    def is_saved(self) -> bool:
        """Whether no running trial is left that a notice may still have saved."""
        return not any(
            live.stage is Stage.PAUSING or live.can_save
            for live in self._runs.values()
            if live.stage is not Stage.PAUSED
        )

    def _store(self, live: LiveRun) -> None:
        live.stored_at = time.time()
        self.policy.store(live.run.number, live.curve)

    def _live(self, run: Run, stage: Stage) -> LiveRun:
        task = replace(
            self.make_task(run),
            cap_seconds=run.cap_seconds,
            budget_seconds=self._budget_seconds(),
            is_resumed=stage is Stage.PAUSED or run.may_have_begun,
        )
        run = replace(run, make_config=task.config.as_dict)
        return LiveRun(run=run, task=task, stage=stage)

    def _budget_seconds(self) -> float:
        return max(1.0, self._seconds_left) + _GRACE_SECONDS

    def _pause(self, live: LiveRun) -> None:
        """Note that a trial is to leave its worker, which writes its state."""
        live.stage = Stage.PAUSING
        live.stored_at = time.time()
        self.policy.pause(live.run.number, live.curve)
        for listener in self.listeners:
            listener.trial_paused(live.run.number)

    def paused(self, key: str) -> None:
        """Note that a trial's state is written, and that its worker takes another trial."""
        live = self._runs.pop(key, None)
        if live is None:
            return
        live.left_worker()
        live.stage = Stage.PAUSED
        self._runs[live.run.name] = live
        if self.done is not None and not self.has_failed:
            self._end(live.run.name, Outcome.STOPPED, None)

    def unsaved(self, key: str) -> bool:
        """Note that the state of a trial that was to be paused could not be written; whether the
        trial continues on its worker, and is not paused for a while.
        """
        live = self._runs.get(key)
        if live is not None and self.done is not None and not self.has_failed:
            self._end(key, Outcome.STOPPED, None)
            return False
        if live is None:
            return False
        live.stage, live.pausable_at = Stage.RUNNING, time.time() + _UNPAUSABLE_SECONDS
        number = live.run.number
        if self._resumed is not None and self._resumed.trial.number == number:
            self._resumed = None
        else:
            self.policy.unpause(number)
        for listener in self.listeners:
            listener.trial_started(number, live.run.overrides)
        return True

    def _resume(self, resume: Resume, key: str) -> list[TrialTask]:
        """Continue a paused run with a new key; empty while its state is being written."""
        run = resume.trial
        live, self._resumed = self._runs.pop(run.name, None), None
        if live is None:
            if any(other.run.number == run.number for other in self._runs.values()):
                self._resumed = resume
            return []
        live.run, live.stage = replace(live.run, cap_seconds=run.cap_seconds), Stage.RUNNING
        live.handed_out_at = live.waits_since = time.time()
        live.task = replace(
            live.task,
            cap_seconds=run.cap_seconds,
            budget_seconds=self._budget_seconds(),
            is_resumed=True,
        )
        return self._handed_out(key, live, resume.following)

    def _end(self, key: str, outcome: Outcome, failure: Failure | None) -> None:
        live = self._runs.pop(key)
        is_out_of_budget = self._seconds_left <= 0
        if is_out_of_budget and failure is not None and failure.kind is FailureKind.DEADLINE:
            outcome = Outcome.STOPPED
            message = _told_of_budget(failure.message)
            failure = replace(failure, message=message, device=None)  # which may do well
        result = live.result(outcome, failure)
        if self._is_resumed(live, result, failure):
            return
        withdrawn = self._withdrawn(live.run, result)
        score = self.policy.finish(result, live.curve) if withdrawn is None else None
        if withdrawn is None or live.run.phase == SEARCH:
            run = replace(live.run, started_at=result.started_at)
            self.tracker.finish(run, withdrawn or result, score)
        shutil.rmtree(self.state_folder(live.run.name), ignore_errors=True)
        for listener in self.listeners:
            if withdrawn is None:
                listener.trial_finished(result, score)
            else:
                listener.trial_withdrawn(withdrawn)
        self.on_end()
        if withdrawn is None and live.following:
            self._follow(key, live, failure)

    def _follow(self, key: str, ended: LiveRun, failure: Failure | None) -> None:
        """Have the worker of a run that has ended begin the next one, unless the run failed."""
        following, *others = ended.following
        if failure is not None or self.has_failed or self.has_notice():
            self.policy.interrupt(following.run.number)
            return
        following.following = tuple(others)
        self._runs[key] = following
        self.started(key)

    def _is_resumed(self, live: LiveRun, result: TrialResult, failure: Failure | None) -> bool:
        """Have a trial whose worker is gone continue from its last state, unless that was done too
        often in vain, or it is the configuration's fault; whether it is.
        """
        number = live.run.number
        most = 0 if failure is None else self._most_tries(live, result, failure)
        has_progressed = result.outcome is Outcome.LOST and live.has_progressed
        if not most or not self.policy.lost(number, most=most, has_progressed=has_progressed):
            live.is_tried_elsewhere = False
            return False
        name = live.run.name
        logger.info("%s: %s; it continues from its last state", name, result.error_line)
        live.lost_worker()
        self._store(live)
        live.stage = Stage.PAUSED
        self._runs[name] = live
        for listener in self.listeners:
            listener.trial_withdrawn(replace(result, outcome=Outcome.LOST))
        return True

    def _withdrawn(self, run: Run, result: TrialResult) -> TrialResult | None:
        """What to tell in place of the result of a run whose point is tried again, since its times
        were spoilt; None if it is not.
        """
        why = result.contention
        if why is not None:
            may_retake = not self.is_over and self.done is None and self._num_in_vain < _MAX_IN_VAIN
            may_retake = may_retake and result.is_worth_retaking
            is_retaken = may_retake and self.policy.retry(run.number, most=self.max_retakes)
            again = "its configuration is tried again" if is_retaken else "it is kept, and marked"
            logger.info("%s: %s; %s", run.name, why, again)
            if is_retaken:
                return replace(result, outcome=Outcome.CONTENDED, error=why)
        if result.outcome.is_timed:
            self._num_in_vain = 0 if why is None else self._num_in_vain + result.is_worth_retaking
        return None

    def _most_tries(self, live: LiveRun, result: TrialResult, failure: Failure) -> int:
        """How often in a row a trial that failed continues, if that may not be the configuration's
        fault. Notes what its device did.
        """
        seconds = result.stopped_at - live.handed_out_at
        has_others = failure.device is not None and self._has_others(live.task, failure.device)
        is_suspect = has_others and self.devices.is_suspect(failure, seconds=seconds)
        self.devices.failed(failure, live.run.suggestion, line=result.error_line, seconds=seconds)
        is_of_device = failure.is_of_device or self.devices.fails_again(failure)
        live.is_tried_elsewhere = has_others and (is_suspect or is_of_device)
        if is_of_device and failure.device in self.devices.left_out:
            return sys.maxsize  # the failures of this device say nothing of the point
        if result.outcome is Outcome.LOST:
            # where nothing works, as after a driver's fault, each device fails for itself
            return self.max_retries * max(1, self.devices.num_broken)
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
