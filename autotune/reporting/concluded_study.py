"""A study that has ended, read from the files in its folder, for its report."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.comparison import Claim, Ratio, RunScore
from autotune.errors import DataError, StudyError
from autotune.outcome import Outcome
from autotune.recording import Recording, read_recording
from autotune.reporting.scores import ArmScores, ScoreFormat
from autotune.reporting.study_files import SUMMARY, read_summary

_MEASURED = (
    "build_seconds", "prepare_seconds", "train_seconds", "evaluate_seconds", "samples_per_second", "peak_memory_bytes", "energy_joules",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConcludedTrial:
    """A row of ``trials.csv``."""

    number: int
    outcome: Outcome
    score: float | None
    spent: float | None
    """Seconds of prepare and train; None if the trial has no evaluation."""
    metric: float | None
    started_at: float
    stopped_at: float
    seed: str
    error: str
    contention: str
    values: Mapping[str, str]
    """Text of each parameter that the trial has."""
    measured: Mapping[str, float]
    """Numbers of the trial's last evaluation by column of ``trials.csv``, those that were measured."""

    @property
    def overrides(self) -> str:
        """The values as on a command line."""
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or "(no overrides)"


@dataclass(frozen=True)
class ConcludedStudy:
    """A study's folder, read."""

    folder: Path
    summary: Mapping[str, Any]
    trials: Sequence[ConcludedTrial]
    recording: Recording

    @cached_property
    def scale(self) -> ScoreFormat:
        """The format of the study's scores."""
        objective = self.summary.get("objective") or {"quantity": "time to target", "unit": "s"}
        return ScoreFormat(quantity=objective["quantity"], unit=objective["unit"], lower_bound=None)

    @cached_property
    def reached(self) -> list[ConcludedTrial]:
        """The trials with a score, best first."""
        return sorted((trial for trial in self.trials if trial.score is not None), key=lambda trial: trial.score or 0.0)

    @cached_property
    def best_trial(self) -> int | None:
        """Number of the trial that is exported, or else of the one with the best score; None if none reached the target."""
        exported = self.summary.get("trial")
        return exported if exported is not None else self.reached[0].number if self.reached else None

    @cached_property
    def arms(self) -> list[tuple[ArmScores, Mapping[str, Any]]]:
        """The configurations of the confirmation, the baseline first: scores, and what the summary says of them."""
        if not self.summary.get("baseline"):
            return []
        content = [{**self.summary["baseline"], "why": "what all are compared with", "overrides": []}, *self.summary["candidates"]]
        labels = ["baseline", *(f"trial {arm['trial']}" for arm in self.summary["candidates"])]
        return [(self._scores(label, arm), arm) for label, arm in zip(labels, content, strict=True)]

    @cached_property
    def best_arm(self) -> ArmScores | None:
        """The candidate that is exported; None if it is the baseline, or if there is none."""
        best = self.summary.get("trial")
        return next((scores for scores, arm in self.arms[1:] if arm["trial"] == best), None)

    @cached_property
    def speed_up(self) -> Ratio | None:
        """The baseline's expected score over the exported configuration's; None if they were not compared."""
        found = self.summary.get("speed_up")
        if not found:
            return None
        return Ratio(**{**found, "high": math.inf if found["high"] is None else found["high"], "claim": Claim(found["claim"])})

    def bound(self, trial: ConcludedTrial) -> float | None:
        """The trial's score, or a lower bound on it; None if there is neither."""
        if trial.score is not None:
            return trial.score
        return trial.spent if self.scale.is_time and trial.outcome.is_censored else None

    def _scores(self, label: str, arm: Mapping[str, Any]) -> ArmScores:
        runs = [RunScore(score, True) for score in arm.get("times_seconds", arm.get("scores", []))]
        runs += [RunScore(score, False) for score in arm.get("lower_bounds_seconds", arm.get("lower_bounds", []))]
        return ArmScores(label=label, runs=runs + [RunScore(None, False)] * (arm["num_runs"] - len(runs)), scale=self.scale)


def read_concluded_study(folder: Path, recording: Recording | None = None) -> ConcludedStudy:
    """Read a study's result files, but for its recording if that is given.

    Raises:
        StudyError: the folder has no study that has ended, or one of its files cannot be read.
    """
    if not folder.is_dir():
        raise StudyError(f"study={folder.name}: no such study in {folder.parent}")
    if not (folder / "recording").is_dir() or not (folder / "trials.csv").is_file():
        raise StudyError(
            f"study={folder.name}: {folder} has no recording/ and trials.csv; accepted is the folder of a study that has ended"
        )
    try:
        path = next((path for name in (SUMMARY, "best.json") if (path := folder / name).is_file()), None)
        summary = {} if path is None else read_summary(path)
        recording = recording or read_recording(folder / "recording")
        study = ConcludedStudy(folder, summary, list(_trials(folder / "trials.csv")), recording)
        _ = study.arms, study.scale, study.speed_up
    except DataError as error:
        raise StudyError(f"study={folder.name}: {error}") from error
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, csv.Error) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise StudyError(f"study={folder.name}: cannot be read: {reason[:200]}") from error
    return study


def _trials(path: Path) -> Iterator[ConcludedTrial]:
    """The rows of ``trials.csv`` by number; the columns after ``error`` are the parameters."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or [])
        parameters = columns[columns.index("error") + 1 :]
        rows = sorted(reader, key=lambda row: int(row["trial"]))
    for row in rows:
        seconds = [float(row[name]) for name in ("prepare_seconds", "train_seconds") if row[name]]
        yield ConcludedTrial(
            number=int(row["trial"]),
            outcome=Outcome[row["outcome"]],
            score=_finite(row["score"]),
            spent=math.fsum(seconds) if seconds else None,
            metric=_finite(row["metric"]),
            started_at=float(row["started_at"]),
            stopped_at=float(row["stopped_at"]),
            seed=row["seed"],
            error=row["error"],
            contention=row.get("contention", ""),
            values={key: row[key] for key in parameters if row[key] != ""},
            measured={key: number for key in _MEASURED if (number := _finite(row.get(key) or "")) is not None},
        )


def _finite(text: str) -> float | None:
    number = float(text) if text else math.nan
    return number if math.isfinite(number) else None
