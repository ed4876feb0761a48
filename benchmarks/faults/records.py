"""What each record of a study says of its runs, read without autotune's own code, and where the
records contradict each other.

The records are the storage (by Optuna), ``trials.csv``, ``recording/`` (by PyArrow), ``best.json``
and MLflow (by its client). A run is named as MLflow's tag ``autotune.run`` names it: ``trial-7``,
``confirm-7-0``.
"""

import contextlib
import csv
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import pyarrow.parquet as pq
import yaml
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

STOLEN_SECONDS = 1.0
"""Seconds that the clock of an unmarked trial may be off from what its training took by its own
count."""


class Point(NamedTuple):
    """What a training of one run trains; no two runs of a study have the same."""

    seed: int
    rate: float
    width: int


def point_of(line: Mapping[str, Any]) -> Point:
    """What the training trains that has written a line into the diary."""
    return Point(line["seed"], line["rate"], line["width"])


@dataclass(frozen=True)
class Run:
    """How one record says that a run ended; None where the record does not say it."""

    outcome: str
    seed: int | None
    num_evaluations: int | None
    metric: float | None
    """The last evaluation's; None also where it is not finite."""

    def contradicts(self, other: "Run") -> bool:
        """Whether both say something of the same thing, and not the same."""
        pairs = (
            (self.outcome, other.outcome),
            (self.seed, other.seed),
            (self.num_evaluations, other.num_evaluations),
        )
        if any(None not in pair and pair[0] != pair[1] for pair in pairs):
            return True
        return (
            self.metric is not None
            and other.metric is not None
            and not math.isclose(self.metric, other.metric, rel_tol=1e-6)
        )


@dataclass(frozen=True)
class Stored:
    """What the storage holds."""

    results: Mapping[str, Mapping[str, Any]]
    """Results as they were stored, by run, of trials that ended or only have to be told."""
    open_trials: Sequence[str]
    """Trials that are still running; a point that waits for a trial, since an earlier one was
    lost, is one that more trials begin with."""
    retried: Mapping[int, int]
    """Trials that repeat another one, by that one's number."""
    num_unfinished: int
    """Trials that are running or paused, and points that wait for a trial."""

    def point(self, name: str) -> Point:
        """What a run trains."""
        result = self.results[name]
        values = {key.rpartition(".")[2]: value for key, value in result["values"].items()}
        return Point(result["seed"], values["rate"], values["width"])

    def runs(self, *, finite: bool = False) -> dict[str, Run]:
        """Runs by name.

        ``finite`` leaves evaluations out whose metric is not, as MLflow has none of them.
        """
        return {name: _run_of(result, finite=finite) for name, result in self.results.items()}


