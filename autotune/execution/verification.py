"""Whether a study's files agree with its storage, with each other and with its MLflow runs, and whether its claim follows from its runs.

The storage is the source of truth: every other file is made of it again, in a temporary folder, and compared with the one that is there.
The claim is computed from the confirmation runs as ``autotune.execution.confirmation`` did, so that equal runs give an equal number to the
last digit. Nothing that is checked is changed.
"""

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from autotune.config.build import build_partial, call
from autotune.config.overrides import as_configured, read_value
from autotune.errors import AutotuneError, ConfigError, StudyError
from autotune.execution.conclusion import claim_comments, claim_json, counts_json
from autotune.execution.confirmation import Confirmation, PlannedRace, concluded
from autotune.hiding import without_secrets_in
from autotune.measurement import Target, TrialResult
from autotune.objective import Objective
from autotune.outcome import Outcome
from autotune.race import RaceLimits, Standing
from autotune.recording import differences, write_recording
from autotune.reporting.scores import NOT_SHOWN, measured_ratio, score_format_of
from autotune.reporting.study_files import SUMMARY, TrialsTable, finite, read_summary, shorten_text
from autotune.search.journal import JOURNAL, check_journal
from autotune.search.stored_trials import baseline_number, finished_results
from autotune.search.study import confirmations, read_study, stored_race, study_definition
from autotune.space import SearchSpace, Suggestion, override_text
from autotune.tracking.tracked_study import tracked_study
from autotune.tracking.tracker import confirmation_name, search_name
from autotune.yaml_files import load_yaml

_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions that data which someone changed can raise."""
_UNREADABLE = (*_MALFORMED, OSError, RecursionError, csv.Error, yaml.YAMLError)
"""Exceptions that reading a file which someone changed can raise, besides those of autotune."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a study."""

    name: str
    """What was checked, such as ``trials.csv``."""
    differences: tuple[str, ...] = ()
    """What does not hold, a line each: where, what was found and what was expected."""
    note: str = ""
    """What was compared, or why nothing was."""
    is_made: bool = True
    """Whether anything could be compared."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All checks of a study."""

    study: str
    num_trials: int
    num_confirmation_runs: int
    checks: tuple[Check, ...]
    command: str | None
    """Command that takes the study up, and so writes its files anew; None if the study does not say it."""

    @property
    def holds(self) -> bool:
        """Whether no check found a difference."""
        return not any(check.differences for check in self.checks)


def verify_study(folder: Path, *, storage_url: str | None, tracking_uri: str | None, allowed_targets: Sequence[str]) -> Verification:
    """Check a study that has ended.

    Args:
        storage_url: the study's database; None for the journal in its folder.
        tracking_uri: of the MLflow store; None for the one that a study uses that names none.
        allowed_targets: as the study was started with, for an objective of the user's own.

    Raises:
        StudyError: there is no such study, or its storage cannot be read at all.
        ConfigError: the store that ``tracking_uri`` names does not answer, or the objective is not allowed.
    """
    if not folder.is_dir():
        raise StudyError(f"study={folder.name}: no such study in {folder.parent}; accepted is the name or the folder of one")
    if storage_url is None and not (folder / JOURNAL).is_file():
        raise StudyError(f"study={folder.name}: {folder} has no {JOURNAL}; accepted is the folder of a study, or search.storage=URL")
    journal = _journal(folder) if storage_url is None else Check(name="journal", note="the study is in a database", is_made=False)
    try:
        summary, fault = read_summary(folder / SUMMARY) or read_summary(folder / "best.json"), None
    except AutotuneError as error:
        summary, fault = {}, str(error)
    try:
        stored = _Stored.read(str(summary.get("study", folder.resolve().name)), folder, storage_url, allowed_targets)
        _ = stored.race
    except StudyError as error:
        if not journal.differences:
            raise
        unread = [Check(name=name, note="the journal cannot be read", is_made=False) for name in _NAMES]
        return Verification(study=folder.name, num_trials=0, num_confirmation_runs=0, checks=(journal, *unread), command=str(error))
    study = _Study(folder=folder, stored=stored, summary=summary, fault=fault)
    makers: Sequence[Callable[[], Check]] = (
        study.recording,
        study.trials_csv,
        study.claim,
        study.best_json,
        study.best_yaml,
        lambda: study.mlflow(tracking_uri),
    )
    return Verification(
        study=stored.name,
        num_trials=len(stored.results),
        num_confirmation_runs=len(stored.runs),
        checks=(journal, *(make() for make in makers)),
        command=summary.get("command"),
    )


