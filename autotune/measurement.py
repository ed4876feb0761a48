"""Records of measurements: a trial's clock and its phases, an evaluation, and the result of a
trial.

Time is measured, never inferred. Each trial has one monotonic clock, which is always in exactly one
phase or stopped; the device is synchronised when the phase changes and at no other time. The phases
give three times to target:

* warm: prepare + train, the time of the next training in a process that is set up;
* cold: build + prepare + train, the time of one training in a new process;
* amortised over k trainings: build / k + prepare + train.
"""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self

from autotune.contention import MAX_RETAKEN_SECONDS
from autotune.errors import last_exception
from autotune.failure import Failure, FailureKind
from autotune.outcome import Outcome
from autotune.redaction import without_secrets


class Phase(StrEnum):
    """Phase of a trial that its clock counts."""

    BUILD = "build"
    """Start CUDA, load data, move it to the device, warm up kernels, compile: paid once per
    process."""
    PREPARE = "prepare"
    """Set seeds, and make model, optimizer and schedule: paid by every training."""
    TRAIN = "train"
    """Training steps."""
    EVALUATE = "evaluate"
    """Evaluation on the validation split; never part of a time to target."""


OUTPUT_AT = "all that it printed: "
"""Begin of the last line of an error whose trial has printed something; the file's path follows."""
_TRACEBACK = re.compile(r"(?:\[rank\d+\]: )?Traceback")
PAUSED = "PAUSED"
"""Stands in place of an outcome for a trial that is paused and may be resumed."""


