"""Contention: what else used the machine while a training was timed, and when that spoils the
training's time.

The operating system gives the numbers (``execution/watchdog.py`` reads them); the thresholds here
say what they mean. Each is a share of the training's time, so that a trifle spoils no training of
hours:

* *Stopped*: for 2% of its time, and at least half a second, the process neither ran nor waited for
  a CPU (SIGSTOP, a frozen container, a suspended machine), while its clocks went on.
* *Waited*: for more than a tenth of its time the training waited for a CPU because of processes
  outside the study. They are charged with a share of the waiting time: their part of the CPU time
  that all processes but the training used, and at most the CPU time that they used. So trials
  beside each other and their driver flag nothing, and neither does a process that has a core to
  itself.
* *Shared*: for 2% of its time processes outside the study computed on its GPU.

A GPU that slows down because of heat or its power supply is what that machine is: this is told once
for each GPU, and flags nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

MAX_STOPPED_SECONDS = 0.5
"""Stopped time that is flagged in a short training; less than this is not seen."""
MAX_DISTURBED_FRACTION = 0.02
"""Share of a training's time that it may be stopped, or share its GPU. Times of one configuration
differ by 5% and more between seeds, so less decides nothing."""
MAX_WAITED_FRACTION = 0.1
_FEWEST_WAITED_SECONDS = 0.05
"""Waiting time that is never flagged: the kernel counts CPU time in hundredths of a second, too
coarse to tell less than this."""

MAX_RETAKEN_SECONDS = 300.0
"""Train seconds from which on a training is marked at once, and never repeated: of a time that is a
few per cent too long, most is still known, and each repeat costs as much again."""


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
    shared_seconds: float = 0.0
    """Seconds for which processes outside the study computed on the GPU, as looks at it saw: each
    stands for the time since the look before."""
    brakes: tuple[str, ...] = ()
    """GPUs that were seen to be slowed down by heat or their power supply, and by which of them, in
    words. They are told, and are no contention."""

    def __add__(self, other: "Contention") -> "Contention":
        """Contention over two stretches of one training together."""
        sums = {
            name: value + getattr(other, name)
            for name, value in asdict(self).items()
            if name != "brakes"
        }
        return Contention(**sums, brakes=_brakes_of((self, other)))

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
        excess, text = self.worst
        return text if excess >= 1 else None

    @property
    def worst(self) -> tuple[float, str]:
        """What disturbed the training most: how many times as much as it may, and in words."""
        seconds, waited = max(self.seconds, 1e-9), self.waited_for_others_seconds
        disturbed = MAX_DISTURBED_FRACTION * seconds
        return max(
            (
                self.stopped_seconds / max(MAX_STOPPED_SECONDS, disturbed),
                f"its process was stopped for {self.stopped_seconds:.1f} s of {seconds:.1f} s",
            ),
            (
                waited / max(_FEWEST_WAITED_SECONDS, MAX_WAITED_FRACTION * seconds),
                f"it waited {waited:.2f} s of {seconds:.2f} s for a CPU while other programs used"
                f" {self.others_cpu_seconds / seconds:.1f} CPUs",
            ),
            (
                self.shared_seconds / disturbed,
                f"other programs computed on its GPU for {self.shared_seconds:.1f} s of"
                f" {seconds:.1f} s",
            ),
        )

    @classmethod
    def of_ranks(cls, ranks: Iterable[Self]) -> Self:
        """The contention of a training of several processes: that of the one that was disturbed
        most, for which all others waited. It has the brakes of all.
        """
        all_ranks = [*ranks]
        return replace(max(all_ranks, key=lambda rank: rank.worst), brakes=_brakes_of(all_ranks))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restore a record from the mapping that ``dataclasses.asdict`` made of it, also after a
        pass through JSON.
        """
        return cls(**{**values, "brakes": tuple(values["brakes"])})


def _brakes_of(contentions: Iterable[Contention]) -> tuple[str, ...]:
    return tuple(sorted({brake for each in contentions for brake in each.brakes}))
