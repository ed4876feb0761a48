"""Runs of several configurations in turns, each in a fresh process: how confirmation and comparison
measure.

The runs of a round share a seed and follow each other directly, on one worker, so that disturbances
of the machine affect them alike. Where each has a GPU of its own, rounds go side by side; those of
a round still share theirs. Trainings on the CPU always go one at a time. Which runs come next may
depend on the results of earlier runs, but not on which worker was faster.
"""

import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from autotune.errors import AutotuneError, ClusterError
from autotune.execution.cluster import ClusterSize
from autotune.execution.plan import TrainingPlan
from autotune.execution.task import TrialTask
from autotune.files import make_folder
from autotune.measurement import LearningCurve, TrialResult
from autotune.policy import Answer, Done, Policy, Resume, Run, Start, Wait
from autotune.tracking.writer import TrackerWriter
from autotune.training.capabilities import Capabilities


class Turns(Policy):
    """Plans runs in units, each of which one worker makes in turns.

    Args:
        batches: units of runs that may go side by side. The next batch is taken only after all
            runs of the last one have ended.
        on_end: keeps each run that has ended with its result, and returns its score, None unless
            it REACHED the target; an error that it raises ends all runs.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[Sequence[Run]]],
        on_end: Callable[[Run, TrialResult], float | None],
    ) -> None:
        self._batches, self._on_end = iter(batches), on_end
        self._units: deque[tuple[Run, ...]] = deque()
        """Units of the batch that wait for a worker."""
        self._at_work: dict[int, tuple[Run, ...]] = {}
        """What is left of the units that have one, by the number of the run that it makes."""
        self._lost: set[int] = set()
        self._num_lost: Counter[int] = Counter()
        """How often in a row each run was lost without progress."""
        self._num_retaken: Counter[int] = Counter()

    def suggest(self) -> Answer:
        """The unit that a free worker makes."""
        if not (self._units or self._at_work):
            self._units.extend(map(tuple, next(self._batches, ())))
        if not self._units:
            return Wait() if self._at_work else Done("budget")
        first, *following = unit = self._units.popleft()
        self._at_work[first.number] = unit
        kind = Resume if first.number in self._lost else Start
        self._lost.discard(first.number)
        return kind(first, tuple(following))

    def finish(self, result: TrialResult, curve: LearningCurve | None = None) -> float | None:
        """Keep the result of a run; the next one of its unit is at work then."""
        run, *following = self._at_work.pop(result.trial)
        if following:
            self._at_work[following[0].number] = tuple(following)
        try:
            return self._on_end(run, replace(result, trial=run.trial))
        except AutotuneError as error:
            self.error = error
            return None

    def lost(self, number: int, *, most: int, has_progressed: bool) -> bool:
        """Have a run continue, and the rest of its unit follow it."""
        num_lost = 1 if has_progressed else self._num_lost[number] + 1
        if num_lost > most:
            return False
        self._num_lost[number] = num_lost
        self._lost.add(number)
        self.interrupt(number)
        return True

    def retry(self, number: int, *, most: int) -> bool:
        """Have a run made again from its beginning, and the rest of its unit after it."""
        self._num_retaken[number] += 1
        if self._num_retaken[number] > most:
            return False
        run, *following = self._at_work.pop(number)
        self._units.appendleft((replace(run, may_have_begun=False), *following))
        return True

    def reject(self, number: int, reason: str) -> None:
        """End all runs: a configuration that was trained before, or checked, cannot be placed."""
        self.error = ClusterError(f"cluster: {self._at_work[number][0].name}: {reason}")

    def interrupt(self, number: int) -> None:
        """Take a unit back from its worker."""
        self._units.appendleft(self._at_work.pop(number))


def num_side_by_side(
    tasks: Sequence[TrialTask], capabilities: Capabilities, size: ClusterSize
) -> tuple[int, bool]:
    """How many of the given trainings go side by side: one if some train on the CPU, else as many
    as the GPUs hold of the largest.

    And whether times on different GPUs compare: all are of one kind.
    """
    largest = max(tasks, key=attrgetter("num_gpus"))
    number = size.num_side_by_side(largest) if all(task.num_gpus for task in tasks) else 1
    return number, largest.accelerator_type is not None or len(capabilities.gpu_kinds) < 2


@contextmanager
def quiet(tracker: TrackerWriter, plan: TrainingPlan, tasks: Sequence[TrialTask]) -> Iterator[None]:
    """Context in which the tracker writes nothing if such tasks are timed on all of this machine's
    CPUs, which writing would take from them.
    """
    if any(not task.num_gpus and task.num_cpus >= plan.capabilities.num_cpus for task in tasks):
        tracker.may_write.clear()
    try:
        yield
    finally:
        tracker.may_write.set()


@contextmanager
def compiled_anew(study_folder: Path) -> Iterator[Callable[[TrialTask], TrialTask]]:
    """Context of runs that use no code compiled before; yields what has a task compile anew, in a
    fresh process.

    The folder for compiled code is in that of the study or comparison, and gone afterwards. The
    first run of each graph compiles it; later runs are charged what that took.
    """
    folder = study_folder / "compiled"
    shutil.rmtree(folder, ignore_errors=True)  # that of a driver that was killed

    def anew(task: TrialTask) -> TrialTask:
        task = replace(task, is_fresh=True)
        if task.config.training is not None or task.config.runtime.compile is None:
            return task
        make_folder(folder).chmod(0o700)  # what is in it is run
        return replace(task, compiled_folder=str(folder))

    try:
        yield anew
    finally:
        shutil.rmtree(folder, ignore_errors=True)
