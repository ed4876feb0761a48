"""Replaying a recording: the policy searches, and recorded curves stand for the trainings, on a virtual clock.

A trial is charged the training seconds up to where it was paused, stopped, or reached the target, or its curve or the target's
``max_train_seconds`` ended; one that is taken up again is charged on from where it stood. Workers are asynchronous, as Ray's are:
each asks for its next trial when it is free. They may be lost, as machines are: the trial begins again, from its start, wherever the policy
has it tried again, and another worker comes at once.
"""

import csv
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.files import replacing
from autotune.measurement import PAUSED, Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.recording import RecordedTrial, Recording
from autotune.replay.nearest_recorded import RecordedPoints
from autotune.report.trace_file import COLUMNS
from autotune.search.policy import PointPlacement, SearchPolicy, Trial
from autotune.search.seeds import derived_seed
from autotune.search.stopping import Decision

_MOST_RETRIES = 1000
"""A replayed search gives no point up."""
_OUTCOME_OF = {Decision.CAP: Outcome.CAPPED, Decision.STOP: Outcome.STOPPED}


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What one worker trained of one trial without a pause."""

    trial: int
    """Number of the recorded trial."""
    worker: int
    started_seconds: float
    """Of the virtual clock."""
    stopped_seconds: float
    from_train_seconds: float
    """Where in its own training the trial began this stretch, and where it stood when that ended."""
    train_seconds: float
    outcome: str
    """An ``Outcome``, or PAUSED where the trial may go on later."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a replayed search did, in the order in which stretches ended."""

    stretches: tuple[Stretch, ...]
    num_workers: int

    @property
    def train_seconds(self) -> float:
        """Training seconds charged in all."""
        return sum(each.train_seconds - each.from_train_seconds for each in self.stretches)

    def charges(self, *, resume_seconds: float, decision_seconds: float) -> float:
        """Device seconds that the virtual clock leaves out: a decision before every stretch, and making a paused training anew.

        Args:
            resume_seconds: that a worker takes until a paused training goes on from where it stood.
            decision_seconds: that a worker waits until it is told what to train.
        """
        num_resumed = sum(each.from_train_seconds > 0 for each in self.stretches)
        return num_resumed * resume_seconds + len(self.stretches) * decision_seconds

    def seconds_until(self, recording: Recording, within: float) -> float | None:
        """Device seconds until a trial reached the target in at most ``1 + within`` times the recording's best; None where none did.

        Workers that wait are charged too: seconds of the clock times workers. ``charges`` come on top.
        """
        best = recording.best_seconds
        if best is None:
            return None
        good = {
            each.number
            for each in recording.trials
            if (seconds := each.time_to_target(recording.target)) is not None and seconds <= (1 + within) * best
        }
        found = [each.stopped_seconds for each in self.stretches if each.outcome == Outcome.REACHED and each.trial in good]
        return min(found) * self.num_workers if found else None


@dataclass
class _Training:
    """One trial as it is replayed."""

    trial: Trial
    recorded: RecordedTrial
    place: int = 0
    """Evaluations made."""
    seconds: float = 0.0
    """Train seconds so far."""
    evaluations: list[Evaluation] = field(default_factory=list)

    def next_stop(self, max_train_seconds: float) -> tuple[float, Outcome | None]:
        """Train seconds at which something happens next, and the outcome where that is the trial's end without an evaluation."""
        curve = self.recorded.train_seconds
        preparing = self.recorded.prepare_seconds[0] if self.recorded.prepare_seconds else 0.0
        limits = [(self.trial.cap_seconds, Outcome.CAPPED), (max_train_seconds + preparing, Outcome.TIMED_OUT)]
        limits.append((curve[-1] if curve else 0.0, self._end))
        limit, outcome = min(limits, key=lambda each: each[0])
        if self.place < len(curve) and (curve[self.place] <= limit or self._is_made_at(limit)):
            return max(curve[self.place], self.seconds), None
        return max(limit, self.seconds), outcome

    def outcome(self, target: Target) -> Outcome | None:
        """How the next evaluation ends the trial; None where it does not."""
        recorded, place = self.recorded, self.place
        if recorded.ends:
            limit = min(self.trial.cap_seconds, target.max_train_seconds + recorded.prepare_seconds[place])
            is_in_time = recorded.train_seconds[place] <= limit
            return None if is_in_time and recorded.ends[place] in (Outcome.CAPPED, Outcome.TIMED_OUT) else recorded.ends[place]
        if not math.isfinite(recorded.metrics[place]):
            return Outcome.DIVERGED
        if target.reached_by(recorded.metrics[place]):
            return Outcome.REACHED
        return Outcome.MISSED if place + 1 == len(recorded.steps) else None

    def _is_made_at(self, limit: float) -> bool:
        """Whether the next evaluation is what a worker makes when it is past this limit."""
        return bool(self.recorded.limit_seconds) and limit >= self.recorded.limit_seconds[self.place] * (1 - 1e-9)

    @property
    def _end(self) -> Outcome:
        """What becomes of a trial whose curve has ended."""
        outcome = self.recorded.outcome
        return outcome if outcome is not None and (outcome.is_infeasible or outcome is Outcome.ERRORED) else Outcome.MISSED


