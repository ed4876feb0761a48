"""A study's storage in a database that does not answer, restarts, or stays away."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.errors import ConfigError, StudyError
from autotune.search import database
from autotune.search.database import told_storage_errors
from autotune.search.study import Study, open_study, read_study
from tests.postgresql import PostgreSql, running_postgresql


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSql]:
    with running_postgresql() as server:
        yield server


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:secret@127.0.0.1:1/db", "refused"),
        ("postgresql+absent://me:secret@127.0.0.1/db", "refused|absent"),
        ("sqlite:////proc/absent/a.db", "unable to open"),
        ("s3://bucket/db", "s3"),
        ("nonsense", "URL"),
    ],
)
def test_a_database_that_cannot_be_opened_is_one_line(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        _open(tmp_path, url)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "accepted is null, or a database" in str(caught.value)


@pytest.mark.store
def test_a_database_that_restarts_is_waited_for(server: PostgreSql, tmp_path: Path) -> None:
    url = server.new_database("restarts")
    study = _open(tmp_path, url)
    study.set_user_attr("before", 1)

    def restart() -> None:
        time.sleep(1)
        server.start()

    server.stop()
    restarting = threading.Thread(target=restart)
    restarting.start()
    study.set_user_attr("after", 2)
    restarting.join()
    known = read_study("s", tmp_path, storage_url=url).user_attrs
    assert (known["before"], known["after"]) == (1, 2)


@pytest.mark.store
def test_one_that_stays_away_is_one_line_with_the_command_that_goes_on(
    server: PostgreSql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = _open(tmp_path, server.new_database("stays_away"))
    monkeypatch.setattr(database, "PATIENCE_SECONDS", 0.1)
    server.stop()
    try:
        with (
            pytest.raises(StudyError, match=r"went away .*goes on with: python -m autotune x") as caught,
            told_storage_errors("python -m autotune x"),
        ):
            study.set_user_attr("after", 2)
    finally:
        server.start()
    assert "\n" not in str(caught.value)


def _open(folder: Path, url: str) -> Study:
    study, _ = open_study("s", folder, storage_url=url, make_sampler=_sampler, seed=0, definition={})
    return study


def _sampler(seed: int) -> object:
    import optuna

    return optuna.samplers.RandomSampler(seed=seed)
