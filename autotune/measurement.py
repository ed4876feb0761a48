"""The records of measuring: what is timed, and what an evaluation and a trial's result say.

Time is measured, never inferred. One monotonic clock per trial is always in exactly one phase or stopped; the device is
synchronised when the phase changes and at no other time. From the phases follow three times to target:

* warm: prepare + train, what the next training in a ready process takes;
* cold: build + prepare + train, what one training in a new process takes;
* amortised over k trainings: build / k + prepare + train.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Self

from autotune.contention import Contention
from autotune.outcome import Outcome


class Phase(StrEnum):
    """What a trial's clock is counting."""

    BUILD = "build"
    """Load data, move it to the device, warm kernels up, compile: paid once by a process."""
    PREPARE = "prepare"
    """Seed and make model, optimizer and schedule: paid by every training."""
    TRAIN = "train"
    """Training steps."""
    EVALUATE = "evaluate"
    """Scoring the validation split; never part of a time to target."""


PAUSED = "PAUSED"
"""In place of an outcome where a trial may go on later."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What "trained" means: ``metric`` at or past ``value``, within ``max_train_seconds`` of training."""

    metric: str
    value: float
    mode: str
    """``max`` where higher is better, ``min`` where lower is."""
    max_train_seconds: float

    def reached_by(self, metric: float) -> bool:
        """Whether a metric value is at or past the target; never for one that is not finite."""
        if not math.isfinite(metric):
            return False
        return metric >= self.value if self.mode == "max" else metric <= self.value

    def shortfall(self, metric: float) -> float:
        """How far a metric value is from the target, in the metric's unit: positive while short of it."""
        return self.value - metric if self.mode == "max" else metric - self.value


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The only message from a worker to the driver: where a training stands, measured at one evaluation."""

    step: int
    epoch: float
    """Passes over the training split, a fraction within one."""
    samples: int
    """Training samples seen since the start."""
    build_seconds: float
    prepare_seconds: float
    train_seconds: float
    """Seconds in the train phase since the trial began; evaluating and reporting not included."""
    evaluate_seconds: float
    metric: float
    """The target's metric on the validation split; NaN where training diverged."""
    loss: float
    """Mean loss over the validation split; NaN where it was not computed."""
    samples_per_second: float
    """Training throughput since the previous evaluation."""
    peak_memory_bytes: int | None
    """Peak device memory of the trial so far; on the CPU the process's peak resident size; None where unknown."""
    energy_joules: float | None
    """Of prepare and train so far, by the devices of all workers; None where a device has no readable energy counter."""
    outcome: Outcome | None = None
    """Set on the last evaluation of a training, None before."""
    build_joules: float | None = None
    """Of build, likewise."""
    num_workers: int = 1
    """That train together; each has a device: a GPU, or its share of the CPU cores."""
    device_kind: str | None = None
    """``cpu``, or the GPU's name; None where it was not recorded."""
    contention: Contention | None = None
    """What else wanted the machine since the process began to train; None where nobody looked."""

    @property
    def warm_seconds(self) -> float:
        """Seconds of prepare and train so far."""
        return self.prepare_seconds + self.train_seconds

    def extrapolated(self, train_seconds: float) -> Self:
        """As if it had been made at another time of training, with energy used at the same rate."""
        energy = self.energy_joules
        if energy is not None:
            energy *= (self.prepare_seconds + train_seconds) / max(self.warm_seconds, 1e-9)
        return replace(self, train_seconds=train_seconds, energy_joules=energy)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The evaluation that ``as_dict`` wrote."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        outcome, contention = known.get("outcome"), known.get("contention")
        return cls(
            **{
                **known,
                "outcome": Outcome[outcome] if outcome else None,
                "contention": Contention.from_dict(contention) if contention else None,
            }
        )


