"""How a trial ends, and what each ending means to everyone: one table, which samplers, storage, trackers, terminal and figures ask."""

from enum import Enum, StrEnum
from typing import NamedTuple, Self


class Ending(Enum):
    """What an outcome says of the configuration that was trained."""

    REACHED = "reached"
    """Its time to target was measured."""
    CENSORED = "censored"
    """The time that was measured is only a lower bound of its time to target."""
    INFEASIBLE = "infeasible"
    """It cannot be trained, however long."""
    VOID = "void"
    """Nothing: something else went wrong."""


class OutcomeTraits(NamedTuple):
    """A row of the table of outcomes."""

    ending: Ending
    optuna_state: str
    """Name of the trial's ``optuna.trial.TrialState``."""
    mlflow_status: str
    """Status of the trial's run in MLflow: only FINISHED carries a time to target."""
    terminal_style: str
    """Style of the outcome's name in the terminal, in rich's words."""
    colour: str
    """Colour of the trial's mark in figures. The eight stay apart under the common colour-vision deficiencies; greys stand for no colour.

    Source: Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color); a grey stands for its yellow, too faint on white.
    """
    marker: str
    """Marker of matplotlib's; for a censored outcome the shape that an arrow leaves (``autotune.report.drawing``)."""
    size: float
    """Size of the mark, in points."""
    needs_new_worker: bool = False
    """Whether the process that ran the trial must not run another one."""


class Outcome(StrEnum):
    """How a trial ended."""

    traits: OutcomeTraits

    def __new__(cls, name: str, traits: OutcomeTraits) -> Self:
        """A member whose value is its name, with its row of the table."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.traits = traits
        return member

    REACHED = "REACHED", OutcomeTraits(Ending.REACHED, "COMPLETE", "FINISHED", "green", "#009E73", "o", 7)
    """An evaluation was at or past the target."""
    MISSED = "MISSED", OutcomeTraits(Ending.CENSORED, "PRUNED", "KILLED", "yellow", "#E69F00", "diamond", 20)
    """Trained to the end of its own schedule without reaching the target."""
    CAPPED = "CAPPED", OutcomeTraits(Ending.CENSORED, "PRUNED", "KILLED", "blue", "#0072B2", "circle", 20)
    """Stopped because its clock had passed what the incumbent is expected to need."""
    STOPPED = "STOPPED", OutcomeTraits(Ending.CENSORED, "PRUNED", "KILLED", "cyan", "#56B4E9", "square", 20)
    """Stopped by a stopping rule, or because the study's budget ended."""
    TIMED_OUT = "TIMED_OUT", OutcomeTraits(Ending.CENSORED, "PRUNED", "KILLED", "magenta", "#CC79A7", "triangle", 20)
    """Passed the target's max_train_seconds, or hung past its hard deadline."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY", OutcomeTraits(Ending.INFEASIBLE, "PRUNED", "FAILED", "red", "#000000", "s", 6, needs_new_worker=True)
    """The device, or the machine, had not enough memory for the training."""
    DIVERGED = "DIVERGED", OutcomeTraits(Ending.INFEASIBLE, "PRUNED", "FAILED", "red", "#D55E00", "X", 7.5)
    """The loss or the metric was no longer finite."""
    INVALID = "INVALID", OutcomeTraits(Ending.INFEASIBLE, "PRUNED", "FAILED", "red", "#7F7F7F", "v", 7)
    """A component refused the configuration's values, so nothing was trained."""
    CONTENDED = "CONTENDED", OutcomeTraits(Ending.VOID, "FAIL", "KILLED", "yellow", "#888888", "1", 7)
    """Something else wanted the machine too much for its time to say anything; the same configuration is trained again."""
    LOST = "LOST", OutcomeTraits(Ending.VOID, "FAIL", "KILLED", "red", "#888888", "x", 7, needs_new_worker=True)
    """A worker was lost with its machine, which says nothing about the configuration."""
    ERRORED = "ERRORED", OutcomeTraits(Ending.VOID, "FAIL", "FAILED", "bold red", "#888888", "P", 7.5, needs_new_worker=True)
    """A fault in the code that was trained, or a worker that died."""

    @property
    def is_censored(self) -> bool:
        """Whether the trial's time is only a lower bound of its time to target."""
        return self.traits.ending is Ending.CENSORED

    @property
    def is_infeasible(self) -> bool:
        """Whether the configuration itself cannot be trained, however long."""
        return self.traits.ending is Ending.INFEASIBLE

    @property
    def is_timed(self) -> bool:
        """Whether a training ends so because of the time that it took, or with it as its result."""
        return self.traits.ending in (Ending.REACHED, Ending.CENSORED)

    @property
    def needs_new_worker(self) -> bool:
        """Whether the process that ran the trial must not run another one."""
        return self.traits.needs_new_worker