def read_storage(name: str, folder: Path, url: str | None) -> Stored:
    """Read a study's storage; without a journal it is empty."""
    if url is None and not (folder / "study.log").is_file():
        return Stored({}, [], {}, 0)
    storage: BaseStorage = (
        JournalStorage(JournalFileBackend(str(folder / "study.log")))
        if url is None
        else RDBStorage(url)
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        return Stored({}, [], {}, 0)
    trials = study.get_trials(deepcopy=False)
    results = {
        f"trial-{trial.number}": _whole(
            trial.user_attrs["autotune:result"], trial.user_attrs, "autotune:evaluations:"
        )
        for trial in trials
        if "autotune:result" in trial.user_attrs
    }
    for key, value in study.user_attrs.items():
        is_run = key.startswith("autotune:confirmed:") and key.count(":") == 3
        if is_run and "side" not in value["values"]:  # which runs.csv has, of a comparison
            arm, number = key.split(":")[2:]
            results[f"confirm-{arm}-{number}"] = _whole(value, study.user_attrs, f"{key}:")
    attribute = "autotune:retry_of"
    return Stored(
        results,
        [
            f"trial-{trial.number} {trial.state.name}"
            for trial in trials
            if trial.state is TrialState.RUNNING
        ],
        {
            trial.user_attrs[attribute]: trial.number
            for trial in trials
            if attribute in trial.user_attrs
        },
        sum(not trial.state.is_finished() for trial in trials),
    )


def _whole(result: Mapping[str, Any], attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """A result with its evaluations, which are stored beside it, each with its number."""
    numbered: dict[int, Any] = {}
    for key, value in attributes.items():
        if key.startswith(prefix):
            numbered |= dict(value)
    return {**result, "evaluations": [numbered[number] for number in sorted(numbered)]}


def read_table(folder: Path) -> list[tuple[str, Run]]:
    """Read the rows of ``trials.csv``."""
    with (folder / "trials.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        (
            f"trial-{row['trial']}",
            Run(
                row["outcome"],
                int(row["seed"]),
                int(row["num_evaluations"]),
                _finite(row["metric"] or "nan"),
            ),
        )
        for row in rows
    ]


def read_recording(folder: Path) -> list[tuple[str, Run]]:
    """Read the trials of a recording, those of ``study.yaml`` as well as those of both tables."""
    outcomes = yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8"))["outcomes"]
    curves = pq.read_table(folder / "curves.parquet").to_pydict()
    metrics: dict[int, list[tuple[int, float]]] = {}
    for trial, step, metric in zip(curves["trial"], curves["step"], curves["metric"], strict=True):
        metrics.setdefault(trial, []).append((step, metric))
    numbers = pq.read_table(folder / "trials.parquet").to_pydict()["trial"]
    told = [*numbers, *(number for number in outcomes if number not in numbers)]
    return [
        (
            f"trial-{number}",
            _recorded(outcomes.get(number, "none"), sorted(metrics.get(number, []))),
        )
        for number in told
    ]


def _recorded(outcome: str, curve: Sequence[tuple[int, float]]) -> Run:
    return Run(outcome, None, len(curve), _finite(curve[-1][1]) if curve else None)


def read_mlflow(
    uri: str, study: str, results: Collection[str]
) -> tuple[list[tuple[str, Run]], list[str]]:
    """Read the runs of a study from MLflow, and the names of those that are still open.

    Runs that were interrupted are left out, and those that are repeated: LOST or CONTENDED, and
    none of the storage's ``results``.
    """
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    page, found = None, []
    while page is None or page.token:
        page = client.search_runs(
            experiments, f"tags.`autotune.study` = '{study}'", page_token=page and page.token
        )
        found += page
    runs, still_open = [], []
    for run in found:
        tags = run.data.tags
        name, outcome = tags.get("autotune.run"), tags.get("autotune.outcome")
        is_repeated = outcome in ("LOST", "CONTENDED") and name not in results
        if run.info.status in ("RUNNING", "SCHEDULED"):
            still_open.append(name or "the study's")
        elif name is not None and outcome not in (None, "INTERRUPTED") and not is_repeated:
            history = client.get_metric_history(run.info.run_id, "metric")
            metric = _finite(max(history, key=lambda each: each.step).value) if history else None
            steps = len({each.step for each in history})
            runs.append((name, Run(outcome, int(tags["autotune.seed"]), steps, metric)))
    return runs, still_open


def open_runs(database: Path) -> list[str]:
    """Names of the runs that are open in MLflow's SQLite database, which is not made where it is
    not there, nor brought up to date.
    """
    if not database.is_file():
        return []
    query = "select name from runs where status in ('RUNNING', 'SCHEDULED')"
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        ) as connection:
            return [name for (name,) in connection.execute(query)]
    except sqlite3.OperationalError:  # killed as it made its tables
        return []


def read_best(folder: Path, stored: Stored) -> Iterator[str]:
    """Tell where ``best.json`` says something else than the storage does.

    Nothing to tell where there is none.
    """
    if not (folder / "best.json").is_file():
        return
    best = json.loads((folder / "best.json").read_text(encoding="utf-8"))
    trials = {name: result for name, result in stored.results.items() if name.startswith("trial-")}
    outcomes = Counter(result["outcome"] for result in trials.values())
    if best["num_trials"] != len(trials) or best["outcomes"] != dict(outcomes):
        yield (
            f"best.json: {best['num_trials']} trials {best['outcomes']}, storage: {len(trials)}"
            f" {dict(outcomes)}"
        )
    chosen = trials.get(f"trial-{best['trial']}", {})
    if chosen.get("overrides") != best["overrides"]:
        yield (
            f"best.json: trial {best['trial']} is {best['overrides']}, storage:"
            f" {chosen.get('overrides')}"
        )
    confirmed = {name for name in stored.results if name.startswith(f"confirm-{best['trial']}-")}
    if not 0 < best["best"]["num_runs"] <= len(confirmed):
        yield (
            f"best.json: {best['best']['num_runs']} runs of trial {best['trial']}, storage:"
            f" {len(confirmed)}"
        )