def replay(
    recording: Recording,
    make_policy: Callable[[PointPlacement], SearchPolicy],
    *,
    num_workers: int = 1,
    within: float | None = 0.1,
    lost_every_seconds: float | None = None,
    seed: int = 0,
) -> Trace:
    """Search a recording until no trial is left to train.

    Args:
        make_policy: the policy over the recording's space, for points that are placed as it is told.
        num_workers: virtual ones.
        lost_every_seconds: mean seconds of the clock until a worker is lost, exponentially distributed; None: none is.
        seed: of when they are lost.
        within: end earlier, when a trial has reached the target in at most ``1 + within`` times the recording's best; None: do not.
    """
    return _Replay(recording, make_policy, num_workers, within, _Losses(num_workers, lost_every_seconds, seed)).run()


class _Losses:
    """When each worker is lost next."""

    def __init__(self, num_workers: int, every_seconds: float | None, seed: int) -> None:
        self._every_seconds = every_seconds
        self._rng = random.Random(derived_seed(seed, "lost workers"))  # noqa: S311  # no secret
        self._next = [self._drawn() for _ in range(num_workers)]

    def next(self, worker: int, now: float) -> float:
        """The first loss of a worker at or after a time; what was lost while it had nothing to train is passed over."""
        while self._next[worker] < now:
            self._next[worker] += self._drawn()
        return self._next[worker]

    def passed(self, worker: int) -> None:
        """It was lost."""
        self._next[worker] += self._drawn()

    def _drawn(self) -> float:
        return math.inf if self._every_seconds is None else self._rng.expovariate(1 / self._every_seconds)


