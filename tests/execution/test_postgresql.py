"""A study whose storage and MLflow store are databases of a real PostgreSQL server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.search.study import confirmations, finished_results, read_study
from tests.support.patience import exit_code, wait_until
from tests.support.postgresql import PostgreSql, running_postgresql
from tests.support.studies import rows_of, runs_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSql]:
    with running_postgresql() as server:
        yield server


def test_a_study_is_whole_and_in_order_in_both_stores_and_goes_on_from_them(
    server: PostgreSql, commands: Any, tmp_path: Path
) -> None:
    storage, tracking = server.new_database("studies"), server.new_database("mlflow")
    command = (
        "experiment=cnn_smoke",
        "study.name=both",
        f"search.storage='{storage}'",
        f"tracking.uri='{tracking}'",
        "target.value=0.88",
    )
    first = commands.run(*command, "search.num_trials=4", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    ended = commands.run(*command, "search.num_trials=7", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "outputs/both/study.log").exists()

    study = read_study("both", tmp_path / "outputs/both", storage_url=storage)
    results = finished_results(study)
    assert sorted(results) == list(range(7))
    assert sorted(
        int(row["trial"]) for row in rows_of(tmp_path / "outputs/both/trials.csv")
    ) == list(range(7))

    runs = runs_of(tracking)
    of_trials = [each for each in runs if each.data.tags["autotune.phase"] == "search"]
    assert [int(each.data.tags["autotune.trial"]) for each in of_trials] == list(range(7))
    assert all(each.info.end_time is not None for each in runs)
    assert {each.data.tags["autotune.outcome"] for each in of_trials} == {
        each.outcome.value for each in results.values()
    }
    assert sum(each.data.tags["autotune.phase"] == "confirm" for each in runs) == len(
        confirmations(study)
    )
    assert sum(each.data.tags["autotune.phase"] == "study" for each in runs) == 1


def test_a_study_whose_server_crashes_ends_in_one_line_and_goes_on_once_it_is_back(
    server: PostgreSql, commands: Any, tmp_path: Path
) -> None:
    storage, folder = server.new_database("crash"), tmp_path / "outputs/crash"
    command = (
        "experiment=cnn_smoke",
        "study.name=crash",
        f"search.storage='{storage}'",
        "search=tpe",
        "stopping=none",
        "target.value=0.9",
        "target.max_train_seconds=60",
        "epochs=range(25,40)",
        "optimizer.lr=interval(1e-4,1e-3)",
        "search.num_trials=12",
        "confirm.max_runs=0",
    )
    process = commands.start(*command, folder=tmp_path)

    def num_rows() -> int:
        return len(rows_of(folder / "trials.csv"))

    wait_until(lambda: num_rows() >= 3, process=process, said=(tmp_path / "err.txt").read_text)
    server.kill()
    try:
        assert exit_code(process) == 2
    finally:
        server.start()
    said = (tmp_path / "err.txt").read_text()
    assert said.count("\n") == 1, said
    assert "autotune: search.storage: " in said
    assert (
        "what was in it is kept, and the study continues with: python -m autotune"
        " experiment=cnn_smoke" in said
    )
    before = num_rows()

    assert commands.run(*command, folder=tmp_path).returncode in (0, 3)
    results = finished_results(read_study("crash", folder, storage_url=storage))
    assert before <= len(results)
    assert sorted(results) == sorted(int(row["trial"]) for row in rows_of(folder / "trials.csv"))
    assert len(results) == 12
    runs = runs_of(tmp_path)
    ended = [
        each
        for each in runs
        if each.data.tags["autotune.phase"] == "search" and each.info.status != "KILLED"
    ]
    assert sorted(int(each.data.tags["autotune.trial"]) for each in ended) == sorted(results)
    assert all(each.info.status != "RUNNING" for each in runs)
