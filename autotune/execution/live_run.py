"""A run that has not ended: where it stands, and what was reported of it, by one worker or, where
one was lost or the run was paused, by several.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from autotune.contention import Contention
from autotune.execution.task import TrialTask, WorkerReport, warn_of_worker
from autotune.failure import Failure
from autotune.measurement import LearningCurve, TrialResult
from autotune.outcome import Outcome
from autotune.policy import Run


class Stage(Enum):
    """Where a run stands that was handed out and has not ended."""

    RUNNING = auto()
    """A worker makes it, or is about to begin."""
    PAUSING = auto()
    """Its worker is writing its state."""
    PAUSED = auto()
    """Its state is written, and it has no worker."""


@dataclass(kw_only=True)
class LiveRun:
    """A trial of a search, or a run of a confirmation or a comparison, until it ends."""

    run: Run
    task: TrialTask
    stage: Stage
    following: "tuple[LiveRun, ...]" = ()
    """The runs that its worker makes after it."""
    curve: LearningCurve = field(default_factory=LearningCurve)
    handed_out_at: float = field(default_factory=time.time)
    """Unix time at which the run was handed to its current worker."""
    stored_at: float = field(default_factory=time.time)
    """Unix time at which evaluations were last stored."""
    waits_since: float | None = field(default_factory=time.time)
    """Unix time since which the run waits for a worker, or at which its waiting was last told; None
    while it has one."""
    pausable_at: float = 0.0
    """Unix time until which the run is not paused, since it could not be saved."""
    is_tried_elsewhere: bool = False
    """Whether the run continues on another device, since its own may be at fault."""
    reported_at: float = 0.0
    """Unix time of the current worker's last report, or else of its start."""
    can_save: bool = False
    """Whether a notice has the current worker save the run."""
    _fingerprint: Mapping[str, Any] = field(default_factory=dict)
    _test_metric: float | None = None
    _contention: Contention | None = None
    """Contention while the current worker trains the run."""
    _contention_before: Contention | None = None
    """Contention while earlier workers trained the run, up to its last pause."""
    _num_evaluations_when_lost: int = 0
    """Number of evaluations that had been made when a worker was last lost."""
    _lost_seconds: float = 0.0
    """Seconds of training after the last state of a worker that was lost."""
    _checkpoint_seconds: float = 0.0
    """Seconds that saving took, of the current worker."""
    _checkpoint_seconds_before: float = 0.0
    """Seconds that saving took, of earlier workers."""

    def begun(self) -> None:
        """Note that a worker has begun the run, or continues it."""
        self.handed_out_at = self.reported_at = time.time()
        self.waits_since = None
        started_at = self.run.started_at or self.reported_at
        self.run = replace(self.run, started_at=started_at)
        self.can_save = self.task.config.training is None  # at its next step

    def reported(self, report: WorkerReport) -> bool:
        """Take all of a report but its evaluation; whether earlier evaluations were lost, since the
        run continues from a state before them.
        """
        warn_of_worker(report)
        self.reported_at = time.time()
        self.can_save = report.can_pause or self.task.config.training is None
        self._checkpoint_seconds = report.checkpoint_seconds
        self._fingerprint = report.fingerprint or self._fingerprint
        self._test_metric = report.test_metric
        self._contention = report.contention or self._contention
        if report.earlier is None or len(report.earlier) == len(self.curve.numbered):
            return False
        last, self.curve = self.curve.last, LearningCurve(report.earlier)
        if last is not None:
            kept_seconds = 0.0 if self.curve.last is None else self.curve.last.warm_seconds
            self._lost_seconds += max(0.0, last.warm_seconds - kept_seconds)
        return last is not None

    def is_saved_by(self, report: WorkerReport) -> bool:
        """Whether the run, which has a notice, is saved at its last report, or cannot be."""
        return report.outcome is None and (report.is_saved or not self.can_save)

    def left_worker(self) -> None:
        """Note that the run has no worker any more, and will have another."""
        self._contention_before = _total(self._contention_before, self._contention)
        self._checkpoint_seconds_before += self._checkpoint_seconds
        self._contention, self._checkpoint_seconds, self.can_save = None, 0.0, False

    @property
    def has_progressed(self) -> bool:
        """Whether evaluations were made that had not been when a worker was last lost."""
        return self.curve.num_evaluations > self._num_evaluations_when_lost + 1

    def lost_worker(self) -> None:
        """Note that the run's worker is gone, and that it will continue from its last state."""
        self._num_evaluations_when_lost = self.curve.num_evaluations
        if self.reported_at:
            self._lost_seconds += time.time() - self.reported_at
        self.left_worker()

    def result(self, outcome: Outcome, failure: Failure | None) -> TrialResult:
        """What became of the run, which ends now; its ``trial`` is the run's number."""
        contention = _total(self._contention_before, self._contention)
        return TrialResult(
            trial=self.run.number,
            values=self.run.values,
            overrides=self.run.overrides,
            seed=self.run.seed,
            outcome=outcome,
            evaluations=self.curve.evaluations,
            started_at=self.run.started_at or time.time(),
            stopped_at=time.time(),
            fingerprint=self._fingerprint,
            **TrialResult.of_failure(failure),
            test_metric=self._test_metric,
            cap_seconds=self.task.cap_seconds if math.isfinite(self.task.cap_seconds) else None,
            contention=contention.reason if contention is not None and outcome.is_timed else None,
            lost_seconds=self._lost_seconds,
            checkpoint_seconds=self._checkpoint_seconds_before + self._checkpoint_seconds,
        )


def _total(before: Contention | None, now: Contention | None) -> Contention | None:
    return before + now if before is not None and now is not None else now or before
