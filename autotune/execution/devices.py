"""The devices that trials are trained on: which of them fail in a row, and which workers rest for
that.

A failure may be the device's or the configuration's, so it is tried again on another device, and
the worker that failed rests until then: a free worker takes the next trial, and would get the same
one. A device on which several configurations failed in a row is left out. Its worker rests until
the search ends, since the device would be given to another worker if this one ended.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from autotune.execution.task import TrialTask, warn_once
from autotune.failure import Failure, FailureKind
from autotune.space import Suggestion

_MAX_IN_A_ROW = 3
"""Failures in a row, of at least two configurations, after which a device is left out."""
_QUICK_SECONDS = 60.0
"""Seconds within which code fails that a device cannot run at all."""


@dataclass(frozen=True, kw_only=True)
class _Resting:
    task: TrialTask
    """The task that the worker trained last, whose resources it holds."""
    device: str
    suggestion: Suggestion
    """The point that is to be trained by another worker first."""


class Devices:
    """What this process knows of the devices that trials are trained on, by their names."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        """The devices of which a worker has told."""
        self.left_out: dict[str, str] = {}
        """Why each device is left out that takes no trial any more, in words."""
        self._working: set[str] = set()
        """The devices on which a training was evaluated since the last failure there."""
        self._failures: dict[str, list[tuple[Suggestion, bool]]] = {}
        """The points that failed in a row on each device, and whether code may be at fault."""
        self._resting: dict[str, _Resting] = {}
        """The workers that rest, by key."""

    def worked(self, devices: Iterable[str]) -> None:
        """Note that a training was evaluated that runs on these devices."""
        self.known.update(devices)
        self._working.update(devices)

    def ended_well(self, devices: Iterable[str]) -> None:
        """Note that a training on these devices ended, or was paused, without a failure."""
        for device in devices:
            self._failures.pop(device, None)

    def failed(
        self, failure: Failure, suggestion: Suggestion, *, line: str, seconds: float
    ) -> None:
        """Note that a training failed.

        Args:
            suggestion: its point.
            line: the failure in one line.
            seconds: seconds for which its worker had trained it.
        """
        device = failure.device
        if device is None:
            return
        self.known.add(device)
        self._working.discard(device)
        is_machines = failure.is_of_device or failure.kind is FailureKind.LOST
        is_quick = failure.kind is FailureKind.USER_CODE and seconds <= _QUICK_SECONDS
        if not (is_machines or is_quick or failure.kind is FailureKind.DEADLINE):
            return
        failures = self._failures.setdefault(device, [])
        failures.append((suggestion, not is_machines))
        is_enough = len(failures) >= _MAX_IN_A_ROW and len(dict(failures)) > 1
        # the same code works elsewhere
        is_devices = bool(self._working) or not any(is_codes for _, is_codes in failures)
        if is_enough and is_devices and device not in self.left_out:
            self.left_out[device] = line
            warn_once(
                f"{device} is left out: {len(failures)} trainings in a row failed there, the last:"
                f" {line}; the same command, started again, takes it again"
            )

    def is_suspect(self, failure: Failure, *, seconds: float) -> bool:
        """Whether code that failed may do well on another device: nothing has worked on its own
        one, or something else failed there before.

        Asked before ``failed`` is told of it.
        """
        is_quick = failure.kind is FailureKind.USER_CODE and seconds <= _QUICK_SECONDS
        return is_quick and failure.device is not None and failure.device not in self._working

    def others(self, devices: Collection[str | None]) -> set[str]:
        """The devices in use besides these."""
        return self.known - self.left_out.keys() - set(devices)

    @property
    def num_broken(self) -> int:
        """Number of devices that failed, where none works at the moment; 0 where one does."""
        return 0 if self._working else len(self.known)

    def fails_again(self, failure: Failure) -> bool:
        """Whether a training was lost on a device on which another try failed just before."""
        is_lost = failure.kind is FailureKind.LOST
        return is_lost and len(self._failures.get(failure.device or "", ())) > 1

    def rest(self, key: str, task: TrialTask, device: str, suggestion: Suggestion) -> None:
        """Note that a worker takes no trial until the point was begun by another one, or at all if
        its device is left out.
        """
        self._resting[key] = _Resting(task=task, device=device, suggestion=suggestion)

    @property
    def resting(self) -> list[TrialTask]:
        """Tasks whose resources are held by workers that rest."""
        return [resting.task for resting in self._resting.values()]

    def gone(self, key: str) -> None:
        """Note that a worker has died."""
        self._resting.pop(key, None)

    @property
    def is_one_waiting(self) -> bool:
        """Whether a worker rests until another one has begun its point: a second one that failed is
        that other one.
        """
        return any(resting.device not in self.left_out for resting in self._resting.values())

    def begun(self, suggestion: Suggestion) -> None:
        """Note that a worker has begun a point: those that rest for it may go on."""
        for key, resting in list(self._resting.items()):
            if resting.suggestion == suggestion and resting.device not in self.left_out:
                del self._resting[key]

    def goes_on(self, key: str, *, is_needed: bool) -> bool:
        """Whether a worker that rested takes trials again.

        Args:
            is_needed: whether there is no other worker to wait for.
        """
        resting = self._resting.get(key)
        if resting is not None and is_needed and resting.device not in self.left_out:
            del self._resting[key]
        return key not in self._resting
