"""A study that has ended, read from the files in its folder, for its report."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from autotune.confirm.statistics import Claim, Ratio, RunScore
from autotune.errors import AutotuneError, StudyError
from autotune.files import FORMAT_KEY, check_format
from autotune.outcome import Outcome
from autotune.recording import Recording, read_recording
from autotune.reporting.scores import ArmScores, ScoreFormat
from autotune.reporting.study_files import SUMMARY, read_summary

_TEXTS = ("outcome", "score_unit", "device_kind", "seed", "contention", "error")
_MAX_LOST_RUNS = 1000
"""Maximum number of an arm's runs without a score, so that a changed file cannot ask for
billions."""


@dataclass(frozen=True)
class ConcludedStudy:
    """A study's folder, read.

    Attributes:
        summary: content of ``summary.json``; empty for a study without it.
        trials: ``trials.csv`` by number of the trial: numbers that are not finite are NaN, texts
            that are missing are empty. Further columns: ``spent`` (seconds of prepare and train),
            ``bound`` (the score, or a lower bound on it), ``overrides``.
        parameters: text of each parameter, by number of the trial; empty where a trial does not
            have it.
        trace: ``trace.csv``; empty for a study without it.
        front: ``pareto_front.csv``; None for a study of one objective.
        machine: content of ``machine.yaml``; empty for a study without it.
    """

    folder: Path
    summary: Mapping[str, Any]
    trials: pd.DataFrame
    parameters: pd.DataFrame
    recording: Recording
    trace: pd.DataFrame
    front: pd.DataFrame | None
    machine: Mapping[str, Any]

    @cached_property
    def scale(self) -> ScoreFormat:
        """The format of the study's scores."""
        objective = self.summary.get("objective") or {"quantity": "time to target", "unit": "s"}
        return ScoreFormat(quantity=objective["quantity"], unit=objective["unit"], lower_bound=None)

    @cached_property
    def reached(self) -> pd.DataFrame:
        """The trials with a score, best first."""
        return self.trials[self.trials.score.notna()].sort_values("score")

    @cached_property
    def best_trial(self) -> int | None:
        """Number of the trial that is exported, or else of the one with the best score.

        None if none reached the target.
        """
        exported = self.summary.get("trial")
        return (
            exported
            if exported is not None
            else int(self.reached.index[0])
            if len(self.reached)
            else None
        )

    @cached_property
    def sides(self) -> dict[str, int]:
        """Numbers of the baseline's trial and of the best one, as far as they were evaluated, by
        ``baseline`` and ``best``.
        """
        numbers = {"baseline": self.recording.baseline}
        if self.best_trial != self.recording.baseline:
            numbers["best"] = self.best_trial
        evaluated = self.trials.index[self.trials.spent > 0]
        return {
            label: number
            for label, number in numbers.items()
            if number is not None and number in evaluated
        }

    @cached_property
    def arms(self) -> list[tuple[ArmScores, Mapping[str, Any]]]:
        """The configurations of the confirmation, the baseline first: scores, and what the
        summary says of them.
        """
        if not self.summary.get("baseline"):
            return []
        baseline = {
            **self.summary["baseline"],
            "why": "what all are compared with",
            "overrides": [],
        }
        candidates = [(f"trial {arm['trial']}", arm) for arm in self.summary["candidates"]]
        return [
            (self._scores(label, arm), arm) for label, arm in [("baseline", baseline), *candidates]
        ]

    @cached_property
    def best_arm(self) -> ArmScores | None:
        """The candidate that is exported; None if it is the baseline, or if there is none."""
        best = self.summary.get("trial")
        return next((scores for scores, arm in self.arms[1:] if arm["trial"] == best), None)

    @cached_property
    def speed_up(self) -> Ratio | None:
        """The baseline's expected score over the exported configuration's.

        None if they were not compared.
        """
        found = self.summary.get("speed_up")
        if not found:
            return None
        return Ratio(
            **{
                **found,
                "high": math.inf if found["high"] is None else found["high"],
                "claim": Claim(found["claim"]),
            }
        )

    def _scores(self, label: str, arm: Mapping[str, Any]) -> ArmScores:
        runs = [RunScore(score, True) for score in arm.get("times_seconds", arm.get("scores", []))]
        runs += [
            RunScore(score, False)
            for score in arm.get("lower_bounds_seconds", arm.get("lower_bounds", []))
        ]
        num_lost = min(_MAX_LOST_RUNS, arm["num_runs"] - len(runs))
        return ArmScores(
            label=label, runs=runs + [RunScore(None, False)] * num_lost, scale=self.scale
        )


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Context in which a study's files are read: files that someone changed are refused in one
    line, whatever is wrong with them.

    Raises:
        StudyError: reading raised an error that is not autotune's own.
    """
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise StudyError(
            f"study={folder.name}: cannot be read: {reason[:300]}; its files must be as the study"
            " wrote them"
        ) from error


def read_concluded_study(folder: Path, recording: Recording | None = None) -> ConcludedStudy:
    """Read a study's result files, but for its recording if that is given.

    Raises:
        AutotuneError: the folder has no study that has ended, or one of its files cannot be read.
    """
    if not folder.is_dir():
        raise StudyError(f"study={folder.name}: no such study in {folder.parent}")
    if not (folder / "recording").is_dir() or not (folder / "trials.csv").is_file():
        raise StudyError(
            f"study={folder.name}: {folder} has no recording/ and trials.csv: the study has not"
            " ended"
        )
    with readable(folder):
        summary = read_summary(folder / SUMMARY) or read_summary(folder / "best.json")
        recording = recording or read_recording(folder / "recording")
        table = _table(folder / "trials.csv").astype({"trial": int}).set_index("trial").sort_index()
        first = table.columns.get_loc("error") + 1  # the columns after it are the parameters
        trials, parameters = _typed(table.iloc[:, :first]), table.iloc[:, first:]
        trials["overrides"] = [
            " ".join(f"{key}={value}" for key, value in row.items() if value) or "(no overrides)"
            for _, row in parameters.iterrows()
        ]
        path = folder / "machine.yaml"
        machine = (
            yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        ) or {}
        check_format("machine", machine.get(FORMAT_KEY), path)
        front = folder / "pareto_front.csv"
        study = ConcludedStudy(
            folder=folder,
            summary=summary,
            trials=trials,
            parameters=parameters,
            recording=recording,
            trace=_typed(_table(folder / "trace.csv")),
            front=_table(front) if front.is_file() else None,
            machine=machine,
        )
        if study.scale.is_time:
            is_censored = [outcome.is_censored for outcome in trials.outcome]
            trials["bound"] = trials.score.fillna(trials.spent.where(is_censored))
        _ = study.arms, study.speed_up
    return study


def _table(path: Path) -> pd.DataFrame:
    """A CSV file's cells as text; empty if there is no file."""
    return (
        pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8")
        if path.is_file()
        else pd.DataFrame()
    )


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    """A table with outcomes as ``Outcome`` and numbers as numbers, NaN for those that are
    missing or not finite.
    """
    numbers = {
        name: (
            column.map(lambda text: float(text or "nan"))
            .astype(float)
            .replace([np.inf, -np.inf], np.nan)
        )
        for name, column in table.items()
        if name not in _TEXTS
    }
    typed = table.assign(**numbers)
    if "score" in typed:
        typed = typed.assign(
            outcome=pd.Series([Outcome[name] for name in typed.outcome], typed.index, dtype=object),
            spent=typed.prepare_seconds.fillna(0.0) + typed.train_seconds,
            bound=typed.score,
        )
    return typed