class _Replay:
    def __init__(
        self,
        recording: Recording,
        make_policy: Callable[[PointPlacement], SearchPolicy],
        num_workers: int,
        within: float | None,
        losses: _Losses,
    ) -> None:
        self._target = recording.target
        self._points = RecordedPoints(recording.space, recording.trials)
        self._policy = make_policy(self._points)
        best = recording.best_seconds
        self._enough = -math.inf if within is None or best is None else (1 + within) * best
        self._num_workers = num_workers
        self._losses = losses
        self._trainings: dict[int, _Training] = {}
        self._at_work: dict[int, tuple[_Training, float, float]] = {}  # worker -> training, clock and train seconds as it began
        self._events: list[tuple[float, int, int]] = []
        self._num_events = 0
        self._stretches: list[Stretch] = []
        self._is_found = False

    def run(self) -> Trace:
        now = 0.0
        self._hand_out(now)
        while self._events and not self._is_found:
            now, _, worker = heapq.heappop(self._events)
            if now == self._losses.next(worker, now):
                self._lose(worker, now)
            else:
                self._step(worker, now)
            self._hand_out(now)
        for worker in sorted(self._at_work):  # the search ended while these were being trained
            training, since, seconds = self._at_work[worker]
            training.seconds = seconds + (now - since)
            self._leave(worker, now, Outcome.STOPPED)
        return Trace(stretches=tuple(self._stretches), num_workers=self._num_workers)

    def _hand_out(self, now: float) -> None:
        """Give every free worker a trial, while there are any."""
        for worker in range(self._num_workers):
            if worker in self._at_work or self._is_found:
                continue
            trial = self._policy.suggest()
            if trial is None:
                return
            if trial.number not in self._trainings:
                self._trainings[trial.number] = _Training(trial, self._points.last)
            training = self._trainings[trial.number]
            training.trial = trial
            self._at_work[worker] = training, now, training.seconds
            self._await(worker, now)

    def _await(self, worker: int, now: float) -> None:
        training = self._at_work[worker][0]
        stop, _ = training.next_stop(self._target.max_train_seconds)
        self._num_events += 1
        due = min(now + (stop - training.seconds), self._losses.next(worker, now))
        heapq.heappush(self._events, (due, self._num_events, worker))

    def _lose(self, worker: int, now: float) -> None:
        """A worker is lost, and what it trained with it."""
        training, since, seconds = self._at_work[worker]
        training.seconds = seconds + (now - since)
        self._losses.passed(worker)
        self._leave(worker, now, Outcome.LOST)
        del self._trainings[training.trial.number]
        self._points.release(training.recorded)
        self._policy.retry(training.trial.number, most=_MOST_RETRIES)

    def _step(self, worker: int, now: float) -> None:
        """What happens at a worker's next stop."""
        training = self._at_work[worker][0]
        training.seconds, outcome = training.next_stop(self._target.max_train_seconds)
        if outcome is not None:
            self._end(worker, now, outcome)
            return
        evaluation = replayed_evaluation(training.recorded, training.place)
        outcome = training.outcome(self._target)
        training.place += 1
        training.evaluations.append(Evaluation(**{**vars(evaluation), "outcome": outcome}))
        if outcome is not None:
            self._end(worker, now, outcome)
            return
        decision = self._policy.observe(training.trial.number, evaluation)
        if decision is Decision.CONTINUE:
            self._await(worker, now)
        elif decision is Decision.PAUSE:
            self._leave(worker, now, PAUSED)
        else:
            self._end(worker, now, _OUTCOME_OF[decision])

    def _end(self, worker: int, now: float, outcome: Outcome) -> None:
        training, since, _ = self._at_work[worker]
        self._is_found = self._is_found or (outcome is Outcome.REACHED and training.seconds <= self._enough)
        self._leave(worker, now, outcome)
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

    def _leave(self, worker: int, now: float, outcome: str) -> None:
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


def replayed_evaluation(recorded: RecordedTrial, place: int) -> Evaluation:
    """A recorded evaluation, as a worker would send it."""
    seconds, step = recorded.train_seconds[place], recorded.steps[place]
    epoch = recorded.epochs[place] if recorded.epochs and math.isfinite(recorded.epochs[place]) else step
    prepare_seconds = recorded.prepare_seconds[place] if recorded.prepare_seconds else 0.0
    return Evaluation(
        step=step,  # type: ignore[arg-type]  # a recording's steps may be fractions
        epoch=epoch,
        samples=step,  # type: ignore[arg-type]  # likewise
        build_seconds=recorded.build_seconds[place] if recorded.build_seconds else 0.0,
        prepare_seconds=prepare_seconds,
        train_seconds=seconds - prepare_seconds,
        evaluate_seconds=0.0,
        metric=recorded.metrics[place],
        loss=math.nan,
        samples_per_second=step / seconds if seconds else 0.0,
        peak_memory_bytes=None,
        energy_joules=_measured(recorded.energy_joules, place),
        build_joules=_measured(recorded.build_joules, place),
        num_workers=int(recorded.num_workers[place]) if recorded.num_workers else 1,
        device_kind=recorded.device_kinds[place] if recorded.device_kinds else None,
    )


def _measured(values: Sequence[float], place: int) -> float | None:
    return values[place] if values and math.isfinite(values[place]) else None


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace as CSV: a row for each stretch of training, in the order in which they ended; seconds to the last bit."""
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for order, stretch in enumerate(trace.stretches):
            rows.writerow([order, *(getattr(stretch, name) for name in COLUMNS[1:])])
