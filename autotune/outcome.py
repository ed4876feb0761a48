"""How a trial ends, and what each outcome means to samplers, storage, trackers, terminal and
figures: one table for all of them.
"""

from enum import Enum, StrEnum
from typing import NamedTuple, Self

from autotune.failure import FailureKind


class Ending(Enum):
    """What an outcome says about the configuration that was trained."""

    REACHED = "reached"
    """The configuration's time to target was measured."""
    CENSORED = "censored"
    """The measured time is only a lower bound of the configuration's time to target."""
    INFEASIBLE = "infeasible"
    """The configuration cannot be trained, however long."""
    VOID = "void"
    """The outcome says nothing about the configuration: something else went wrong."""


class OutcomeTraits(NamedTuple):
    """What one outcome means: a row of the table of outcomes."""

    ending: Ending
    optuna_state: str
    """Name of the ``optuna.trial.TrialState`` with which the trial is told to Optuna."""
    mlflow_status: str
    """Status of the trial's run in MLflow: FINISHED unless it failed or was lost, since MLflow's
    pages mark KILLED as red as FAILED."""
    terminal_style: str
    """Rich style of the outcome's name in the terminal."""
    colour: str
    """Colour of the trial's marker in figures. The palette's eight colours can be told apart with
    the common colour-vision deficiencies.

    Source: Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color); a grey replaces its
    yellow, which is too faint on white, and a violet its black, which a dark page does not show."""
    symbol: str
    """Plotly's symbol of the trial's marker, hollow for a censored outcome."""
    meaning: str
    """What the outcome says of a trial, in a sentence for people."""
    needs_new_worker: bool = False
    """Whether the process that ran the trial must not run another one."""
    falls_short: bool = False
    """Whether the training itself, and no decision of the search, ended short of the target: the
    search counts it as a failed run of its configuration."""


class Outcome(StrEnum):
    """How a trial ended."""

    traits: OutcomeTraits

    def __new__(cls, name: str, traits: OutcomeTraits) -> Self:
        """Make a member whose value is its name, with its row of the table as ``traits``."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.traits = traits
        return member

    REACHED = (
        "REACHED",
        OutcomeTraits(
            Ending.REACHED,
            "COMPLETE",
            "FINISHED",
            "green",
            "#009E73",
            "circle",
            "An evaluation was at or past the target.",
        ),
    )
    MISSED = (
        "MISSED",
        OutcomeTraits(
            Ending.CENSORED,
            "PRUNED",
            "FINISHED",
            "yellow",
            "#E69F00",
            "diamond-open",
            "Trained to the end of the configuration's schedule without reaching the target.",
            falls_short=True,
        ),
    )
    CAPPED = (
        "CAPPED",
        OutcomeTraits(
            Ending.CENSORED,
            "PRUNED",
            "FINISHED",
            "blue",
            "#0072B2",
            "circle-open",
            "Stopped because the trial took longer than the incumbent is expected to need.",
        ),
    )
    STOPPED = (
        "STOPPED",
        OutcomeTraits(
            Ending.CENSORED,
            "PRUNED",
            "FINISHED",
            "cyan",
            "#56B4E9",
            "square-open",
            "Stopped by a stopping rule, or because the study's budget ended.",
        ),
    )
    TIMED_OUT = (
        "TIMED_OUT",
        OutcomeTraits(
            Ending.CENSORED,
            "PRUNED",
            "FINISHED",
            "magenta",
            "#CC79A7",
            "triangle-up-open",
            "Passed the target's max_train_seconds, or hung past its hard deadline.",
            falls_short=True,
        ),
    )
    OUT_OF_MEMORY = (
        "OUT_OF_MEMORY",
        OutcomeTraits(
            Ending.INFEASIBLE,
            "PRUNED",
            "FAILED",
            "red",
            "#8C6BB1",
            "square",
            "The device or the machine had too little memory for the training.",
            needs_new_worker=True,
            falls_short=True,
        ),
    )
    DIVERGED = (
        "DIVERGED",
        OutcomeTraits(
            Ending.INFEASIBLE,
            "PRUNED",
            "FAILED",
            "red",
            "#D55E00",
            "x",
            "The loss or the metric was no longer finite.",
            falls_short=True,
        ),
    )
    INVALID = (
        "INVALID",
        OutcomeTraits(
            Ending.INFEASIBLE,
            "PRUNED",
            "FAILED",
            "red",
            "#7F7F7F",
            "triangle-down",
            "A component refused the configuration's values, so nothing was trained.",
        ),
    )
    CONTENDED = (
        "CONTENDED",
        OutcomeTraits(
            Ending.VOID,
            "FAIL",
            "FINISHED",
            "yellow",
            "#888888",
            "y-down-open",
            "Other programs used the machine too much for the trial's time to be trusted; the same"
            " configuration is trained again.",
        ),
    )
    LOST = (
        "LOST",
        OutcomeTraits(
            Ending.VOID,
            "FAIL",
            "KILLED",
            "red",
            "#888888",
            "x-thin-open",
            "A worker was lost with its machine, killed from outside, or its device or disk failed,"
            " which says nothing of the configuration.",
            needs_new_worker=True,
        ),
    )
    ERRORED = (
        "ERRORED",
        OutcomeTraits(
            Ending.VOID,
            "FAIL",
            "FAILED",
            "bold red",
            "#888888",
            "cross",
            "A fault in the code that was trained, or a process that crashed.",
            needs_new_worker=True,
        ),
    )

    @classmethod
    def of(cls, kind: FailureKind) -> Self:
        """The outcome of a training that failed."""
        return cls[_OUTCOMES[kind]]

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
        """Whether the trial's time is a result: its time to target, or a lower bound of it."""
        return self.traits.ending in (Ending.REACHED, Ending.CENSORED)

    @property
    def falls_short(self) -> bool:
        """Whether the training itself, and no decision of the search, ended short of the target."""
        return self.traits.falls_short


_OUTCOMES = {
    FailureKind.CONFIGURATION: "INVALID",
    FailureKind.DIVERGED: "DIVERGED",
    FailureKind.TIMED_OUT: "TIMED_OUT",
    FailureKind.USER_CODE: "ERRORED",
    FailureKind.MEMORY: "OUT_OF_MEMORY",
    FailureKind.MACHINE: "LOST",
    FailureKind.DISK: "LOST",
    FailureKind.LOST: "LOST",
    FailureKind.DEADLINE: "TIMED_OUT",
}
