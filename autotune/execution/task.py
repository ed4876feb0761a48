"""A training as data: the task that a worker is given, the reports that it makes, and what it says
when a process ended without a report.

A process that is killed from outside says nothing of the configuration, unless the machine's memory
had run out: then the same configuration may do it again, or it was another program's fault. So it
is tried once more, and only then counts as too large.

Nothing here needs Ray or torch.
"""

import contextlib
import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from autotune.config.schema import TrialConfig
from autotune.contention import Contention
from autotune.execution.trial_folder import last_printed
from autotune.failure import Failure, FailureKind, kind_of_exit
from autotune.measurement import Evaluation
from autotune.outcome import Outcome

logger = logging.getLogger(__name__)

HANG_FILES = "hang-*.txt"
"""Pattern of the files that watchdogs write stack traces to, ``*`` being the run's name; deleted
when the run ends."""
NOT_ENDED = "not ended at its deadline"
"""How it is told that another process ended one that hung."""
WORKER_ENDED = "; the worker was ended"
"""What follows after what is told of a limit."""
LOW_ON_MEMORY = ", while this machine was low on memory"
"""How it is told that the kernel killed a process for memory meanwhile."""


ACCELERATOR = "accelerator_type:"
"""Prefix of the name of the custom resource that Ray gives a machine for its kind of GPU."""


@dataclass(frozen=True, kw_only=True)
class TrialTask:
    """Everything that a worker needs to run one training."""

    name: str
    """Name of the run, such as ``trial-7``."""
    number: int | None = None
    """Number of the trial whose configuration is trained; None outside a study."""
    config: TrialConfig
    cap_seconds: float
    num_threads: int
    deadline_seconds: float
    """Wall seconds after its last report, or saved state, after which the process ends itself: a
    hung trial cannot be asked to stop."""
    is_deadline_fixed: bool = False
    """Whether the deadline stays what it is, whatever time passed between two reports so far."""
    budget_seconds: float = math.inf
    """Wall seconds from its start after which the process ends itself in any case."""
    code_folders: tuple[str, ...]
    """Folders that may hold Python modules of the user's own."""
    working_folder: str
    """The driver's working folder: relative paths in a configuration start there if the worker's
    machine has that folder."""
    hang_folder: str
    """Folder where a hung process leaves its stack traces, if the worker's machine has that
    folder."""
    num_cpus: int
    """Number of CPUs of all workers together."""
    num_gpus: int
    """Number of GPUs of all workers together."""
    trials_per_gpu: int = 1
    """Number of trainings that may share each of these GPUs."""
    logs_folder: str | None = None
    """Folder whose folder of the run's name gets what the training's own code logs to MLflow;
    None if it logs where it says."""
    compiled_folder: str | None = None
    """Folder for compiled code in place of the machine's own, if the worker's machine has it."""
    is_fresh: bool = False
    """Whether processes that have never trained make the run, and end with it."""
    score_test: bool = False
    weights_path: str | None = None
    """File for the weights at the end, if the worker's machine has its folder; a training
    function of the user's writes those it saved."""
    state_folder: str | None = None
    """Folder for the training's states, if the worker's machine has the folder above it; None for
    a training that is not saved."""
    hosts: Sequence[str] = ()
    """Addresses of the machines of its ranks, as Ray has them."""
    checkpoint_seconds: float = math.inf
    """Least seconds between two states that are saved without being asked for."""
    is_resumed: bool = False
    """Whether the training was begun before: it then continues from its last state, if it has one,
    and in its folder."""
    placement: str = "PACK"
    """Ray's placement strategy for the workers: how they are distributed over machines."""
    accelerator_type: str | None = None
    """Ray's accelerator type of the GPUs that each worker's machine must have; None for any
    machine."""
    launcher: str | None = None
    """Address of the driver's launcher, if all trainings run on its machine."""
    niceness: int = field(default_factory=lambda: os.getpriority(os.PRIO_PROCESS, 0))
    """The driver's niceness, which workers take if permitted; on a cluster that was joined they
    start with Ray's, usually 15."""
    driver: tuple[str, int] = field(default_factory=lambda: (platform.node(), os.getpid()))
    """Host and process id of the driver: processes that the driver has started belong to the
    study and are no contention."""

    @property
    def num_workers(self) -> int:
        """Number of processes that train together."""
        return self.config.num_processes

    @property
    def needs_fresh_processes(self) -> bool:
        """Whether no process may have trained before: a user's function may leave anything behind
        in its process.
        """
        return self.is_fresh or self.config.training is not None


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank of a training is among those on its machine."""

    local_rank: int = 0
    local_size: int = 1
    machine: int = 0
    """Number of its machine among the training's."""
    devices: Sequence[str] = ()
    """Ids of the GPUs of all of these; empty if the process sees them already."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A worker's report: an evaluation, the end of the training, or both."""

    evaluation: Evaluation | None
    outcome: Outcome | None
    """How the training ended; None in every report before the last."""
    failure: Failure | None = None
    """Why the training failed; None where it did not."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """What the numbers depend on, such as versions and device; empty except in the first report
    with an evaluation."""
    test_metric: float | None = None
    can_pause: bool = False
    """Whether the training's state can be saved now, to continue later."""
    is_saved: bool = False
    """Whether the training was saved at this report."""
    unsaved: str | None = None
    """Why the training, which was to be paused, could not be saved before this report; None if
    that was not tried."""
    earlier: Mapping[int, Evaluation] | None = None
    """In the first report of a process, the evaluations by number that were made before the state
    which the training continued from, none if it began; None in later reports, and where the
    process failed before its first evaluation."""
    checkpoint_seconds: float = 0.0
    """Seconds that this process has spent on saving so far, which its clock does not count."""
    contention: Contention | None = None
    """What else used the machine so far, as the training's first worker measured it; None before
    its first measurement."""
    devices: Sequence[str] = ()
    """Host and GPUs of each of the training's ranks, in words."""
    is_data_missing: bool = False
    """Whether the error is that this machine cannot read the data set: then every other
    configuration would fail as well."""

    @classmethod
    def of(cls, failure: Failure, *, is_data_missing: bool = False) -> Self:
        """The last report of a training that failed."""
        return cls(
            evaluation=None,
            outcome=Outcome.of(failure.kind),
            failure=failure,
            is_data_missing=is_data_missing,
        )

    def with_failure(self, **changes: Any) -> Self:
        """The same report with changes of its failure; as it is without one."""
        if self.failure is None:
            return self
        return replace(self, failure=replace(self.failure, **changes))

    @property
    def error(self) -> str | None:
        """Why the training failed, in words; None where it did not."""
        return None if self.failure is None else self.failure.message

    @property
    def is_tried_twice(self) -> bool:
        """Whether the point is tried once more before the outcome holds."""
        return self.failure is not None and self.failure.is_tried_twice


