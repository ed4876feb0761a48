"""Replays a search over a recording on a virtual clock: the policy searches, and recorded curves
take the place of trainings.

A trial is charged the training seconds until it is paused, is stopped, reaches the target, or its
curve or the target's ``max_train_seconds`` ends; a resumed trial is charged from where it paused.
Workers are asynchronous, as Ray's are: each asks for its next trial when it is free.
"""

import csv
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from autotune.files import replacing
from autotune.measurement import PAUSED, Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.policy import Decision, Done, Run, Start, Wait, search_name
from autotune.recording import RecordedTrial, Recording
from autotune.reporting.study_files import COLUMNS
from autotune.search.scheduler import PointPlacement, Scheduler
from autotune.space import Suggestion
from benchmarks.replay.nearest_recorded import RecordedPoints

_OUTCOME_OF = {Decision.CAP: Outcome.CAPPED, Decision.STOP: Outcome.STOPPED}


def best_seconds(recording: Recording) -> float | None:
    """Shortest time to target of all trials of a recording; None if no trial reached the target."""
    times = (trial.time_to_target(recording.target) for trial in recording.trials)
    return min((seconds for seconds in times if seconds is not None), default=None)


class TrialPoints(PointPlacement, Protocol):
    """Hands out the trials of suggested points."""

    last: RecordedTrial
    """The trial that was handed out last."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """One stretch of training: what one worker trained of one trial without a pause."""

    trial: int
    """Number of the recorded trial."""
    worker: int
    started_seconds: float
    stopped_seconds: float
    """The virtual clock when the stretch ended; ``started_seconds`` is the clock when it began."""
    from_train_seconds: float
    train_seconds: float
    """Training seconds of the trial at the end of the stretch; ``from_train_seconds`` are those
    at its start."""
    outcome: str
    """How the stretch ended: an ``Outcome``, or PAUSED if the trial may be resumed."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a replayed search trained: its stretches in the order in which they ended."""

    stretches: tuple[Stretch, ...]
    num_workers: int

    @property
    def train_seconds(self) -> float:
        """Training seconds of all stretches together."""
        return sum(stretch.train_seconds - stretch.from_train_seconds for stretch in self.stretches)

    def lasted(self, max_seconds: float) -> bool:
        """Whether some training went on until this time of the clock."""
        return any(stretch.stopped_seconds >= max_seconds for stretch in self.stretches)

    def charges(self, *, resume_seconds: float, decision_seconds: float) -> float:
        """Device-seconds that the virtual clock leaves out: a decision before every stretch, and
        resuming each paused training.

        Args:
            resume_seconds: seconds that a worker takes to resume a paused training.
            decision_seconds: seconds that a worker waits for each decision on what to train.
        """
        num_resumed = sum(stretch.from_train_seconds > 0 for stretch in self.stretches)
        return num_resumed * resume_seconds + len(self.stretches) * decision_seconds

    def seconds_until(self, recording: Recording, within: float) -> float | None:
        """Device-seconds until a trial reached the target in at most ``1 + within`` times the
        recording's best time; None if none did.

        Device-seconds are seconds of the clock times the number of workers, idle workers included.
        ``charges`` come on top.
        """
        best = best_seconds(recording)
        if best is None:
            return None
        good = {
            trial.number
            for trial in recording.trials
            if (seconds := trial.time_to_target(recording.target)) is not None
            and seconds <= (1 + within) * best
        }
        reached_at = [
            stretch.stopped_seconds
            for stretch in self.stretches
            if stretch.outcome == Outcome.REACHED and stretch.trial in good
        ]
        return min(reached_at) * self.num_workers if reached_at else None


