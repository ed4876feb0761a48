"""The trials that are being trained or paused, between the policy, which decides, and the workers, which train."""

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from autotune.config.compose import Composed, Composer
from autotune.config.schema import TrialConfig
from autotune.contention import Contention
from autotune.errors import AutotuneError, ConfigError, DataError, InvalidTrialError
from autotune.execution.task_run import TrialTask, WorkerReport, how_it_died, say_niceness
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.search.policy import SearchPolicy, Trial
from autotune.search.stopping import Decision
from autotune.tracking.tracker import TrackedTrial, Tracker

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_MOST_REJECTED_IN_A_ROW = 1000


class Listener(Protocol):
    """Contract of an observer of the search's trials: the terminal, or a file that is written as trials end."""

    def trial_started(self, trial: int, overrides: tuple[str, ...]) -> None:
        """Called when a worker begins a trial or resumes it."""
        ...

    def evaluated(self, trial: int, evaluation: Evaluation) -> None:
        """Called after each evaluation of a trial."""
        ...

    def trial_paused(self, trial: int) -> None:
        """Called when a trial is paused and leaves its worker; ``trial_started`` follows if it is resumed."""
        ...

    def trial_lost(self, trial: int) -> None:
        """Called when a trial was lost with its machine; a new trial of the same point follows."""
        ...

    def trial_contended(self, trial: int, why: str) -> None:
        """Called when a trial is discarded since something else on the machine spoilt its times; a new trial of the same point follows."""
        ...

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Called when a trial has ended with a result."""
        ...


@dataclass
class _Running:
    trial: Trial
    tracked: TrackedTrial
    task: TrialTask
    evaluations: list[Evaluation] = field(default_factory=list)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
    handed_out_at: float = 0.0
    """Unix time at which the trial was handed to its current worker."""
    contention: Contention | None = None
    """Contention while the current worker trains the trial."""
    contention_before: Contention | None = None
    """Contention while earlier workers trained the trial, up to its last pause."""


class TrialManager:
    """Holds the trials that were handed out and have not ended, by key: the trial id that Ray Tune knows a trial by.

    A paused trial keeps its key, and ``resumed`` returns it when it is to continue. A trial that an earlier process paused is handed out as
    a new task, with a new key.

    Args:
        make_task: makes a worker's task from the run's name, its configuration, cap in seconds and deadline in seconds.
        has_room: whether another trial can be trained beside the given tasks.
        state_folder: folder for the training state of a paused trial, by trial number.
        max_retries: how often the point of a lost trial is tried again.
        max_retakes: how often the point of a trial is tried again whose times were spoilt by something else on the machine. After a few
            trials in a row for which that did not help, further trials are only marked.
        time_budget_seconds: time limit of the search, from the start of its first trial; None means no limit.
        unsupported: why these machines cannot run a configuration; None if they can.
        on_no_more: called when no further trial will be started, before the paused trials are ended.
    """

    def __init__(
        self,
        *,
        policy: SearchPolicy,
        composer: Composer,
        tracker: Tracker,
        listeners: tuple[Listener, ...],
        make_task: Callable[[str, TrialConfig, float, float], TrialTask],
        has_room: Callable[[Sequence[TrialTask]], bool],
        state_folder: Callable[[int], Path],
        trial_deadline_seconds: float,
        max_retries: int,
        max_retakes: int,
        time_budget_seconds: float | None,
        unsupported: Callable[[TrialConfig], str | None],
        on_no_more: Callable[[], object] = lambda: None,
    ) -> None:
        self._policy = policy
        self._composer = composer
        self._tracker = tracker
        self._listeners = listeners
        self._make_task = make_task
        self._has_room = has_room
        self._state_folder = state_folder
        self._trial_deadline_seconds = trial_deadline_seconds
        self._max_retries = max_retries
        self._max_retakes = max_retakes
        self._num_in_vain = 0
        """Number of trials in a row that were kept and marked as spoilt, however often their points had been tried."""
        self._time_budget_seconds = math.inf if time_budget_seconds is None else time_budget_seconds
        self._ends_at = math.inf
        self._has_no_more = False
        self._unsupported = unsupported
        self._on_no_more = on_no_more
        self._running: dict[str, _Running] = {}
        self._paused: dict[str, _Running] = {}
        self._paused_before: set[str] = set()
        """Keys of trials that an earlier process paused, and that Ray Tune therefore does not know."""
        self._resumed: dict[str, TrialTask] = {}
        self.refusal: AutotuneError | None = None
        """Error that every trial would meet: the data cannot be read, the baseline cannot be made, or no suggestion can be run."""

        for trial, evaluations in policy.paused:
            paused = self._new_running(trial, composer.compose_suggestion(trial.suggestion, seed=trial.seed), is_paused=True)
            paused.evaluations += evaluations
            self._paused[paused.tracked.name] = paused
            self._paused_before.add(paused.tracked.name)

    @property
    def is_over(self) -> bool:
        """Whether no further trial may be started: the time budget is spent, or the search met an error."""
        return time.monotonic() >= self._ends_at or self.refusal is not None or self._policy.error is not None

    @property
    def is_finished(self) -> bool:
        """Whether the search has ended: no trial is being trained, and none will be."""
        return self._has_no_more and not self._running

    def next_task(self, key: str) -> TrialTask | None:
        """The task of the next trial, which then has this key.

        None if there is no worker for it, if a paused trial is to continue instead (see ``resumed``), or if the search has no more
        trials, in which case the paused trials are ended.
        """
        if not self._has_room([running.task for running in self._running.values()]):
            return None
        for _ in range(_MOST_REJECTED_IN_A_ROW):
            trial = None if self.is_over else self._policy.suggest()
            if trial is None:
                break
            paused_key = next((other for other, paused in self._paused.items() if paused.trial.number == trial.number), None)
            if paused_key is not None:
                return self._resume(paused_key, trial, key)
            try:
                composed = self._compose(trial)
            except InvalidTrialError as error:
                self._policy.reject(trial.number, str(error))
                continue
            self._running[key] = self._new_running(trial, composed)
            return self._running[key].task
        else:
            self.refusal = ConfigError(f"search_space: {_MOST_REJECTED_IN_A_ROW} suggestions in a row cannot be run")
        if self.is_over or not self._running:
            self._has_no_more = True
            self._on_no_more()
            for paused_key in list(self._paused):
                self._end(paused_key, Outcome.STOPPED, None)
        return None

    def resumed(self) -> tuple[str, TrialTask] | None:
        """Key and new task of a paused trial that is to continue; None if there is none."""
        return next(iter(self._resumed.items()), None)

    def is_alive(self, key: str) -> bool:
        """Whether a trial is being trained, or is paused and may continue."""
        return key in self._paused or key in self._running

    def started(self, key: str) -> None:
        """Note that a worker has begun or resumed a trial."""
        running = self._running.get(key)
        if running is None:
            return
        self._resumed.pop(key, None)
        running.handed_out_at = time.time()
        self._ends_at = min(self._ends_at, time.monotonic() + self._time_budget_seconds)
        if not running.started_at:
            running.started_at = running.handed_out_at
            self._tracker.start(running.tracked)
        for listener in self._listeners:
            listener.trial_started(running.trial.number, running.tracked.overrides)

    def reported(self, key: str, report: WorkerReport) -> Decision:
        """Take a worker's report on a trial, and end or pause the trial if that is due.

        Returns:
            Whether the trial goes on, is paused or stops.
        """
        running = self._running[key]
        running.fingerprint = report.fingerprint or running.fingerprint
        running.contention = report.contention or running.contention
        say_niceness(running.task, report)
        decision = Decision.CONTINUE
        if report.evaluation is not None:
            evaluation = report.evaluation
            running.evaluations.append(evaluation)
            self._tracker.evaluate(running.tracked.name, evaluation)
            for listener in self._listeners:
                listener.evaluated(running.trial.number, evaluation)
            if report.outcome is None:
                decision = self._policy.observe(running.trial.number, evaluation, may_pause=report.can_pause)
        outcome = report.outcome or _OUTCOME_OF[decision]
        if outcome is None and self.is_over:
            outcome = Outcome.STOPPED
        if outcome is None and decision is Decision.PAUSE:
            self._pause(key)
        if outcome is None:
            return decision
        if outcome is Outcome.INVALID and (report.is_data_missing or running.trial.is_baseline):
            self.refusal = self.refusal or (DataError if report.is_data_missing else ConfigError)(report.error or "refused")
        self._end(key, outcome, report.error)
        return Decision.STOP

    def died(self, key: str, reason: str) -> None:
        """End a trial whose worker died before it reported how the trial ended, or before it had kept the state of a paused trial."""
        running = self._running.get(key) or self._paused.get(key)
        if running is None:
            return
        self._end(key, *how_it_died(running.task, seconds=time.time() - running.handed_out_at, reason=reason))

    def interrupt_all(self) -> None:
        """Give up all running and paused trials, because the search ends; a resumed study continues them or proposes them again."""
        for key in [*self._running, *self._paused]:
            self.interrupted(key)

    def interrupted(self, key: str) -> None:
        """Give up a running or paused trial; a resumed study continues it or proposes it again."""
        running = self._running.pop(key, None) or self._paused.pop(key, None)
        if running is not None:
            self._policy.interrupt(running.trial.number)

    def _compose(self, trial: Trial) -> Composed:
        composed = self._composer.compose_suggestion(trial.suggestion, seed=trial.seed)
        reason = self._unsupported(composed.trial)
        if reason is not None:
            raise InvalidTrialError(reason)
        return composed

    def _new_running(self, trial: Trial, composed: Composed, *, is_paused: bool = False) -> _Running:
        tracked = TrackedTrial(
            name=f"trial-{trial.number}",
            phase="search",
            trial=trial.number,
            values=trial.suggestion.values,
            overrides=tuple(trial.suggestion.as_overrides()),
            config=composed.trial.as_dict(),
            seed=trial.seed,
            started_at=time.time(),
            retry_of=trial.retry_of,
        )
        task = self._make_task(tracked.name, composed.trial, trial.cap_seconds, self._deadline_seconds())
        task = replace(task, state_folder=str(self._state_folder(trial.number)), is_paused=is_paused)
        return _Running(trial, tracked, task, handed_out_at=time.time())

    def _deadline_seconds(self) -> float:
        seconds_left = min(self._ends_at - time.monotonic(), self._time_budget_seconds)
        return min(self._trial_deadline_seconds, max(1.0, seconds_left) + _GRACE_SECONDS)

    def _pause(self, key: str) -> None:
        running = self._running.pop(key)
        running.contention_before, running.contention = _total(running.contention_before, running.contention), None
        self._paused[key] = running
        self._policy.pause(running.trial.number, running.evaluations)
        for listener in self._listeners:
            listener.trial_paused(running.trial.number)

    def _resume(self, paused_key: str, trial: Trial, key: str) -> TrialTask | None:
        """Resume a paused trial, under its own key; if an earlier process paused it, return its task, for the new ``key``."""
        running = self._paused.pop(paused_key)
        running.trial = trial
        running.task = replace(running.task, cap_seconds=trial.cap_seconds, deadline_seconds=self._deadline_seconds(), is_paused=True)
        if paused_key in self._paused_before:
            self._running[key] = running
            return running.task
        self._running[paused_key] = running
        self._resumed[paused_key] = running.task
        return None

    def _end(self, key: str, outcome: Outcome, error: str | None) -> None:
        is_paused = key in self._paused  # its worker may still be writing the state, so its folder is deleted only after the search
        running = self._paused.pop(key) if is_paused else self._running.pop(key)
        self._resumed.pop(key, None)
        contention = _total(running.contention_before, running.contention)
        why = contention.reason if contention is not None and outcome.is_timed else None
        result = TrialResult(
            trial=running.trial.number,
            values=running.trial.suggestion.values,
            overrides=running.tracked.overrides,
            seed=running.trial.seed,
            outcome=outcome,
            evaluations=tuple(running.evaluations),
            started_at=running.started_at or running.handed_out_at,
            stopped_at=time.time(),
            fingerprint=running.fingerprint,
            error=error,
            cap_seconds=running.task.cap_seconds if math.isfinite(running.task.cap_seconds) else None,
            contention=why,
        )
        is_retaken = why is not None and self._retake(result.trial)
        if why is not None:
            again = "its configuration is tried again" if is_retaken else "it is kept, and marked"
            logger.info("%s: %s; %s", running.tracked.name, why, again)
        if why is not None and is_retaken:
            self._tracker.finish(running.tracked, replace(result, outcome=Outcome.CONTENDED, error=why), None)
            shutil.rmtree(self._state_folder(result.trial), ignore_errors=True)
            for listener in self._listeners:
                listener.trial_contended(result.trial, why)
            return
        if outcome.is_timed:
            self._num_in_vain = 0 if why is None else self._num_in_vain + 1
        if outcome is Outcome.LOST and self._policy.retry(result.trial, most=self._max_retries):
            self._tracker.finish(running.tracked, result, None)
            shutil.rmtree(self._state_folder(result.trial), ignore_errors=True)
            for listener in self._listeners:
                listener.trial_lost(result.trial)
            return
        score = self._policy.finish(result)
        self._tracker.finish(running.tracked, result, score)
        if not is_paused:
            shutil.rmtree(self._state_folder(running.trial.number), ignore_errors=True)
        for listener in self._listeners:
            listener.trial_finished(result, score)

    def _retake(self, number: int) -> bool:
        """Discard a trial so that its point is tried again, unless the search ends or that did not help the last few trials."""
        if self.is_over or self._has_no_more or self._num_in_vain >= _MOST_IN_VAIN:
            return False
        return self._policy.retry(number, most=self._max_retakes)


def _total(before: Contention | None, now: Contention | None) -> Contention | None:
    return before + now if before is not None and now is not None else now or before


_MOST_IN_VAIN = 3
_GRACE_SECONDS = 30.0
"""Seconds that a trial may run past the study's time budget before it counts as hung."""

_OUTCOME_OF = {Decision.CONTINUE: None, Decision.PAUSE: None, Decision.CAP: Outcome.CAPPED, Decision.STOP: Outcome.STOPPED}