@dataclass(kw_only=True)
class Target:
    """Quality that a training must reach: ``metric`` at or past ``value``, within
    ``max_train_seconds`` of training.

    ``str`` of it says it in words, such as ``val_loss <= 0.5, latency <= 20``.
    """

    metric: str
    value: float
    mode: str
    """``max`` if higher is better, ``min`` if lower is."""
    max_train_seconds: float
    constraints: dict[str, Any] = field(default_factory=dict)
    """Bounds of further metrics by name, ``at_most`` and ``at_least``, which the same evaluation
    must keep."""

    def __str__(self) -> str:
        bounds = [f"{self.metric} {'>=' if self.mode == 'max' else '<='} {self.value:g}"]
        for name, limits in self.constraints.items():
            bounds += [
                f"{name} {'>=' if side == 'at_least' else '<='} {limit:g}"
                for side, limit in limits.items()
            ]
        return ", ".join(bounds)

    def reached_by(self, metric: float) -> bool:
        """Whether a metric value is at or past ``value``; False for a value that is not finite."""
        return math.isfinite(metric) and self.shortfall(metric) <= 0

    def violations(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The bounds that further metrics are past, such as ``latency 31 > 20``, and how far, as a
        fraction of the bound; 1 for a metric that is missing or not finite.
        """
        found = {}
        for name, limits in self.constraints.items():
            value = metrics.get(name, math.nan)
            for side, limit in limits.items():
                sign, mark = (1, ">") if side == "at_most" else (-1, "<")
                past = (value - limit) / (abs(limit) or 1.0) * sign
                shown = f"{value:.4g}" if f"{value:.4g}" != f"{limit:.4g}" else repr(value)
                if not math.isfinite(past):
                    found[f"{name} {shown}"] = 1.0
                elif past > 0:
                    found[f"{name} {shown} {mark} {limit:g}"] = past
        return found

    def shortfall(self, metric: float, metrics: Mapping[str, float] | None = None) -> float:
        """Distance of an evaluation from the target, in the metric's unit: positive while the
        target is not reached.

        A violated constraint counts as a metric that is short by the same fraction, where further
        ``metrics`` are given.
        """
        own = self.value - metric if self.mode == "max" else metric - self.value
        past = {} if metrics is None else self.violations(metrics)
        return max(own, max(past.values()) * (abs(self.value) or 1.0)) if past else own


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The state of a training at one evaluation: the only message from a worker to the driver."""

    step: int
    epoch: float
    """Passes over the training split so far; may be a fraction."""
    samples: int
    """Training samples seen so far."""
    build_seconds: float
    prepare_seconds: float
    train_seconds: float
    """Seconds in the train phase since the trial began, without evaluating and reporting."""
    evaluate_seconds: float
    metric: float
    """The target's metric on the validation split; NaN if the training diverged."""
    loss: float
    """Mean loss over the validation split; NaN if it was not computed."""
    samples_per_second: float
    """Throughput of training steps since the previous evaluation."""
    peak_memory_bytes: int | None
    """Peak device memory of the trial so far; on the CPU the peak resident size of the process;
    None if unknown."""
    energy_joules: float | None
    """Energy of prepare and train so far, of all workers' devices; None if a device has no
    readable energy counter."""
    outcome: Outcome | None = None
    """Outcome of the trial on its last evaluation; None on earlier ones."""
    build_joules: float | None = None
    """Energy of build, of all workers' devices; None if a device has no readable energy counter."""
    num_workers: int = 1
    """Number of workers that train together; each has a device of its own: a GPU, or its share
    of the CPU cores."""
    device_kind: str | None = None
    """``cpu`` or the GPU's name; None if it was not recorded."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics that a training function of the user's reported, by name; a target may
    bound them."""
    reused_build_seconds: float = 0.0
    """Part of ``build_seconds`` that this training did not spend: it found code compiled, and is
    charged what compiling had taken."""

    @property
    def warm_seconds(self) -> float:
        """Seconds of prepare and train so far."""
        return self.prepare_seconds + self.train_seconds

    @property
    def spent_build_seconds(self) -> float:
        """Seconds that building really took."""
        return self.build_seconds - self.reused_build_seconds

    def shortfall(self, target: Target) -> float:
        """Distance from the target, in the metric's unit."""
        return target.shortfall(self.metric, self.measured)

    @property
    def measured(self) -> Mapping[str, float]:
        """What a target may bound: the loss and the further metrics, by name."""
        return {"loss": self.loss, **self.metrics}

    def extrapolated(self, train_seconds: float) -> Self:
        """Copy of the evaluation moved to another time of training, with energy used at the same
        rate.
        """
        energy = self.energy_joules
        if energy is not None:
            energy *= (self.prepare_seconds + train_seconds) / max(self.warm_seconds, 1e-9)
        return replace(self, train_seconds=train_seconds, energy_joules=energy)

    def as_dict(self) -> dict[str, Any]:
        """The evaluation as plain data that JSON can hold, without what is as where nobody set
        it.
        """
        return {
            name: value for name, value in asdict(self).items() if value != _UNSET.get(name, ...)
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restore an evaluation from the mapping that ``as_dict`` made of it."""
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        outcome = known.get("outcome")
        return cls(**{**known, "outcome": Outcome[outcome] if outcome else None})


_UNSET = {item.name: item.default for item in fields(Evaluation)} | {"metrics": {}}
"""What each field of an evaluation is where it is not given."""

MAX_EVALUATIONS = 4000
"""Maximum number of evaluations that are kept of a training."""


class LearningCurve:
    """The evaluations of a training so far; of a long one every second, fourth, ... and the last.

    Args:
        kept: evaluations by their number, from 0, as ``numbered`` has them.
    """

    def __init__(self, kept: Mapping[int, Evaluation] | None = None) -> None:
        kept = kept or {}
        last = max(kept, default=-1)
        stride = _stride(last + 1)
        self.numbered = {at: kept[at] for at in sorted(kept) if not at % stride or at == last}
        """The evaluations that are kept, by their number, from 0."""

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations that were made."""
        return max(self.numbered, default=-1) + 1

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The evaluations that are kept, in order."""
        return tuple(self.numbered.values())

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation; None before the first."""
        return self.numbered[max(self.numbered)] if self.numbered else None

    def add(self, evaluation: Evaluation) -> bool:
        """Append an evaluation; whether it is kept once others follow."""
        number = self.num_evaluations
        stride = _stride(number)
        if number and (number - 1) % stride:
            del self.numbered[number - 1]  # it was kept as the last only
        if _stride(number + 1) > stride:
            stride = _stride(number + 1)
            self.numbered = {at: kept for at, kept in self.numbered.items() if not at % stride}
        self.numbered[number] = evaluation
        return not number % stride

    def cut(self, num_evaluations: int) -> None:
        """Forget all but the first so many evaluations."""
        self.numbered = {at: kept for at, kept in self.numbered.items() if at < num_evaluations}


def _stride(num_evaluations: int) -> int:
    """One in so many evaluations is kept of as many."""
    return 1 << max(0, -(-num_evaluations // MAX_EVALUATIONS) - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Device:
    """Device of a training's workers, as far as it is known before the training and an objective
    may need it.
    """

    kind: str | None
    """``cpu`` or the GPU's name; None if unknown."""
    where: str
    """Name of the machine or the recording that has the device, for messages."""
    energy_fault: str | None
    """Why the device's energy cannot be read; None if it can."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Result of one trial: all that storage, tracker, recording and report need to know about
    it.
    """

    trial: int
    values: Mapping[str, Any]
    """Suggested values by config key; empty for a baseline that the space does not contain."""
    overrides: tuple[str, ...]
    """Suggested values as Hydra overrides."""
    seed: int
    outcome: Outcome
    evaluations: tuple[Evaluation, ...]
    started_at: float
    """Unix time when the trial was handed to a worker."""
    stopped_at: float
    """Unix time when the trial ended."""
    fingerprint: Mapping[str, Any]
    """What the measurements depend on: versions, device, driver, threads, data checksum; empty
    if no worker reported it."""
    error: str | None = None
    """The worker's traceback for ERRORED; the reason if the trial ended otherwise without an
    evaluation; secrets in it are hidden."""
    test_metric: float | None = None
    """The metric on the held-out test split; only confirmation runs compute it."""
    cap_seconds: float | None = None
    """Warm seconds at which the worker had to end the trial; None means no limit."""
    failure: FailureKind | None = None
    """Whose fault it is that the training failed; None where it did not."""
    output_path: str | None = None
    """Path of the file that has all that the trial's code printed, of a training that failed; None
    if it printed nothing or that is not known."""
    device: str | None = None
    """Host and GPU on which the training failed; None where that is not known."""
    contention: str | None = None
    """Why contention spoiled the trial's times, in one line; None if the times can be trusted."""
    lost_seconds: float = 0.0
    """Seconds of training that were lost with a worker, after the state that the trial continued
    from; its times do not contain them."""
    checkpoint_seconds: float = 0.0
    """Seconds that saving states took; its times do not contain them."""

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", without_secrets(self.error))

    @staticmethod
    def of_failure(failure: Failure | None) -> dict[str, Any]:
        """The fields of a result that tell why the training failed."""
        if failure is None:
            return {}
        return {
            "error": failure.message,
            "failure": failure.kind,
            "output_path": failure.output_path,
            "device": failure.device,
        }

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation; None if the trial ended before its first one."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def is_worth_retaking(self) -> bool:
        """Whether the trial is short enough to be trained again if contention spoiled its times."""
        return self.last is None or self.last.warm_seconds < MAX_RETAKEN_SECONDS

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each further metric, by the name that the training reported."""
        return {name: value for each in self.evaluations for name, value in each.metrics.items()}

    @property
    def error_line(self) -> str:
        """The error in one line: the exception that a traceback ends with, else the first line.

        Empty without an error.
        """
        lines = [line for line in (self.error or "").splitlines() if line.strip()] or [""]
        index = last_exception(lines) if _TRACEBACK.match(lines[0]) else 0
        return lines[-1 if index is None else index].strip()

    @property
    def time_to_target_seconds(self) -> float | None:
        """Warm seconds at the first evaluation at or past the target; None unless REACHED."""
        if self.outcome is not Outcome.REACHED or self.last is None:
            return None
        return self.last.warm_seconds

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restore a result from the mapping that ``as_dict`` made of it, also after a pass
        through JSON.
        """
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        failure = known.get("failure")
        return cls(
            **{
                **known,
                "failure": FailureKind(failure) if failure else None,
                "overrides": tuple(known["overrides"]),
                "outcome": Outcome[known["outcome"]],
                "evaluations": tuple(
                    Evaluation.from_dict(evaluation) for evaluation in known["evaluations"]
                ),
            }
        )


def differing_devices(runs: Iterable[TrialResult]) -> str | None:
    """A note on runs whose times do not compare, as their devices of one type differ in kind,
    power limit or clocks, or were shared; None if none do.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:
        if "device" in run.fingerprint:
            counts[run.fingerprint.get("device_type", "")][_device_text(run.fingerprint)] += 1
    different = [
        f"{text} ({count})"
        for kinds in counts.values()
        if len(kinds) > 1
        for text, count in sorted(kinds.items())
    ]
    return f"runs were timed on devices that differ: {'; '.join(different)}" if different else None


def _device_text(fingerprint: Mapping[str, Any]) -> str:
    limits = (
        ("power_limit_watts", "at most {:g} W"),
        ("max_clock_mhz", "at most {:g} MHz"),
        ("application_clock_mhz", "set to {:g} MHz"),
    )
    known = [
        text.format(gpu[name])
        for gpu in fingerprint.get("gpus", ())
        for name, text in limits
        if gpu.get(name) is not None
    ]
    if (num_trials := fingerprint.get("trials_per_gpu", 1)) > 1:
        known.append(f"shared by {num_trials} trials")
    return ", ".join([str(fingerprint["device"]), *known])


class PhaseClock:
    """Clock of a trial: counts the host's monotonic seconds, and joules, for the phase that it is
    in; while stopped it counts nothing.

    A phase may begin before its device is known, so that what the device takes to start counts:
    ``attach`` then names the device. The device is waited for, and its energy read, only when the
    phase changes, so steps are not slowed down; the time that reading the energy takes belongs to
    no phase.
    """

    def __init__(self) -> None:
        self._synchronize: Callable[[], None] = lambda: None
        self._read_joules: Callable[[], float] | None = None
        self._counter_joules = self._since = 0.0
        self.phase: Phase | None = None
        """The phase being counted; None while the clock is stopped."""
        self.reset()

    def attach(
        self, synchronize: Callable[[], None], read_joules: Callable[[], float] | None = None
    ) -> None:
        """Measure a device from now on.

        Args:
            synchronize: waits for the device.
            read_joules: reads its energy counter, and gives NaN on failure; None if the energy is
                not measured.
        """
        self._synchronize, self._read_joules = synchronize, read_joules
        if read_joules is not None:
            self._joules = dict.fromkeys(Phase, 0.0)
            self._counter_joules = read_joules()

    def enter(self, phase: Phase | None) -> None:
        """Wait for the device, end the current phase and begin ``phase``; None stops the clock."""
        self._synchronize()
        now = time.perf_counter()
        spent_seconds, spent_joules = now - self._since, 0.0
        if self._read_joules is not None:
            before, self._counter_joules = self._counter_joules, self._read_joules()
            spent_joules, now = self._counter_joules - before, time.perf_counter()
        if self.phase is not None:
            self.add(self.phase, spent_seconds, spent_joules)
        self.phase, self._since = phase, now

    @contextmanager
    def within(self, phase: Phase | None) -> Iterator[None]:
        """Count another phase inside the context, or nothing, and continue the same phase after it.

        A clock that is stopped stays so.
        """
        outer_phase = self.phase
        if outer_phase is None:
            yield
            return
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer_phase)

    def reset(self) -> None:
        """Set all counts to zero."""
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._joules = dict.fromkeys(Phase, 0.0 if self._read_joules else math.nan)
        self.reused_build_seconds = 0.0
        """Seconds of the build phase that were charged, not spent."""

    def charge(self, seconds: float, joules: float | None) -> None:
        """Add to the build phase what an earlier training spent to build, and this training uses
        again.
        """
        self.add(Phase.BUILD, seconds, joules)
        self.reused_build_seconds += seconds

    def add(self, phase: Phase, seconds: float, joules: float | None = None) -> None:
        """Add counts measured elsewhere, such as by the process that trained before a pause.

        Joules None makes the energy unknown.
        """
        self._seconds[phase] += seconds
        self._joules[phase] += math.nan if joules is None else joules

    def state(self) -> dict[str, Any]:
        """The counts so far, as plain data; see ``restore``."""
        counts = {str(phase): (self.seconds(phase), self._joules[phase]) for phase in Phase}
        return {"counts": counts, "reused_build_seconds": self.reused_build_seconds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stop the clock, and set all counts to those of ``state``: a resumed training is not
        charged for the time that making it again took.

        Raises:
            ValueError: a count of seconds is not finite.
        """
        self.enter(None)
        self.reset()
        for phase in Phase:
            seconds, joules = state["counts"][phase]
            if not math.isfinite(seconds):
                raise ValueError(f"found {seconds} as seconds of {phase}")
            self.add(phase, seconds, joules)
        self.reused_build_seconds = state["reused_build_seconds"]

    def seconds(self, phase: Phase) -> float:
        """Seconds of a phase so far, by the host's clock and without waiting for the device."""
        running = time.perf_counter() - self._since if phase is self.phase else 0.0
        return self._seconds[phase] + running

    def joules(self, *phases: Phase) -> float | None:
        """Joules of the given phases together, up to the end of the last of them.

        None if a part was not measured.
        """
        joules = math.fsum(self._joules[phase] for phase in phases)
        return joules if math.isfinite(joules) else None


def outcome_of(
    target: Target,
    metric: float,
    loss: float,
    train_seconds: float,
    prepare_seconds: float,
    cap_seconds: float,
    *,
    ended: bool,
    counts: bool = True,
) -> Outcome | None:
    """Outcome with which an evaluation ends the training; None if the training continues.

    ``loss`` is the mean validation loss: NaN counts as divergence, so pass 0 if there is no loss.
    ``ended`` says that the schedule has no step left; ``counts`` says that an evaluation at or past
    the target reaches it.
    """
    if not (math.isfinite(metric) and math.isfinite(loss)):
        return Outcome.DIVERGED
    if train_seconds > target.max_train_seconds:
        return Outcome.TIMED_OUT
    if counts and target.reached_by(metric):
        return Outcome.REACHED
    if prepare_seconds + train_seconds > cap_seconds:
        return Outcome.CAPPED
    return Outcome.MISSED if ended else None


def as_measured(metric: float) -> float:
    """The metric rounded to the seven digits that float32 holds.

    Otherwise 0.9 computed in float32 would miss a target of 0.9.
    """
    return float(f"{metric:.7g}")
