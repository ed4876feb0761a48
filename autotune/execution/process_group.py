"""The processes of a worker, one for each rank of the trainings that it runs one after another.

The first rank's process yields the evaluations, the others follow it. All are started by launchers:
by that of this machine, or, for ranks whose resources Ray reserved elsewhere, by one there. Between
trainings of the same size they stay, with their data loaded; one that was lost, ran out of memory
or ran faulty code is replaced, and so are all where a training is a function of the user's, which
may leave anything behind in its process.

While the first rank trains, its worker watches the others: if one vanishes without a message (its
machine was cut off), the training would otherwise wait for it until the trial's deadline.
"""

import contextlib
import logging
import os
import platform
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from autotune.errors import DataError
from autotune.execution.launcher import Launcher, TrainingProcess
from autotune.execution.task import (
    ProcessExited,
    RankPlace,
    TrialTask,
    WorkerReport,
    report_of_end,
)
from autotune.failure import FailureKind
from autotune.training.capabilities import visible_devices, visible_devices_environment

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Seconds between two looks at the other ranks and for an interrupt while the first one trains."""
_END_SECONDS = 10.0
"""Seconds that ranks may take to end a training together; longer than leaving the process group."""
_USER_END_SECONDS = 2.0
"""Seconds that the other ranks of a user's function may take to end after the first one."""
_CLEAN_UP_SECONDS = 70.0
"""Seconds that a training of one process may take to end: a user's function may clean up."""
_EXPLAIN_SECONDS = 5.0
"""Seconds that a rank may take to report an error after another one met one."""