@dataclass
class _Training:
    """A trial of the policy while its recorded curve is replayed."""

    trial: Run
    recorded: RecordedTrial
    num_evaluated: int = 0
    """Number of evaluations made; also the index of the next one in the curve."""
    seconds: float = 0.0
    """Training seconds so far."""
    evaluations: list[Evaluation] = field(default_factory=list)

    def next_stop(self, max_train_seconds: float) -> tuple[float, Outcome | None]:
        """Training seconds of the next event.

        Its outcome if the trial ends there without an evaluation, None if it is an evaluation.
        """
        curve = self.recorded.train_seconds
        prepare_seconds = self.recorded.prepare_seconds[0] if self.recorded.prepare_seconds else 0.0
        limits = [
            (self.trial.cap_seconds, Outcome.CAPPED),
            (max_train_seconds + prepare_seconds, Outcome.TIMED_OUT),
        ]
        limits.append((curve[-1] if curve else 0.0, self._outcome_at_curve_end))
        limit, outcome = min(limits, key=lambda seconds_and_outcome: seconds_and_outcome[0])
        if self.num_evaluated < len(curve) and (
            curve[self.num_evaluated] <= limit or self._is_evaluated_past(limit)
        ):
            return max(curve[self.num_evaluated], self.seconds), None
        return max(limit, self.seconds), outcome

    def outcome(self, target: Target) -> Outcome | None:
        """The outcome with which the next evaluation ends the trial.

        None if the trial goes on after it.
        """
        recorded, index = self.recorded, self.num_evaluated
        if recorded.ends:
            limit = min(
                self.trial.cap_seconds, target.max_train_seconds + recorded.prepare_seconds[index]
            )
            is_in_time = recorded.train_seconds[index] <= limit
            return (
                None
                if is_in_time and recorded.ends[index] in (Outcome.CAPPED, Outcome.TIMED_OUT)
                else recorded.ends[index]
            )
        if not math.isfinite(recorded.metrics[index]):
            return Outcome.DIVERGED
        if target.reached_by(recorded.metrics[index]):
            return Outcome.REACHED
        return Outcome.MISSED if index + 1 == len(recorded.steps) else None

    def _is_evaluated_past(self, limit: float) -> bool:
        """Whether the next evaluation is the final one that a worker makes once the trial is
        past this limit.
        """
        return bool(self.recorded.limit_seconds) and limit >= self.recorded.limit_seconds[
            self.num_evaluated
        ] * (1 - 1e-9)

    @property
    def _outcome_at_curve_end(self) -> Outcome:
        """The outcome of a trial whose curve has ended without one."""
        outcome = self.recorded.outcome
        return (
            outcome
            if outcome is not None and (outcome.is_infeasible or outcome is Outcome.ERRORED)
            else Outcome.MISSED
        )


def replay(
    recording: Recording,
    make_policy: Callable[[PointPlacement], Scheduler],
    *,
    num_workers: int = 1,
    within: float | None = 0.1,
    repeats_any: bool = False,
    points: TrialPoints | None = None,
    max_seconds: float = math.inf,
    is_told: bool = False,
) -> Trace:
    """Run a policy's search over a recording until no trial is left to train.

    Args:
        make_policy: makes the policy over the recording's space from the placement of points that
            it must use.
        num_workers: number of virtual workers.
        repeats_any: whether the policy may suggest any point again, as in a live study; else only
            one that was recorded again.
        within: end once a trial has reached the target in at most ``1 + within`` times the
            recording's best time; None never ends early.
        points: where the trials of suggested points come from, in place of the recording's own.
        max_seconds: seconds on the clock after which the search ends.
        is_told: whether the policy knows ``max_seconds``, as in a study with a time budget.
    """
    points = points or RecordedPoints(recording.space, recording.trials, repeats_any=repeats_any)
    policy = make_policy(points)
    replaying = _Replay(recording, points, policy, num_workers, within, max_seconds)
    if is_told:
        policy.seconds_left = lambda: max_seconds - replaying.now
    return replaying.run()


