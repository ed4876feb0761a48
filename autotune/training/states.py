"""The states that a training can continue from, in a folder of its own: the newest two, the newer
one written beside the older, so that a training which is ended at any moment has a whole one.

A state is saved at the first evaluation after some minutes, when the search pauses the training,
and, where a notice file appears beside the folder, at the training's next step or report: the
machine is about to be taken away. Saving stands in no phase of the training's clock.
"""

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from autotune.config.schema import TrialConfig, first_difference, with_raised_limit
from autotune.errors import DataError, StateError
from autotune.files import NOTICE_FILE, STATE_FILE
from autotune.measurement import Evaluation, LearningCurve, PhaseClock
from autotune.redaction import without_secrets_in
from autotune.training.checkpoint import read_state, told_damage

_log = logging.getLogger(__name__)

_NUM_KEPT = 2
_MAX_FRACTION = 0.03
"""Maximum fraction of the training time that saving takes."""
_EXPECTED_BYTES_PER_SECOND = 200e6
"""Bytes of its first state that a process is expected to write in a second, as on a slow disk."""
_MAX_EXPECTED_SECONDS = 18.0
"""Most that it is expected to take: a process saves one after ten minutes, however large it is."""
_CURVE_EVERY_SECONDS = 1.0
"""Least seconds from one saving of the evaluations alone to the next."""
_LOOK_EVERY_SECONDS = 0.5
"""Seconds between two looks for the notice."""