@dataclass(frozen=True, kw_only=True)
class Device:
    """What is known of the device of a training's workers before it is trained, as far as an objective may need it."""

    kind: str | None
    """``cpu``, or the GPU's name; None where it is not known."""
    where: str
    """The machine, or the recording."""
    energy_fault: str | None
    """Why its energy cannot be read; None where it can."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What became of one trial: all that storage, tracker, recording and report need of it."""

    trial: int
    values: Mapping[str, Any]
    """The suggestion, by config key; empty for a baseline that the space does not contain."""
    overrides: tuple[str, ...]
    """The suggestion as Hydra overrides."""
    seed: int
    outcome: Outcome
    evaluations: tuple[Evaluation, ...]
    started_at: float
    """Unix time when the trial was handed out."""
    stopped_at: float
    fingerprint: Mapping[str, Any]
    """What the numbers depend on: versions, device, driver, threads, data checksum; empty where no worker said it."""
    error: str | None = None
    """The worker's traceback for ERRORED, a reason for other ends without an evaluation."""
    test_metric: float | None = None
    """The metric on the held-out test split; only confirmation runs score it."""
    cap_seconds: float | None = None
    """Warm seconds at which its worker was told to end it; None for no limit."""
    contention: str | None = None
    """Why its times say little about its configuration, by what else wanted the machine, in one line; None where they are to be trusted."""

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation; None where the trial ended before its first one."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def error_line(self) -> str:
        """The error in one line: what a traceback ends with, the first line of anything else; empty where there is none."""
        lines = [line.strip() for line in (self.error or "").splitlines() if line.strip()]
        if not lines:
            return ""
        return lines[-1] if lines[0].startswith("Traceback") else lines[0]

    @property
    def time_to_target_seconds(self) -> float | None:
        """Warm seconds at the first evaluation at or past the target; None unless REACHED."""
        if self.outcome is not Outcome.REACHED or self.last is None:
            return None
        return self.last.warm_seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The result that ``as_dict`` wrote, also after a pass through JSON."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(
            **{
                **known,
                "overrides": tuple(known["overrides"]),
                "outcome": Outcome[known["outcome"]],
                "evaluations": tuple(Evaluation.from_dict(each) for each in known["evaluations"]),
            }
        )


class PhaseClock:
    """The one clock of a trial: counts host monotonic seconds into the phase it is in, or into none, and joules likewise.

    ``synchronize`` waits for the device, ``read_joules`` reads its energy counter, NaN where that fails. Both are called only when the
    phase changes, so steps run unhindered; what reading takes belongs to no phase.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None, read_joules: Callable[[], float] | None = None) -> None:
        self._synchronize = synchronize
        self._read_joules = read_joules
        self._counter = 0.0
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._joules = dict.fromkeys(Phase, 0.0 if read_joules else math.nan)
        self._phase: Phase | None = None
        self._since = 0.0

    def enter(self, phase: Phase | None) -> None:
        """Wait for the device, end the current phase and begin another; None stops the clock."""
        self._synchronize()
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] += now - self._since
        if self._read_joules is not None:
            before, self._counter = self._counter, self._read_joules()
            if self._phase is not None:
                self._joules[self._phase] += self._counter - before
            now = time.perf_counter()
        self._phase, self._since = phase, now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Count nothing while the context lasts, and go on in the same phase after it."""
        phase = self._phase
        self.enter(None)
        try:
            yield
        finally:
            self.enter(phase)

    def reset(self) -> None:
        """Forget what was counted: a paused training that is taken up again is not charged for being made anew."""
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._joules = dict.fromkeys(Phase, 0.0 if self._read_joules else math.nan)

    def add(self, phase: Phase, seconds: float, joules: float | None = None) -> None:
        """Count what was measured elsewhere, as by the process that a training goes on from; energy that was not is not known then."""
        self._seconds[phase] += seconds
        self._joules[phase] += math.nan if joules is None else joules

    @property
    def phase(self) -> Phase | None:
        """The phase being counted, None while the clock is stopped."""
        return self._phase

    def seconds(self, phase: Phase) -> float:
        """Seconds counted into a phase so far, by the host's clock and without waiting for the device."""
        running = time.perf_counter() - self._since if phase is self._phase else 0.0
        return self._seconds[phase] + running

    def joules(self, *phases: Phase) -> float | None:
        """Joules counted into phases up to when the last one of them ended; None where not all of it was measured."""
        joules = math.fsum(self._joules[phase] for phase in phases)
        return joules if math.isfinite(joules) else None
