"""A study whose storage and MLflow store are databases of a real PostgreSQL server."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from autotune.search.stored_trials import finished_results
from autotune.search.study import confirmations, read_study
from tests.postgresql import PostgreSql, running_postgresql

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSql]:
    with running_postgresql() as server:
        yield server


def test_a_study_is_whole_and_in_order_in_both_stores_and_goes_on_from_them(server: PostgreSql, commands: Any, tmp_path: Path) -> None:
    storage, tracking = server.new_database("studies"), server.new_database("mlflow")
    command = ("experiment=cnn_smoke", "study.name=both", f"search.storage='{storage}'", f"tracking.uri='{tracking}'", "target.value=0.88")
    first = commands.run(*command, "search.num_trials=4", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    ended = commands.run(*command, "search.num_trials=7", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "outputs/both/study.log").exists()

    study = read_study("both", tmp_path / "outputs/both", storage_url=storage)
    results = finished_results(study)
    assert sorted(results) == list(range(7))
    with (tmp_path / "outputs/both/trials.csv").open(newline="") as file:
        assert sorted(int(row["trial"]) for row in csv.DictReader(file)) == list(range(7))

    client = MlflowClient(tracking)
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()], order_by=["attributes.start_time ASC"])
    of_trials = [each for each in runs if each.data.tags["autotune.phase"] == "search"]
    assert [int(each.data.tags["autotune.trial"]) for each in of_trials] == list(range(7))
    assert all(each.info.end_time is not None for each in runs)
    assert {each.data.tags["autotune.outcome"] for each in of_trials} == {each.outcome.value for each in results.values()}
    assert sum(each.data.tags["autotune.phase"] == "confirm" for each in runs) == len(confirmations(study))
    assert sum(each.data.tags["autotune.phase"] == "study" for each in runs) == 1