class ProcessGroup:
    """The processes of a worker, one for each rank.

    Args:
        launcher: address of a launcher on this machine; None for one of this worker's own.
        host: this machine's address, by which other ranks reach the first one.
        start_elsewhere: starts the process of a rank other than the first, given the task, with
            resources that Ray reserved for it; None if all are started here.
    """

    def __init__(
        self,
        *,
        launcher: str | None = None,
        host: str = "127.0.0.1",
        start_elsewhere: Callable[[TrialTask, int], TrainingProcess] | None = None,
    ) -> None:
        self._host = host
        self._start_elsewhere = start_elsewhere
        self._address = launcher
        self._launcher: Launcher | None = None
        """This worker's own launcher, where no address is given."""
        self._processes: list[TrainingProcess] = []
        """The process of each rank."""
        self._failures: dict[int, WorkerReport | None] = {}
        """The failures of the ranks, other than the first, that have ended; None of one that has
        ended without."""
        self._names: list[str] = []
        """Host and GPUs of each rank, in words."""
        self._task: TrialTask | None = None
        """The task that is being trained."""
        self._began_at = self._reported_at = 0.0
        """Unix times of the training's start, and of its last report or else its start."""

    def begin(self, task: TrialTask) -> None:
        """Begin a training in processes that are ready for it."""
        if task.needs_fresh_processes or task.num_workers != len(self._processes):
            self._end_processes()
        while len(self._processes) < task.num_workers:
            self._processes.append(self._started(task, len(self._processes)))
        self._task, self._failures = task, {}
        self._began_at = self._reported_at = time.time()
        self._names = self._device_names(task)
        first = self._processes[0]
        places = self._places(task)
        task = replace(task, hosts=[process.host or self._host for process in self._processes])
        first.send("begin", task, self._host, places[0])
        port = first.receive()
        if isinstance(port, ProcessExited):  # which the next report says; no other rank was asked
            self._failures = dict.fromkeys(range(1, task.num_workers))
            return
        for rank, process in enumerate(self._processes[1:], start=1):
            process.send("follow", task, self._host, port, rank, places[rank])

    def next_report(
        self, is_interrupted: Callable[[], bool] = lambda: False
    ) -> WorkerReport | None:
        """Train to the next evaluation or to the training's end; None once it is interrupted.

        An error is reported as that of the rank that met it first. The training has ended, and its
        resources are free, when its outcome is reported.
        """
        assert self._task is not None, "it was begun"
        first, report, self._reported_at = self._processes[0], None, time.time()
        first.send("next_report")
        while report is None and not first.poll(POLL_SECONDS):
            if is_interrupted():
                return None
            report = self._failure_in_vain()
        report = self._explained(first.receive() if report is None else report)
        if report.outcome is None and (failure := self._first_failure(0.0)) is not None:
            self._end_processes()
            report = failure
        if report.outcome is not None:
            needs_fresh = self._task.needs_fresh_processes
            self.end()
            if report.outcome.traits.needs_new_worker or needs_fresh:
                self._end_processes()
        return replace(report, devices=self._names)

    def _failure_in_vain(self) -> WorkerReport | None:
        """The failure of another rank for which the first one, which is asked, waits in vain."""
        failure = self._first_failure(0.0)
        if failure is None or self._processes[0].poll(_EXPLAIN_SECONDS):
            return None
        self._end_processes()  # nothing else ends the first rank
        return failure

    def _explained(self, answer: WorkerReport | ProcessExited) -> WorkerReport:
        """The report of the first rank, or of the one that met an error first."""
        if isinstance(answer, ProcessExited):
            answer = self._report_of_end(answer)
        answer = answer.with_failure(device=self._names[0])
        if (failure := answer.failure) is None:
            return answer
        if failure.kind in (FailureKind.USER_CODE, FailureKind.LOST, FailureKind.MACHINE):
            other = self._first_failure(_EXPLAIN_SECONDS)
            if other is not None and _distance_to_cause(other) <= min(
                1, _distance_to_cause(answer)
            ):
                return other
        self._first_failure(0.0)
        ended = [rank for rank, other in self._failures.items() if other is None]
        if ended and failure.kind is FailureKind.DEADLINE:
            return answer.with_failure(message=f"rank {ended[0]} has returned; {failure.message}")
        if ended and failure.is_consequence:  # of a rank that the code itself has ended
            said = f"rank {ended[0]} has returned; {failure.message}"
            return WorkerReport.of(
                replace(failure, kind=FailureKind.USER_CODE, message=said, is_consequence=False)
            )
        return answer

    def _report_of_end(self, exited: ProcessExited, rank: int | None = None) -> WorkerReport:
        assert self._task is not None, "it was begun"
        return report_of_end(
            self._task,
            seconds=time.time() - self._reported_at,
            reason=exited.reason if rank is None else f"rank {rank}: {exited.reason}",
            kind=exited.kind,
            is_out_of_budget=time.time() - self._began_at >= self._task.budget_seconds,
        )

    def train(
        self, task: TrialTask, is_interrupted: Callable[[], bool] = lambda: False
    ) -> Generator[WorkerReport, None, None]:
        """Run a training in new processes and yield its reports, fewer once it is interrupted.

        The processes are gone when the last report comes.
        """
        self._end_processes()
        try:
            self.begin(task)
            report = self.next_report(is_interrupted)
            while report is not None and report.outcome is None:
                yield report
                report = self.next_report(is_interrupted)
        finally:
            self._end_processes()
        if report is not None:
            yield report

    def keep(self) -> str | None:
        """Write the training's state to the task's state folder, for another process to continue
        from.

        Returns:
            Why it could not be written, in which case the training may continue here; None if it
            was.

        Raises:
            DataError: it could not, and the training has ended, such as with one of its ranks.
        """
        first, failure, self._reported_at = self._processes[0], None, time.time()
        first.send("keep")
        while failure is None and not first.poll(POLL_SECONDS):
            failure = self._failure_in_vain()
        answer: str | ProcessExited | WorkerReport | None = failure or first.receive()
        if isinstance(answer, ProcessExited):
            answer = self._report_of_end(answer)
        if isinstance(answer, WorkerReport):
            self._end_processes()
            raise DataError(f"checkpoint: cannot be written: {answer.error}")
        return answer

    def end(self) -> None:
        """End the training where it stands, in all ranks; if one does not end, all are killed."""
        if (task := self._task) is not None and self._processes:
            self._end_training(task)
        self._task = None

    def _end_training(self, task: TrialTask) -> None:
        first, has_failed = self._processes[0], self._first_failure(0.0) is not None
        if not has_failed:  # else the first rank would wait for the one that has
            first.send("close")
            if first.poll(_CLEAN_UP_SECONDS if task.num_workers == 1 else _END_SECONDS):
                with contextlib.suppress(Exception):  # what the training raises at its end
                    first.receive()
                # a user's processes train nothing else
                seconds = _END_SECONDS if task.config.training is None else _USER_END_SECONDS
                has_failed = self._first_failure(seconds) is not None or first.is_gone
            else:
                logger.warning("a training did not end, so its process was killed")
                has_failed = True
        if has_failed or len(self._failures) < task.num_workers - 1:
            self._end_processes()

    def close(self) -> None:
        """End the training, the processes, and the launcher if it is this worker's own."""
        self.end()
        self._end_processes()
        if self._launcher is not None:
            self._launcher.close()

    def _first_failure(self, seconds: float) -> WorkerReport | None:
        """The failure that ended a rank other than the first within so many seconds, the one that
        is no mere consequence of another's end if there is one.
        """
        until = time.monotonic() + seconds
        for rank, process in enumerate(self._processes[1:], start=1):
            if rank not in self._failures and process.poll(max(0.0, until - time.monotonic())):
                answer = process.receive()
                if isinstance(answer, ProcessExited):
                    answer = self._report_of_end(answer, rank)
                assert answer is None or isinstance(answer, WorkerReport)
                self._failures[rank] = answer and answer.with_failure(device=self._names[rank])
        known = [failure for failure in self._failures.values() if failure is not None]
        return min(known, key=_distance_to_cause, default=None)

    def _places(self, task: TrialTask) -> list[RankPlace]:
        """Where each rank of a training is among those on its machine."""
        hosts = [process.host or self._host for process in self._processes]
        devices = [process.devices for process in self._processes]
        if self._start_elsewhere is not None and task.num_gpus:
            devices[0] = visible_devices(task.num_gpus // task.num_workers)
        return [
            RankPlace(
                local_rank=hosts[:rank].count(host),
                local_size=hosts.count(host),
                machine=len(set(hosts[: hosts.index(host)])),
                devices=[
                    device
                    for there, of_rank in zip(hosts, devices, strict=True)
                    for device in of_rank
                    if there == host
                ],
            )
            for rank, host in enumerate(hosts)
        ]

    def _device_names(self, task: TrialTask) -> list[str]:
        """Host and GPUs of each rank, in words: the same for the same device in each trial."""
        num_gpus = task.num_gpus // task.num_workers
        here = visible_devices(task.num_gpus)
        names = []
        for rank, process in enumerate(self._processes):
            is_elsewhere = self._start_elsewhere is not None
            first = 0 if is_elsewhere else rank * num_gpus
            gpus = process.devices or here[first : first + num_gpus]
            host = (process.host or self._host) if is_elsewhere else platform.node()
            names.append(f"GPU {','.join(gpus)} of {host}" if num_gpus else host)
        return names

    def _started(self, task: TrialTask, rank: int) -> TrainingProcess:
        if rank > 0 and self._start_elsewhere is not None:
            return self._start_elsewhere(task, rank)
        if self._address is None:
            self._launcher = Launcher()
            self._address = self._launcher.address
        return TrainingProcess(self._address, rank_environment(task, rank))

    def _end_processes(self) -> None:
        with ThreadPoolExecutor() as threads:  # each may clean up
            list(threads.map(lambda process: process.close(), self._processes))
        self._processes.clear()


def _distance_to_cause(report: WorkerReport) -> int:
    """How improbable it is that a rank's failure is that of the training: where one is gone,
    others lose their connection, or abort.
    """
    assert report.failure is not None, "it failed"
    if report.failure.is_consequence:
        return 2
    return int(report.failure.kind in (FailureKind.USER_CODE, FailureKind.CONFIGURATION))


def rank_environment(task: TrialTask, rank: int) -> dict[str, str]:
    """Environment variables as Ray sets them for an actor of a rank's size: its part of the first
    GPUs that this process sees, in a Ray worker those that Ray gave it, and as many OpenMP threads
    as CPUs.
    """
    num_cpus = task.num_cpus // task.num_workers
    num_threads = os.environ.get("OMP_NUM_THREADS", str(num_cpus))
    if task.num_workers > 1 and num_threads.isdigit():  # Ray sets those of all ranks together
        num_threads = str(min(int(num_threads), num_cpus))
    environment = {"OMP_NUM_THREADS": num_threads}
    if not task.num_gpus:
        return environment
    gpus = visible_devices(task.num_gpus)
    if task.config.training is None:  # a user's ranks see all, and LOCAL_RANK says which is theirs
        each = task.num_gpus // task.num_workers
        gpus = gpus[rank * each : (rank + 1) * each]
    return environment | visible_devices_environment(gpus)
