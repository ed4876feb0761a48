"""The trials that are being trained: what passes between the policy that decides and the workers that run."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotune.config.compose import Composed, Composer
from autotune.config.schema import TrialConfig
from autotune.errors import AutotuneError, ConfigError, DataError, InvalidTrialError
from autotune.execution.task_run import TrialTask, WorkerReport, how_it_died
from autotune.measurement import Evaluation, Outcome, TrialResult
from autotune.search.policy import SearchPolicy, Trial
from autotune.search.stopping import Decision
from autotune.tracking.tracker import TrackedTrial, Tracker

_MOST_REJECTED_IN_A_ROW = 1000


class Listener(Protocol):
    """Hears what happens to trials: the terminal, and the files that are written as trials end."""

    def trial_started(self, trial: int, overrides: tuple[str, ...]) -> None:
        """A worker began a trial."""
        ...

    def evaluated(self, trial: int, evaluation: Evaluation) -> None:
        """A trial made an evaluation."""
        ...

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """A trial ended."""
        ...


@dataclass
class _Running:
    trial: Trial
    tracked: TrackedTrial
    task: TrialTask
    evaluations: list[Evaluation] = field(default_factory=list)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    started_at: float = 0.0


class TrialsInFlight:
    """Trials handed out and not yet ended, by the key the execution knows them by.

    Args:
        make_task: a worker's task of a run's name, configuration, cap and deadline.
        time_budget_seconds: of searching, from the first trial's start on; None for no limit.
    """

    def __init__(
        self,
        *,
        policy: SearchPolicy,
        composer: Composer,
        tracker: Tracker,
        listeners: tuple[Listener, ...],
        make_task: Callable[[str, TrialConfig, float, float], TrialTask],
        trial_deadline_seconds: float,
        time_budget_seconds: float | None,
        unsupported: Callable[[TrialConfig], str | None],
    ) -> None:
        self._policy = policy
        self._composer = composer
        self._tracker = tracker
        self._listeners = listeners
        self._make_task = make_task
        self._trial_deadline_seconds = trial_deadline_seconds
        self._time_budget_seconds = math.inf if time_budget_seconds is None else time_budget_seconds
        self._ends_at = math.inf
        self._unsupported = unsupported
        self._running: dict[str, _Running] = {}
        self.refusal: AutotuneError | None = None
        """Set when a worker could not read the data, or make the baseline: every trial would meet the same."""

    @property
    def is_over(self) -> bool:
        """Whether no trial should be started any more."""
        return time.monotonic() >= self._ends_at or self.refusal is not None or self._policy.error is not None

    def next_task(self, key: str) -> TrialTask | None:
        """The next trial for a worker; None where the search has no more."""
        for _ in range(_MOST_REJECTED_IN_A_ROW):
            trial = None if self.is_over else self._policy.suggest()
            if trial is None:
                return None
            try:
                composed = self._compose(trial)
            except InvalidTrialError as error:
                self._policy.reject(trial.number, str(error))
                continue
            return self._hand_out(key, trial, composed)
        self.refusal = ConfigError(f"search_space: {_MOST_REJECTED_IN_A_ROW} suggestions in a row cannot be run")
        return None

    def started(self, key: str) -> None:
        """A worker took the trial up."""
        running = self._running.get(key)
        if running is not None:
            running.started_at = time.time()
            self._ends_at = min(self._ends_at, time.monotonic() + self._time_budget_seconds)
            self._tracker.start(running.tracked)
            for listener in self._listeners:
                listener.trial_started(running.trial.number, running.tracked.overrides)

    def reported(self, key: str, report: WorkerReport) -> bool:
        """Take a worker's report.

        Returns:
            Whether the trial goes on.
        """
        running = self._running[key]
        running.fingerprint = report.fingerprint or running.fingerprint
        decision = Decision.CONTINUE
        if report.evaluation is not None:
            evaluation = report.evaluation
            running.evaluations.append(evaluation)
            self._tracker.evaluate(running.tracked.name, evaluation)
            for listener in self._listeners:
                listener.evaluated(running.trial.number, evaluation)
            if report.outcome is None:
                decision = self._policy.observe(running.trial.number, evaluation)
        outcome = report.outcome or _OUTCOME_OF[decision]
        if outcome is None and self.is_over:
            outcome = Outcome.STOPPED
        if outcome is None:
            return True
        if outcome is Outcome.INVALID and (report.is_data_missing or running.trial.is_baseline):
            self.refusal = self.refusal or (DataError if report.is_data_missing else ConfigError)(report.error or "refused")
        self._end(key, outcome, report.error)
        return False

    def died(self, key: str, reason: str) -> None:
        """The trial's worker is gone before it said how the trial ended."""
        running = self._running.get(key)
        if running is None:
            return
        self._end(key, *how_it_died(running.task, seconds=time.time() - running.started_at, reason=reason))

    def interrupt_all(self) -> None:
        """Give up what is still running, because the study itself ends: resuming proposes it again."""
        for key in list(self._running):
            self.interrupted(key)

    def interrupted(self, key: str) -> None:
        """Give up one trial, as ``interrupt_all`` does."""
        running = self._running.pop(key, None)
        if running is not None:
            self._policy.interrupt(running.trial.number)

    def _compose(self, trial: Trial) -> Composed:
        composed = self._composer.compose_suggestion(trial.suggestion, seed=trial.seed)
        reason = self._unsupported(composed.trial)
        if reason is not None:
            raise InvalidTrialError(reason)
        return composed

    def _hand_out(self, key: str, trial: Trial, composed: Composed) -> TrialTask:
        tracked = TrackedTrial(
            name=f"trial-{trial.number}",
            phase="search",
            trial=trial.number,
            values=trial.suggestion.values,
            overrides=tuple(trial.suggestion.as_overrides()),
            config=composed.trial.as_dict(),
            seed=trial.seed,
            started_at=time.time(),
        )
        seconds_left = min(self._ends_at - time.monotonic(), self._time_budget_seconds)
        deadline = min(self._trial_deadline_seconds, max(1.0, seconds_left) + _GRACE_SECONDS)
        task = self._make_task(tracked.name, composed.trial, trial.cap_seconds, deadline)
        self._running[key] = _Running(trial, tracked, task, started_at=time.time())
        return task

    def _end(self, key: str, outcome: Outcome, error: str | None) -> None:
        running = self._running.pop(key)
        result = TrialResult(
            trial=running.trial.number,
            values=running.trial.suggestion.values,
            overrides=running.tracked.overrides,
            seed=running.trial.seed,
            outcome=outcome,
            evaluations=tuple(running.evaluations),
            started_at=running.started_at,
            stopped_at=time.time(),
            fingerprint=running.fingerprint,
            error=error,
        )
        score = self._policy.finish(result)
        self._tracker.finish(running.tracked, result, score)
        for listener in self._listeners:
            listener.trial_finished(result, score)


_GRACE_SECONDS = 30.0
"""What a trial may run past the study's time budget before it counts as hung."""

_OUTCOME_OF = {Decision.CONTINUE: None, Decision.CAP: Outcome.CAPPED, Decision.STOP: Outcome.STOPPED}