def contradictions(
    stored: Stored, others: Mapping[str, Iterable[tuple[str, Run]]]
) -> Iterator[str]:
    """Tell where another record says something else of a run than the storage does, or has runs
    that the storage does not have.
    """
    for source, told in others.items():
        runs = stored.runs(finite=source == "MLflow")
        for name, run in told:
            if name not in runs:
                yield f"{source}: {name} is not in the storage"
            elif runs[name].contradicts(run):
                yield f"{source}: {name} is {run}, storage: {runs[name]}"
    yield from (f"storage: {trial} at the end" for trial in stored.open_trials)


def missing(stored: Stored, others: Mapping[str, Sequence[tuple[str, Run]]]) -> Iterator[str]:
    """Tell which runs of the storage another record lacks."""
    for source, told in others.items():
        names = {name for name, _ in told}
        yield from (
            f"{source}: no {name}"
            for name in stored.results
            if name not in names and (source == "MLflow" or name.startswith("trial-"))
        )


def doubles(journal: Path, others: Mapping[str, Iterable[tuple[str, Run]]]) -> Iterator[str]:
    """Tell which runs a record has twice; of the journal, which results were written twice."""
    for source, told in others.items():
        counts = Counter(name for name, _ in told)
        yield from (
            f"{source}: {name} {count} times" for name, count in counts.items() if count > 1
        )
    written: Counter[str] = Counter()
    for line in (
        journal.read_text(encoding="utf-8", errors="replace").splitlines()
        if journal.is_file()
        else ()
    ):
        if '"autotune:result"' in line or '"autotune:confirmed:' in line:
            entry = json.loads(line)
            name = next(iter(entry["user_attr"]))
            if name.count(":") <= 3:  # else it has evaluations
                written[f"{entry.get('trial_id', '')} {name}"] += 1
    yield from (f"journal: {name} {count} times" for name, count in written.items() if count > 1)


def stolen(stored: Stored, diary: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tell which unmarked trials were charged for time that their training, by its own count,
    did not take.
    """
    own: dict[Point, float] = {}
    hung = set()
    for line in diary:
        point = point_of(line)
        if line["event"] == "report":
            own[point] = own.get(point, 0.0) + line["seconds"]
        elif line["event"] == "fault" and line["token"].startswith("hang"):
            hung.add(point)
    for name, result in stored.results.items():
        point = stored.point(name)
        if (
            result["contention"] is None
            and result["evaluations"]
            and point in own
            and point not in hung
        ):
            seconds = result["evaluations"][-1]["train_seconds"]
            if not own[point] / 2 - STOLEN_SECONDS <= seconds <= own[point] + STOLEN_SECONDS:
                yield f"{name}: told {seconds:.2f} s, trained {own[point]:.2f} s, and is not marked"


def unexpected(
    stored: Stored, diary: Sequence[Mapping[str, Any]], outcomes: Collection[str] | None
) -> Iterator[str]:
    """Tell which runs, unmarked, have another outcome than a fault in them may have, or neither a
    result nor a trial in their place.

    A run of a confirmation whose process was lost is made again under its name: a fault counts for
    the training that it happened in.
    """
    begun = {
        point_of(line): line["at"]
        for line in diary
        if line["event"] == "begin" and not line["part"]
    }
    failed = {
        point_of(line)
        for line in diary
        if line["event"] == "fault" and line["at"] >= begun[point_of(line)]
    }
    by_point = {stored.point(name): name for name in stored.results}
    values = {point[1:] for point in by_point}
    for point in failed if outcomes is not None else ():
        if point in by_point:
            result = stored.results[by_point[point]]
            outcome = result["outcome"]
            if outcome not in outcomes and result["contention"] is None:
                yield (
                    f"{by_point[point]} is {outcome} after the fault, expected is"
                    f" {' or '.join(sorted(outcomes))}"
                )
        elif point[1:] not in values:
            yield f"the trial of {point} has no result, and none is in its place"


def _run_of(result: Mapping[str, Any], *, finite: bool) -> Run:
    evaluations = [
        each for each in result["evaluations"] if not finite or math.isfinite(each["metric"])
    ]
    return Run(
        result["outcome"],
        result["seed"],
        len(evaluations),
        _finite(evaluations[-1]["metric"]) if evaluations else None,
    )


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