_NAMES = ("recording", "trials.csv", "summary.json", "best.json", "best.yaml", "MLflow")
"""Names of the checks after that of the journal."""


def _journal(folder: Path) -> Check:
    found = check_journal(folder)
    covered = "no digests, written by an earlier version" if found.digest is None else f"{found.num_without_digest} without digest"
    return Check(name="journal", differences=found.faults, note=f"{found.num_records} records, {covered}")


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """What a study's storage holds."""

    name: str
    results: Mapping[int, TrialResult]
    runs: Mapping[tuple[int, int], TrialResult]
    target: Target
    objective: Objective
    search_space: Mapping[str, Any]
    space: SearchSpace
    baseline: int | None
    race: PlannedRace | None

    @classmethod
    def read(cls, name: str, folder: Path, storage_url: str | None, allowed_targets: Sequence[str]) -> "_Stored":
        """Read a study's storage.

        Raises:
            StudyError: it holds no such study, or what it holds is not what autotune writes.
            ConfigError: the objective is not allowed, or cannot be made.
        """
        study = read_study(name, folder, storage_url=storage_url)
        definition = study_definition(study)
        try:
            objective_node = dict(definition["objective"])
            target = Target(**definition["configuration"]["target"])
            space = SearchSpace.from_mapping(definition["search_space"], "the study's search space")
            results, baseline, race = finished_results(study), baseline_number(study), stored_race(study)
            planned = None
            if race is not None:
                first = race["entrants"][0]["arm"]
                values = results[first].values if first in results else {}
                planned = PlannedRace.from_dict(race, Suggestion(values), results)
            runs = confirmations(study)
        except _MALFORMED as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise StudyError(f"study={name}: the storage does not hold what a study writes ({reason})") from error
        objective = call(build_partial(objective_node, list(allowed_targets), "objective"), "objective")
        return cls(
            name=name,
            results=results,
            runs=runs,
            target=target,
            objective=objective,
            search_space=definition["search_space"],
            space=space,
            baseline=baseline,
            race=planned,
        )

    @cached_property
    def scores(self) -> dict[int, float]:
        """Score of each trial that reached the target."""
        return {number: self.objective.score(result) for number, result in self.results.items() if result.outcome is Outcome.REACHED}

    def confirmation(self, summary: Mapping[str, Any]) -> Confirmation | None:
        """The result of the stored race, within the limits that the summary says; None where the summary says that there was none.

        A summary of the first version says no limits. The winner is then taken from it, and the claim is computed from the rounds in which
        it and the baseline both ran, which are the same ones: the baseline has no part in choosing.
        """
        if self.race is None or (summary.get("baseline") is None and not summary.get("limits")):
            return None
        race, limits = self.race, summary.get("limits")
        if limits:
            known = RaceLimits(**{**limits, "max_seconds": math.inf if limits["max_seconds"] is None else limits["max_seconds"]})
            return concluded(
                race, self.runs, race.standing(self.runs, known, self.objective), self.objective, min_reach_rate=known.min_reach_rate
            )
        baseline = race.arms[0].trial
        chosen = next((arm["trial"] for arm in summary.get("candidates", ()) if arm.get("why") == "chosen"), None)
        winner = chosen if summary.get("trial") in (None, baseline) else summary["trial"]
        own = race.runs(self.runs)
        both = {number for trial, number in own if trial == baseline} & {number for trial, number in own if trial == (winner or baseline)}
        standing = Standing(
            pending=(),
            num_runs=len(own),
            winner=winner,
            claim_rounds=tuple(sorted(number - race.first_round for number in both)),
            is_baseline_better=summary.get("trial") == baseline,
        )
        return concluded(race, self.runs, standing, self.objective, min_reach_rate=0.0)


