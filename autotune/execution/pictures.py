"""A study's figures and its HTML report: what they need of the search alone is made ready beside the confirmation runs."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from autotune.effects import Effects
from autotune.errors import FileError
from autotune.execution.background_tracker import NICENESS
from autotune.execution.cluster import call
from autotune.execution.plan import StudyPlan
from autotune.recording import Recording, read_recording, write_recording
from autotune.reporting.study_files import REPORT
from autotune.search.curve_model import wait_for_scikit_learn
from autotune.search.policy import SearchPolicy


class Pictures:
    """Draws a study once it has ended.

    Args:
        say: prints a line for the user.
    """

    def __init__(self, plan: StudyPlan, policy: SearchPolicy, say: Callable[[str], object]) -> None:
        self._plan, self._policy, self._say = plan, policy, say
        self._effects: Future[tuple[Recording, list[Effects]]] | None = None
        self._is_over = threading.Event()

    def write_recording(self) -> None:
        """Write the study's trials as a recording."""
        write_recording(
            self._plan.folder / "recording",
            results=list(self._policy.results.values()),
            target=self._plan.trial.target,
            space=self._plan.space.as_mapping(),
            source=f"autotune study {self._plan.name}",
            baseline=self._policy.baseline_trial,
        )

    def prepare(self) -> None:
        """Begin, in a thread, to learn from all trials of an ended search what each parameter does, and to import what the end takes."""
        try:
            self.write_recording()
        except (FileError, OSError):  # met again, and told, when the study is concluded
            return
        self._effects = Future()
        threading.Thread(target=call, args=(self._prepared, self._effects), name="pictures").start()

    def close(self) -> None:
        """End what ``prepare`` began, after its present step: a thread that a process left amid an import might abort it."""
        self._is_over.set()

    def draw(self) -> list[Path]:
        """Write the report, and its charts as pages of their own, whose paths are returned.

        What cannot be drawn is told in a line: it is no result.
        """
        plan = self._plan
        recording, effects = self._learnt() if self._effects is None or self._effects.exception() else self._effects.result()
        from autotune.reporting.concluded_study import read_concluded_study  # noqa: PLC0415  # needed only at the end
        from autotune.reporting.drawing import write_charts  # noqa: PLC0415  # imports Plotly, needed only at the end
        from autotune.reporting.html import write_report  # noqa: PLC0415  # imports Plotly, needed only at the end
        from autotune.reporting.study_charts import study_charts  # noqa: PLC0415  # imports Plotly, needed only at the end

        try:
            concluded = read_concluded_study(plan.folder, recording)
            charts = study_charts(concluded, effects)
            write_report(concluded, effects, charts)
            figures = write_charts(plan.folder / "figures", (chart for chart in charts.values() if not chart.name.startswith("effect-")))
        except FileError:
            raise
        except Exception as error:  # whatever it is, hours of training must not end in it
            logging.getLogger(__name__).exception("the report was not written")
            self._say(f"no {REPORT}: {type(error).__name__}: {' '.join(str(error).split())}")
            return []
        return figures

    def _prepared(self) -> tuple[Recording, list[Effects]]:
        if sys.platform == "linux":  # where a thread has a niceness of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        learnt = self._learnt()
        writes_program = self._plan.trial.training is None
        for module in ("reporting.html", *(["training.standalone"] if writes_program else [])):
            if not self._is_over.is_set():
                import_module(f"autotune.{module}")  # and with it Plotly and torch
        return learnt

    def _learnt(self) -> tuple[Recording, list[Effects]]:
        wait_for_scikit_learn()
        from autotune.search.importances import time_effects  # noqa: PLC0415  # imports more of scikit-learn

        recording = read_recording(self._plan.folder / "recording")
        return recording, time_effects(recording)