class _Replay:
    """One replay: its virtual clock, its workers and the trainings that they have."""

    def __init__(
        self,
        recording: Recording,
        points: TrialPoints,
        policy: Scheduler,
        num_workers: int,
        within: float | None,
        max_seconds: float,
    ) -> None:
        self._max_seconds = max_seconds
        self._target = recording.target
        self._points = points
        self._policy = policy
        best = best_seconds(recording)
        self._enough_seconds = -math.inf if within is None or best is None else (1 + within) * best
        self._num_workers = num_workers
        self._trainings: dict[int, _Training] = {}
        # by worker: training, and clock and training seconds at first
        self._at_work: dict[int, tuple[_Training, float, float]] = {}
        # heap of time, number of the event and worker
        self._events: list[tuple[float, int, int]] = []
        self._num_events = 0
        self._stretches: list[Stretch] = []
        self._is_found = False
        self.now = 0.0
        """The virtual clock."""

    def run(self) -> Trace:
        self._hand_out(self.now)
        while self._events and not self._is_found:
            now, _, worker = heapq.heappop(self._events)
            self.now = min(now, self._max_seconds)
            if now > self._max_seconds:
                break
            self._advance(worker, now)
            self._hand_out(now)
        # the search ended during these trainings
        for worker, (training, since, seconds) in sorted(self._at_work.items()):
            training.seconds = seconds + (self.now - since)
            self._end_stretch(worker, self.now, Outcome.STOPPED)
        return Trace(stretches=tuple(self._stretches), num_workers=self._num_workers)

    def _hand_out(self, now: float) -> None:
        """Give every free worker a trial, until the policy suggests none."""
        for worker in range(self._num_workers):
            if worker in self._at_work or self._is_found:
                continue
            answer = self._policy.suggest()
            if isinstance(answer, Wait | Done):
                return
            trial = answer.trial
            if trial.number not in self._trainings:
                self._trainings[trial.number] = _Training(trial, self._points.last)
            training = self._trainings[trial.number]
            training.trial = trial
            self._at_work[worker] = training, now, training.seconds
            self._schedule(worker, now)

    def _schedule(self, worker: int, now: float) -> None:
        """Enqueue a worker's next event: the next stop of its training."""
        training = self._at_work[worker][0]
        stop, _ = training.next_stop(self._target.max_train_seconds)
        self._num_events += 1
        heapq.heappush(self._events, (now + (stop - training.seconds), self._num_events, worker))

    def _advance(self, worker: int, now: float) -> None:
        """Take a worker's training to its next stop: an evaluation or the trial's end."""
        training = self._at_work[worker][0]
        training.seconds, outcome = training.next_stop(self._target.max_train_seconds)
        if outcome is not None:
            self._end(worker, now, outcome)
            return
        evaluation = replayed_evaluation(training.recorded, training.num_evaluated)
        outcome = training.outcome(self._target)
        training.num_evaluated += 1
        training.evaluations.append(Evaluation(**{**vars(evaluation), "outcome": outcome}))
        if outcome is not None:
            self._end(worker, now, outcome)
            return
        decision = self._policy.observe(training.trial.number, evaluation)
        if decision is Decision.CONTINUE:
            self._schedule(worker, now)
        elif decision is Decision.PAUSE:
            self._end_stretch(worker, now, PAUSED)
        else:
            self._end(worker, now, _OUTCOME_OF[decision])

    def _end(self, worker: int, now: float, outcome: Outcome) -> None:
        training, since, _ = self._at_work[worker]
        self._is_found = self._is_found or (
            outcome is Outcome.REACHED and training.seconds <= self._enough_seconds
        )
        self._end_stretch(worker, now, outcome)
        self._policy.finish(
            TrialResult(
                trial=training.trial.number,
                values=training.trial.suggestion.values,
                overrides=(),
                seed=training.trial.seed,
                outcome=outcome,
                evaluations=tuple(training.evaluations),
                started_at=since,
                stopped_at=now,
                fingerprint={},
            )
        )

    def _end_stretch(self, worker: int, now: float, outcome: str) -> None:
        training, since, seconds = self._at_work.pop(worker)
        self._stretches.append(
            Stretch(
                trial=training.recorded.number,
                worker=worker,
                started_seconds=since,
                stopped_seconds=now,
                from_train_seconds=seconds,
                train_seconds=training.seconds,
                outcome=str(outcome),
            )
        )


def started(number: int, point: Suggestion, *, cap_seconds: float = math.inf) -> Start:
    """What a search that is not this package's answers where a new trial begins at a point."""
    name = search_name(number)
    return Start(Run(number=number, name=name, suggestion=point, seed=0, cap_seconds=cap_seconds))


def replayed_evaluation(recorded: RecordedTrial, index: int) -> Evaluation:
    """The recorded evaluation at an index, as a worker would send it."""
    seconds, step = recorded.train_seconds[index], recorded.steps[index]
    epoch = (
        recorded.epochs[index]
        if recorded.epochs and math.isfinite(recorded.epochs[index])
        else step * _epochs_per_step(recorded)
    )
    prepare_seconds = recorded.prepare_seconds[index] if recorded.prepare_seconds else 0.0
    return Evaluation(
        step=step,  # type: ignore[arg-type]  # a recording's steps may be fractions
        epoch=epoch,
        samples=step,  # type: ignore[arg-type]  # may be a fraction
        build_seconds=recorded.build_seconds[index] if recorded.build_seconds else 0.0,
        prepare_seconds=prepare_seconds,
        train_seconds=seconds - prepare_seconds,
        evaluate_seconds=0.0,
        metric=recorded.metrics[index],
        loss=math.nan,
        samples_per_second=step / seconds if seconds else 0.0,
        peak_memory_bytes=None,
        energy_joules=_measured(recorded.energy_joules, index),
        build_joules=_measured(recorded.build_joules, index),
        num_workers=int(recorded.num_workers[index]) if recorded.num_workers else 1,
        device_kind=recorded.device_kinds[index] if recorded.device_kinds else None,
    )


def _epochs_per_step(recorded: RecordedTrial) -> float:
    """Epochs of a step where none are recorded: 1, but where a trial has more steps than the
    ``epochs`` of its configuration, its last step ends the last of them.
    """
    length, last = recorded.suggestion.values.get("epochs", math.inf), recorded.steps[-1]
    return float(length / last) if last > length else 1.0


def _measured(values: Sequence[float], index: int) -> float | None:
    return values[index] if values and math.isfinite(values[index]) else None


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace as CSV: one row for each stretch, in the order in which the stretches ended,
    with seconds at full precision.
    """
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for order, stretch in enumerate(trace.stretches):
            rows.writerow([order, *(getattr(stretch, name) for name in COLUMNS[1:])])