class TrainingStates:
    """The saved states of one training.

    Args:
        folder: folder for the states, each in a folder named by a number that grows; None keeps
            none.
        every_seconds: least seconds from one state to the next that nobody asks for; 0 saves at
            every evaluation, infinity at none.
        hosts: addresses of the machines that the training runs on, as Ray has them.
    """

    def __init__(
        self,
        folder: Path | None = None,
        every_seconds: float = math.inf,
        hosts: Collection[str] = (),
    ) -> None:
        self.folder = folder
        self._notices = [NOTICE_FILE, *(f"{NOTICE_FILE}-{host}" for host in set(hosts))]
        self._every_seconds, self._expected_seconds = every_seconds, 0.0
        self._began = self._saved_at = self._looked_at = time.monotonic()
        self._has_notice = False
        self.curve = LearningCurve()
        """The evaluations so far, those before the state that the training continued from, too."""
        self.seconds = 0.0
        """Seconds that this process has spent on saving."""
        self.is_saved = False
        """Whether the training was saved at its last evaluation."""
        self.fault: str | None = None
        """Why the training could not be saved when that was tried last; None if it was."""
        self.saving: Callable[[], AbstractContextManager[object]] = nullcontext
        """Makes a context that is entered while a state is written."""

    @property
    def is_kept(self) -> bool:
        """Whether the training has a folder here for its states."""
        return self.folder is not None and self.folder.parent.is_dir()

    @property
    def has_notice(self) -> bool:
        """Whether the training is to be saved at once."""
        now = time.monotonic()
        if not self._has_notice and now - self._looked_at >= _LOOK_EVERY_SECONDS:
            self._looked_at = now
            self._has_notice = self.folder is not None and any(
                (self.folder.parent / notice).exists() for notice in self._notices
            )
        return self._has_notice

    def is_due(self, num_bytes: Callable[[], int]) -> bool:
        """Whether a state of so many bytes is to be saved at the present evaluation."""
        if not self._is_due_after(self._every_seconds):
            return False
        if not self._expected_seconds:
            expected_seconds = num_bytes() / _EXPECTED_BYTES_PER_SECOND
            self._expected_seconds = min(expected_seconds, _MAX_EXPECTED_SECONDS)
        return self._is_due_after(self._every_seconds)

    @property
    def is_curve_due(self) -> bool:
        """Whether the evaluations of a training that keeps its state by itself are to be saved."""
        return self._is_due_after(min(self._every_seconds, _CURVE_EVERY_SECONDS), free_seconds=1.0)

    def _is_due_after(self, seconds: float, *, free_seconds: float = 0.0) -> bool:
        now = time.monotonic()
        most_seconds = max(free_seconds, _MAX_FRACTION * (now - self._began - self.seconds))
        is_paid = not self._every_seconds or self.seconds + self._expected_seconds <= most_seconds
        is_due = (now - self._saved_at >= seconds and is_paid) or self.has_notice
        return self.is_kept and is_due

    def evaluated(self, evaluation: Evaluation) -> None:
        """Note an evaluation."""
        self.is_saved = False
        self.curve.add(evaluation)

    def save(self, write: Callable[[Path], object]) -> None:
        """Have a state written into a new folder, and delete all older ones but the last.

        Raises:
            DataError: it cannot be written; the older states are still there.
        """
        assert self.folder is not None, "this training keeps states"
        began, earlier = time.monotonic(), self._whole()
        number = 1 + max((int(path.name) for path in self._numbered()), default=0)
        path, kept = self.folder / str(number), earlier[:_NUM_KEPT]
        try:
            with self.saving():
                write(path)
            kept = [path, *earlier[: _NUM_KEPT - 1]]
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            _delete([other for other in self._numbered() if other not in kept])
            self._saved_at = time.monotonic()
            took_seconds = self._saved_at - began
            self.seconds += took_seconds
            self._expected_seconds = max(self._expected_seconds, took_seconds)
        self.is_saved, self.fault = True, None

    def try_to_save(self, write: Callable[[Path], object]) -> None:
        """Save a state; where it cannot be written, the training continues without."""
        try:
            self.save(write)
        except DataError as error:
            self.fault = str(error)
            _log.warning("%s; the training continues, and is not saved", error)

    def restore(self, config: TrialConfig, clock: PhaseClock) -> tuple[Path, dict[str, Any]] | None:
        """The newest state that is whole, with its folder; None if there is none.

        The clock is stopped and gets the seconds and joules spent so far: what setting up took is
        not counted again.

        Raises:
            DataError: the state belongs to another configuration.
        """
        for folder in self._whole():
            try:
                state = read_state(folder)
                with told_damage(folder):
                    self._take(state, folder, config, clock)
            except StateError as error:
                _log.warning("%s; the training continues from an older state, or begins", error)
            else:
                return folder, state
        return None

    def _take(
        self, state: Mapping[str, Any], folder: Path, config: TrialConfig, clock: PhaseClock
    ) -> None:
        curve = LearningCurve(
            {int(at): Evaluation.from_dict(each) for at, each in state["curve"].items()}
        )
        wanted = without_secrets_in(config.as_dict())
        saved = {key: value for key, value in state["config"].items() if key in wanted}
        if curve.last is None or curve.last.outcome is None:
            saved = with_raised_limit(saved, wanted)
        if (difference := first_difference(saved, wanted)) is not None:
            raise DataError(
                f"checkpoint.folder: {folder} holds another training ({difference}); use an empty"
                " folder, or its own"
            )
        clock.restore(state["clock"])
        self.curve = curve

    def contents(self, config: TrialConfig, clock: PhaseClock) -> dict[str, Any]:
        """What every state has, whatever is trained; see ``restore``."""
        return {
            "config": without_secrets_in(config.as_dict()),
            "clock": clock.state(),
            "curve": {at: each.as_dict() for at, each in self.curve.numbered.items()},
        }

    def clear(self) -> None:
        """Delete all states, such as those of a training whose times were spoilt."""
        _delete(self._numbered())

    def drop_newest(self) -> None:
        """Delete the newest state, which the training cannot continue from."""
        _delete(self._whole()[:1])

    def _whole(self) -> list[Path]:
        """The folders of states that are whole, the newest first."""
        # the file of a state is written last
        return [path for path in self._numbered() if (path / STATE_FILE).is_file()]

    def _numbered(self) -> list[Path]:
        """The folders of all states, the newest first."""
        with contextlib.suppress(OSError):
            found = () if self.folder is None else self.folder.iterdir()
            numbered = [path for path in found if path.name.isdigit()]
            return sorted(numbered, key=lambda path: -int(path.name))
        return []


def _delete(states: Iterable[Path]) -> None:
    for path in states:
        shutil.rmtree(path, ignore_errors=True)