@dataclass(frozen=True, kw_only=True)
class ProcessExited:
    """The answer in place of that of a process which has ended meanwhile."""

    reason: str
    """How the process ended, in words."""
    exit_code: int | None = None
    """Its exit code, or the negative number of the signal that ended it; None if its launcher is
    gone, too, which would tell."""
    is_for_memory: bool = False
    """Whether the kernel killed processes for memory meanwhile, probably this one."""

    @property
    def kind(self) -> FailureKind:
        """Whose fault it is that the process ended."""
        return FailureKind.MEMORY if self.is_for_memory else kind_of_exit(self.exit_code)


def report_of_end(
    task: TrialTask,
    *,
    seconds: float,
    reason: str,
    kind: FailureKind,
    is_out_of_budget: bool = False,
) -> WorkerReport:
    """The report in place of the one that a training's process did not make before it ended.

    The run's hang file is deleted.

    Args:
        task: the training's task.
        seconds: seconds from the training's last report, or else its start, to its process's end.
        reason: how the process ended, as its launcher or Ray tells.
        kind: whose fault that is, if it was not ended at its deadline.
        is_out_of_budget: whether the time budget that the training had was spent.
    """
    hang_file, traces = hang_path(task.name, task.hang_folder), ""
    # there is no hang file, such as from the watchdog of another machine
    with contextlib.suppress(OSError):
        traces = hang_file.read_text(encoding="utf-8")
        hang_file.unlink()
    is_over = is_out_of_budget or seconds >= task.deadline_seconds
    if traces or (is_over and kind is FailureKind.USER_CODE):
        allowed = f"search.trial_deadline_seconds allows {task.deadline_seconds:.0f} s"
        if not task.is_deadline_fixed:
            allowed += ", or ten times the longest time between two reports"
        heard = f"nothing was heard of it for {seconds:.0f} s, and {allowed}"
        reason, kind = f"{NOT_ENDED}: {heard}{WORKER_ENDED}", FailureKind.DEADLINE
    printed, output = "", None
    if task.config.training is not None:
        printed, output = last_printed(Path(task.hang_folder), task.name)
    message = "; ".join(filter(None, [reason, printed]))
    return WorkerReport.of(
        Failure(
            kind=kind,
            message=f"{message}\n{traces}".rstrip() if traces else message,
            output_path=output,
            # another program may have taken the memory
            is_tried_twice=kind is FailureKind.MEMORY,
        )
    )


def hang_path(run: str, folder: str) -> Path:
    """The file for the stack traces of a run that hangs."""
    return Path(folder) / HANG_FILES.replace("*", run)


def num_killed_for_memory() -> int:
    """Number of processes that this machine's kernel has killed for memory, in all control groups;
    0 if it does not tell.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="utf-8").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def warn_of_worker(report: WorkerReport) -> None:
    """Log, once each, what is told of how a worker uses its devices, and of what it cannot tell."""
    for line in report.fingerprint.get("warnings", ()):
        warn_once(line)
    for brake in report.contention.brakes if report.contention else ():
        warn_once(f"{brake}: this is what that machine is, and its times count")


@cache
def warn_once(line: str) -> None:
    """Log a warning, unless this process has logged it before."""
    logger.warning("%s", line)
