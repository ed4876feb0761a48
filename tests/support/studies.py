"""What a study leaves: the rows of its tables and its runs in MLflow."""

import csv
import itertools
from pathlib import Path
from typing import Any


def rows_of(table: Path) -> list[dict[str, str]]:
    """Rows of a CSV file; none while it is not there."""
    if not table.is_file():
        return []
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def runs_of(store: Path | str) -> list[Any]:
    """All runs, the oldest first, of an MLflow store at a URL or in ``mlflow.db`` of a folder."""
    from mlflow import MlflowClient  # takes seconds, which tests of rows do without

    client = MlflowClient(store if isinstance(store, str) else f"sqlite:///{store}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return [*client.search_runs(experiments, order_by=["attributes.start_time ASC"])]


def trained_at_once(trace: Path) -> bool:
    """Whether two trials were ever in training at the same time."""
    spans = [
        (float(row["started_seconds"]), float(row["stopped_seconds"])) for row in rows_of(trace)
    ]
    return any(
        one[0] < other[1] and other[0] < one[1] for one, other in itertools.combinations(spans, 2)
    )
