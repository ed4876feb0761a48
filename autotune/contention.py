"""What else wanted a machine while a training was timed, and from what on its time says little about the configuration.

The numbers are the operating system's own (``execution/watch.py`` takes them); what they mean is decided here, by thresholds:

* *Stopped*: in half a second or more the process did not run at all and was not waiting to (SIGSTOP, a frozen container, a machine
  that was itself paused). Its clocks went on meanwhile.
* *Waited*: for more than a tenth of its time the training waited for a CPU because of processes that are not the study's. Of all the time
  that it waited, theirs is the share that they had of the CPU time which others than the training used, and no more than they ran at
  all: so trials beside each other and their driver flag nothing, and neither does a process that has a core for itself.
* *Device*: another process computes on the GPU, or the GPU has slowed itself down because of heat or its power supply. That it keeps within
  its power limit is the usual state of a busy GPU, and flags nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

MOST_STOPPED_SECONDS = 0.5
MOST_WAITED_FRACTION = 0.1
_FEWEST_WAITED_SECONDS = 0.05
"""Less is within what the kernel's own counting of CPU time, in hundredths of a second, can tell."""

MOST_RETAKES = 2
"""Times that a training is taken again because of what else wanted the machine; then it is kept, and marked."""


@dataclass(frozen=True, kw_only=True)
class Contention:
    """What else wanted a machine while a training was under way."""

    seconds: float
    """Wall seconds that were looked at."""
    stopped_seconds: float
    """In which the process did not run and was not waiting to."""
    waited_seconds: float
    """In which the thread that waited longest waited for a CPU; 0 where the kernel does not say."""
    others_cpu_seconds: float
    """CPU time meanwhile, over all cores, of processes that are not the study's."""
    study_cpu_seconds: float
    """CPU time meanwhile of the study's other processes on this machine: the driver, other trials."""
    device: str | None = None
    """What was wrong with the GPU; None where nothing was, or it is not known."""

    def __add__(self, other: "Contention") -> "Contention":
        """Of two stretches of one training."""
        sums = {name: value + getattr(other, name) for name, value in asdict(self).items() if name != "device"}
        return Contention(**sums, device=self.device or other.device)

    @property
    def waited_for_others_seconds(self) -> float:
        """Of the time waited for a CPU, what processes that are not the study's are to blame for."""
        others, study = self.others_cpu_seconds, self.study_cpu_seconds
        if others <= 0:
            return 0.0
        return min(self.waited_seconds * others / (others + study), others)

    @property
    def reason(self) -> str | None:
        """Why the training's time says little about its configuration, in one line; None where it is to be trusted."""
        if self.stopped_seconds >= MOST_STOPPED_SECONDS:
            return f"its process was stopped for {self.stopped_seconds:.1f} s of {self.seconds:.1f} s"
        waited = self.waited_for_others_seconds
        if waited > max(_FEWEST_WAITED_SECONDS, MOST_WAITED_FRACTION * self.seconds):
            return (
                f"it waited {waited:.2f} s of {self.seconds:.2f} s for a CPU while other programs used "
                f"{self.others_cpu_seconds / max(self.seconds, 1e-9):.1f} CPUs"
            )
        return self.device

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The record that ``dataclasses.asdict`` wrote."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
