"""A tracker that is opened while the cluster starts: MLflow takes seconds to import."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from autotune.tracking.tracker import Tracker


class BackgroundTracker:
    """A tracker that is opened in the background while the cluster starts, and closed once, however the study ends."""

    def __init__(self, opening: "Future[Tracker]") -> None:
        self._opening = opening
        self._is_closed = False

    def wait(self) -> Tracker:
        """The tracker, once it is open.

        Raises:
            ConfigError: it could not be opened.
        """
        return self._opening.result()

    def close(self, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Close the tracker now, with what came of the study."""
        self._is_closed = True
        self.wait().close(status=status, metrics=metrics, tags=tags, artifacts=artifacts)

    def close_if_open(self, *, is_interrupt: bool) -> None:
        """Close it as ended by the user or as failed, where the study did not come to close it."""
        if not self._is_closed and self._opening.exception() is None:
            self.close("KILLED" if is_interrupt else "FAILED", {}, {}, [])
