"""URLs are told from paths, and refused where only a path will do; whether a database's server listens."""

from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.remote.url import check_listens, is_url, kind_of_database, refuse_url, user_path


@pytest.mark.parametrize(
    ("location", "found"),
    [("data", False), ("/data", False), ("~/data:/x", False), ("a:b", False), ("s3://b/x", True), ("s3:/b/x", True), ("zip::s3://b", True)],
)
def test_a_url_is_told_from_a_path(location: str, found: bool) -> None:
    assert is_url(location) is found
    assert is_url(Path(location)) is found


def test_where_only_a_path_will_do_a_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"study\.folder: found the URL s3://bucket/x, accepted is a folder of this machine"):
        refuse_url("s3://bucket/x", "study.folder")
    refuse_url("outputs", "study.folder")


def test_a_driver_is_no_part_of_a_databases_kind() -> None:
    assert kind_of_database("postgresql+psycopg://host/db") == "postgresql"
    assert kind_of_database("sqlite:///a.db") == "sqlite"


def test_a_host_on_which_nothing_listens_is_told() -> None:
    with pytest.raises(OSError, match="refused"):
        check_listens("postgresql://me@127.0.0.1:1/db")
    check_listens("postgresql:///db?host=/tmp")  # a socket: nothing to ask
    check_listens("sqlite:////nowhere/a.db")


def test_a_user_s_home_is_taken_and_that_of_nobody_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of_mine")
    assert user_path("~/studies") == Path("/home/of_mine/studies")
    assert user_path(Path("~no-such-user/studies")) == Path("~no-such-user/studies")
