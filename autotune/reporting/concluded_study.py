"""A study that has ended, read from the files in its folder, for its report."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from autotune.confirm.statistics import Claim, Ratio, RunScore
from autotune.errors import StudyError, explained
from autotune.files import FORMAT_KEY, check_format
from autotune.outcome import Outcome
from autotune.recording import Recording, read_recording
from autotune.reporting.scores import SECONDS, ConfigurationScores, ScoreFormat
from autotune.reporting.study_files import METRIC_COLUMN, SUMMARY, read_summary
from autotune.yaml_files import read_yaml

_TEXTS = ("outcome", "score_unit", "device_kind", "seed", "contention", "error")


@dataclass(frozen=True)
class ConcludedStudy:
    """A study's folder, read.

    Attributes:
        summary: content of ``summary.json``; empty for a study without it.
        trials: ``trials.csv`` by number of the trial: numbers that are not finite are NaN, texts
            that are missing are empty. Further columns: ``spent`` (seconds of prepare and train),
            ``bound`` (the score, or a lower bound on it), ``overrides``.
        trace: ``trace.csv``; None for a study without it.
        front: ``pareto_front.csv``; None for a study of one objective.
        machine: content of ``machine.yaml``; empty for a study without it.
    """

    folder: Path
    summary: Mapping[str, Any]
    trials: pd.DataFrame
    recording: Recording
    trace: pd.DataFrame | None
    front: pd.DataFrame | None
    machine: Mapping[str, Any]

    @cached_property
    def scale(self) -> ScoreFormat:
        """The format of the study's scores."""
        objective = self.summary.get("objective")
        return ScoreFormat(**objective) if objective else SECONDS

    @cached_property
    def reached(self) -> pd.DataFrame:
        """The trials with a score, best first."""
        return self.trials[self.trials.score.notna()].sort_values("score")

    @cached_property
    def metric_columns(self) -> list[str]:
        """The columns of ``trials`` with further metrics."""
        return [name for name in self.trials.columns if name.startswith(METRIC_COLUMN)]

    def measured(self, trial: pd.Series) -> dict[str, float]:
        """What a target may bound of a row of ``trials``: the loss and the further metrics."""
        further = {name.removeprefix(METRIC_COLUMN): trial[name] for name in self.metric_columns}
        return {"loss": trial.loss, **further}

    @cached_property
    def best_trial(self) -> int | None:
        """Number of the trial that is exported, or else of the one with the best score.

        None if none reached the target.
        """
        exported = self.summary.get("trial")
        if exported is not None or self.reached.empty:
            return exported
        return int(self.reached.index[0])

    @cached_property
    def sides(self) -> pd.DataFrame:
        """The trials of the baseline and of the best configuration, as far as they were evaluated,
        by ``baseline`` and ``best``, with the ``steps`` of each.
        """
        names = {self.best_trial: "best", self.recording.baseline: "baseline"}
        sides = self.trials[(self.trials.spent > 0) & self.trials.index.isin([*names])]
        last_steps = {
            trial.number: trial.steps[-1] for trial in self.recording.trials if trial.steps
        }
        steps = sides.index.map(last_steps).astype(float)
        return sides.assign(steps=steps).rename(index=names).sort_index()

    @cached_property
    def arms(self) -> list[tuple[ConfigurationScores, Mapping[str, Any]]]:
        """The configurations of the confirmation, the baseline first: scores, and what the
        summary says of them.
        """
        baseline = self.summary.get("baseline")
        if not baseline:
            return []
        baseline = {**baseline, "why": "what all are compared with", "overrides": []}
        candidates = [(f"trial {arm['trial']}", arm) for arm in self.summary["candidates"]]
        return [
            (self._scores(label, arm), arm) for label, arm in [("baseline", baseline), *candidates]
        ]

    @cached_property
    def best_arm(self) -> ConfigurationScores | None:
        """The candidate that is exported; None if it is the baseline, or if there is none."""
        best = self.summary.get("trial")
        return next((scores for scores, arm in self.arms[1:] if arm["trial"] == best), None)

    @cached_property
    def is_confirmed(self) -> bool:
        """Whether the confirmation ended with a configuration to export, or with the baseline."""
        return bool(self.arms) and self.summary.get("trial") is not None

    @cached_property
    def saved_seconds(self) -> float | None:
        """Seconds that a training saves with the best configuration; None where that is not
        known.
        """
        best, speed_up = self.best_arm, self.speed_up
        if not self.scale.is_time or best is None or speed_up is None or not speed_up.is_gain:
            return None
        saved = (self.arms[0][0].expected_score or math.inf) - (best.expected_score or 0.0)
        return saved if math.isfinite(saved) else None

    @cached_property
    def speed_up(self) -> Ratio | None:
        """The baseline's expected score over the exported configuration's.

        None if they were not compared.
        """
        found = self.summary.get("speed_up")
        if not found:
            return None
        high = math.inf if found["high"] is None else found["high"]
        return Ratio(**{**found, "high": high, "claim": Claim(found["claim"])})

    def _scores(self, label: str, arm: Mapping[str, Any]) -> ConfigurationScores:
        reached = arm.get("times_seconds", arm.get("scores", []))
        missed = arm.get("lower_bounds_seconds", arm.get("lower_bounds", []))
        runs = [RunScore(score, True) for score in reached]
        runs += [RunScore(score, False) for score in missed]
        num_lost = min(arm["num_runs"] - len(runs), 1000)  # a changed file may say billions
        runs += [RunScore(None, False)] * num_lost
        return ConfigurationScores(label=label, runs=runs, scale=self.scale)


def readable(folder: Path) -> AbstractContextManager[None]:
    """Context in which a study's files are read: files that someone changed are refused in one
    line, whatever is wrong with them.

    Raises:
        StudyError: reading raised an error that is not autotune's own.
    """
    advice = "; its files must be as the study wrote them"
    return explained(f"study={folder.name}: cannot be read", StudyError, advice=advice)


def read_concluded_study(folder: Path) -> ConcludedStudy:
    """Read a study's result files, within ``readable``.

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
    machine = folder / "machine.yaml"
    content = read_yaml(machine) if machine.is_file() else {}
    check_format(content.get(FORMAT_KEY), machine)
    recording = read_recording(folder / "recording")
    study = ConcludedStudy(
        folder=folder,
        summary=read_summary(folder / SUMMARY) or read_summary(folder / "best.json"),
        trials=_read_trials(folder / "trials.csv", recording),
        recording=recording,
        trace=_table(folder / "trace.csv"),
        front=_table(folder / "pareto_front.csv"),
        machine=content,
    )
    if study.scale.is_time:
        is_censored = [Outcome[name].is_censored for name in study.trials.outcome]
        study.trials["bound"] = study.trials.bound.fillna(study.trials.spent.where(is_censored))
    return study


def _read_trials(path: Path, recording: Recording) -> pd.DataFrame:
    table = pd.read_csv(path, index_col="trial", converters=dict.fromkeys(_TEXTS, str)).sort_index()
    measured = table.loc[:, :"error"].replace([np.inf, -np.inf], np.nan)
    overrides = {
        trial.number: " ".join(trial.suggestion.as_overrides()) for trial in recording.trials
    }
    return measured.assign(
        spent=measured.prepare_seconds.fillna(0.0) + measured.train_seconds,
        bound=measured.score,
        overrides=[overrides.get(trial) or "(no overrides)" for trial in measured.index],
    )


def _table(path: Path) -> pd.DataFrame | None:
    return pd.read_csv(path, keep_default_na=False) if path.is_file() else None