@dataclass(frozen=True, kw_only=True)
class _Study:
    """A study's storage, and its folder with the files that are made of it."""

    folder: Path
    stored: _Stored
    summary: Mapping[str, Any]
    fault: str | None
    """Why the summary cannot be read; None if it can."""

    def recording(self) -> Check:
        """Compare ``recording/`` with one made of the storage."""
        stored = self.stored
        num_evaluations = sum(len(result.evaluations) for result in stored.results.values())
        with TemporaryDirectory(prefix="autotune-") as folder:
            expected = Path(folder) / "recording"
            write_recording(
                expected,
                results=list(stored.results.values()),
                target=stored.target,
                space=stored.search_space,
                source=f"autotune study {stored.name}",
                baseline=stored.baseline,
            )
            return _check(
                "recording",
                lambda: list(differences(self.folder / "recording", expected)),
                f"{len(stored.results)} trials, {num_evaluations} evaluations",
            )

    def trials_csv(self) -> Check:
        """Compare ``trials.csv`` with one made of the storage."""
        stored = self.stored
        with TemporaryDirectory(prefix="autotune-") as folder:
            expected = Path(folder) / "trials.csv"
            unit = score_format_of(stored.objective).unit
            TrialsTable(expected, stored.space, list(stored.results.values()), stored.scores, unit)
            return _check("trials.csv", lambda: list(_row_differences(self.folder / "trials.csv", expected)), f"{len(stored.results)} rows")

    def claim(self) -> Check:
        """Compute the claim and the totals again from the runs, and compare them with ``summary.json``."""
        if self.fault is not None:
            return Check(name="summary.json", differences=(self.fault,))
        if not self.summary:
            return Check(name="summary.json", differences=(f"{self.folder / SUMMARY}: is not there",))
        return _check("summary.json", lambda: list(self._claim_differences()), self._claim_note)

    def _claim_differences(self) -> Iterator[str]:
        stored, summary = self.stored, deepcopy(dict(self.summary))
        confirmation = stored.confirmation(summary)
        runs = confirmation.runs.values() if confirmation is not None else ()
        expected = {**claim_json(confirmation), **counts_json(list(stored.results.values()), list(runs))}
        if not summary.get("limits") and confirmation is not None:  # the first version
            for arm in [*(summary.get("candidates") or ()), *expected["candidates"]]:
                arm.pop("why", None)
        if summary.get("trial") == stored.baseline:
            expected.pop("overrides")  # of the experiment's own values, which the storage does not have
        expected = json.loads(json.dumps(finite(without_secrets_in(expected))))
        yield from _value_differences({key: summary.get(key) for key in expected}, expected, "")

    @property
    def _claim_note(self) -> str:
        speed_up = self.summary.get("speed_up")
        if not speed_up:
            return "nothing is claimed"
        return f"speed-up {speed_up.get('ratio')}, interval {speed_up.get('low')} to {speed_up.get('high')}, computed again from the runs"

    def best_json(self) -> Check:
        """Compare ``best.json`` with ``summary.json``."""
        path = self.folder / "best.json"

        def compare() -> list[str]:
            best = read_summary(path)
            if self.summary.get("trial") is None:
                return []
            return list(_value_differences(best, self.summary, "")) if best else [f"{path}: is not there"]

        if self.summary.get("trial") is None and not path.exists():
            return Check(name="best.json", note="nothing is exported", is_made=False)
        return _check("best.json", compare, "says what summary.json says")

    def best_yaml(self) -> Check:
        """Compare ``best.yaml`` with the trial that is exported."""
        trial = self.summary.get("trial")
        if trial is None:
            return Check(name="best.yaml", note="nothing is exported", is_made=False)
        return _check("best.yaml", lambda: list(self._experiment_differences(trial)), f"the configuration of trial {trial}")

    def _experiment_differences(self, trial: int) -> Iterator[str]:
        path, result = self.folder / "best.yaml", self.stored.results.get(trial)
        if result is None:
            yield f"{path}: is of trial {trial}, which the study does not have"
            return
        text = path.read_text(encoding="utf-8")
        content = load_yaml(text, str(path))
        chosen = {
            str(key).removeprefix("override ").strip("/"): value
            for entry in content.get("defaults", ())
            if isinstance(entry, dict)
            for key, value in entry.items()
        }
        for key, value in without_secrets_in({"seed": result.seed, **result.values}).items():
            found = chosen[key] if key in chosen else _looked_up(content, key)
            written = (value, as_configured(value))  # as it is for an option, or a sweep of the command line
            if repr(found) not in map(repr, json.loads(json.dumps(written))) and trial != self.stored.baseline:
                yield f"{key}: found {shorten_text(found)}, expected {shorten_text(value)}"
        confirmation = self.stored.confirmation(self.summary)
        comments = re.findall(r"^# (.*)$", text, re.MULTILINE)
        speed_up = confirmation.speed_up if confirmation else None
        measured = NOT_SHOWN if speed_up is None else measured_ratio(speed_up)  # earlier versions wrote it whatever was shown
        for line in claim_comments(self.stored.name, self.stored.target, confirmation) if confirmation else ():
            if line not in comments and line.replace(NOT_SHOWN, measured) not in comments:
                yield f"its comments do not say: {line}"

    def mlflow(self, uri: str | None) -> Check:
        """Compare the study's runs in MLflow with the storage; skipped where it was not tracked there and no store was named."""
        stored, tracker = self.stored, self.summary.get("tracker")
        is_expected = uri is not None or str(tracker).endswith(".MlflowTracker")
        if not is_expected and tracker is not None:
            return Check(name="MLflow", note=f"the study was tracked with {str(tracker).rpartition('.')[2]}", is_made=False)
        try:
            where, runs = tracked_study(stored.name, self.folder, str(self.summary.get("experiment", "")), uri)
        except AutotuneError as error:
            if uri is not None:
                raise
            return Check(name="MLflow", note=f"{error}; tracking.uri=URI names another store", is_made=False)
        if runs is None:
            said = f"{where} has no run of study {stored.name}"
            return Check(name="MLflow", differences=(said,)) if is_expected else Check(name="MLflow", note=said, is_made=False)
        expected = {search_name(number): result for number, result in stored.results.items()}
        expected |= {confirmation_name(trial, number): result for (trial, number), result in stored.runs.items()}
        return _check("MLflow", lambda: list(self._run_differences(expected, runs)), f"{len(expected)} runs in {where}")

    def _run_differences(self, expected: Mapping[str, TrialResult], runs: Mapping[str, Any]) -> Iterator[str]:
        missing = [name for name in expected if name not in runs]
        if missing:
            command = f"; written by: {self.summary['command']}" if "command" in self.summary else ""
            yield f"{len(missing)} of {len(expected)} runs are not there: {_listed(missing)}{command}"
        for name, result in expected.items():
            if (run := runs.get(name)) is None:
                continue
            if run.outcome != str(result.outcome):
                yield f"{name}: outcome: found {run.outcome}, expected {result.outcome}"
            score = self.stored.objective.score(result) if result.outcome is Outcome.REACHED else None
            if run.score != score and not (score is not None and run.score is not None and math.isclose(run.score, score, rel_tol=1e-12)):
                yield f"{name}: score: found {run.score}, expected {score}"
        others = [name for name, run in runs.items() if name not in expected and run.is_result]
        if others:
            yield f"{len(others)} runs are of no trial that the study has: {_listed(others)}"


