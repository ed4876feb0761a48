"""Contention: what else used the machine while a training was timed, and when that spoils the
training's time.

The operating system gives the numbers (``execution/watchdog.py`` reads them); the thresholds here
say what they mean:

* *Stopped*: for half a second or more the process neither ran nor waited for a CPU (SIGSTOP, a
  frozen container, a suspended machine), while its clocks went on.
* *Waited*: for more than a tenth of its time the training waited for a CPU because of processes
  outside the study. They are charged with a share of the waiting time: their part of the CPU time
  that all processes but the training used, and at most the CPU time that they used. So trials
  beside each other and their driver flag nothing, and neither does a process that has a core to
  itself.
* *Device*: another process computes on the GPU, or the GPU throttles because of heat or its power
  supply. Throttling to stay within the power limit is the usual state of a busy GPU, and flags
  nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

MAX_STOPPED_SECONDS = 0.5
MAX_WAITED_FRACTION = 0.1
_FEWEST_WAITED_SECONDS = 0.05
"""Waiting time that is never flagged: the kernel counts CPU time in hundredths of a second, too
coarse to tell less than this."""

MAX_RETAKES = 2
"""Maximum number of times that a training is repeated because of contention; after that its time
is kept, and marked."""


@dataclass(frozen=True, kw_only=True)
class Contention:
    """What else used a machine during a training."""

    seconds: float
    """Wall seconds that were observed."""
    stopped_seconds: float
    """Seconds in which the process neither ran nor waited for a CPU."""
    waited_seconds: float
    """Seconds that the longest-waiting thread of those that train waited for a CPU; 0 if the kernel
    does not say."""
    others_cpu_seconds: float
    """CPU seconds, over all cores, that processes outside the study used meanwhile."""
    study_cpu_seconds: float
    """CPU seconds that the study's processes on this machine, but for the one that waited, used
    meanwhile: the driver, other trials, other processes of a command."""
    device: str | None = None
    """What disturbed the GPU; None if nothing did, or if that is not known."""

    def __add__(self, other: "Contention") -> "Contention":
        """Contention over two stretches of one training together."""
        sums = {
            name: value + getattr(other, name)
            for name, value in asdict(self).items()
            if name != "device"
        }
        return Contention(**sums, device=self.device or other.device)

    @property
    def waited_for_others_seconds(self) -> float:
        """Seconds of ``waited_seconds`` that processes outside the study are charged with."""
        others, study = self.others_cpu_seconds, self.study_cpu_seconds
        if others <= 0:
            return 0.0
        return min(self.waited_seconds * others / (others + study), others)

    @property
    def reason(self) -> str | None:
        """Why the training's time cannot be trusted, in one line; None if it can."""
        if self.stopped_seconds >= MAX_STOPPED_SECONDS:
            return (
                f"its process was stopped for {self.stopped_seconds:.1f} s of {self.seconds:.1f} s"
            )
        waited = self.waited_for_others_seconds
        if waited > max(_FEWEST_WAITED_SECONDS, MAX_WAITED_FRACTION * self.seconds):
            return (
                f"it waited {waited:.2f} s of {self.seconds:.2f} s for a CPU while other programs"
                f" used {self.others_cpu_seconds / max(self.seconds, 1e-9):.1f} CPUs"
            )
        return self.device

    @classmethod
    def of_ranks(cls, ranks: Iterable[Self]) -> Self:
        """The contention of a training of several processes: that of the one that was disturbed
        most, for which all others waited.
        """
        return max(ranks, key=lambda each: (each.reason is not None, each.stopped_seconds))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restore a record from the mapping that ``dataclasses.asdict`` made of it."""
        return cls(
            **{field.name: values[field.name] for field in fields(cls) if field.name in values}
        )