def _check(name: str, compare: Callable[[], list[str]], note: str) -> Check:
    """Make a check; a file that cannot be read is a difference."""
    try:
        found = compare()
    except AutotuneError as error:
        found = [str(error)]
    except _UNREADABLE as error:
        found = [f"cannot be read: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"]
    return Check(name=name, differences=tuple(found), note=note)


def _row_differences(found: Path, expected: Path) -> Iterator[str]:
    """What differs between two tables of trials, a line each."""
    tables = []
    for path in (found, expected):
        with path.open(newline="", encoding="utf-8") as file:
            tables.append({row.get("trial"): row for row in csv.DictReader(file)})
    one, other = tables
    for trial in other:
        if trial not in one:
            yield f"trial {trial}: has no row"
            continue
        for column, value in other[trial].items():
            if not _is_same_cell(one[trial].get(column), value):
                yield f"trial {trial}: {column}: found {shorten_text(one[trial].get(column))}, expected {shorten_text(value)}"
    yield from (f"trial {str(trial)[:20]}: has a row, and is no trial of the study" for trial in one if trial not in other)


def _is_same_cell(found: str | None, expected: str) -> bool:
    """Whether two cells hold one value: earlier versions wrote True, and lists with spaces, and texts without quotes."""
    if found == expected or found is None:
        return found == expected
    with suppress(ConfigError):
        return (expected == "null" and not found) or override_text(read_value(found)) == override_text(read_value(expected))
    return False


def _value_differences(found: Any, expected: Any, where: str) -> Iterator[str]:
    """What differs between two values of plain data, a line each, with the key."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in dict.fromkeys([*expected, *found]):
            yield from _value_differences(found.get(key), expected.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _value_differences(one, other, f"{where}.{index}")
    elif found != expected:
        numbers = [value for value in (found, expected) if isinstance(value, int | float) and not isinstance(value, bool)]
        share = f" (off by {(numbers[0] - numbers[1]) / numbers[1]:.2g} of it)" if len(numbers) == 2 and numbers[1] else ""
        yield f"{where}: found {shorten_text(found)}, expected {shorten_text(expected)}{share}"


def _looked_up(content: Any, key: str) -> Any:
    for part in key.replace("/", ".").split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _listed(names: Sequence[str]) -> str:
    shown = list(itertools.islice(names, 5))
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
