"""Databases by URL: what may be shown of one, and whether something listens."""

import pytest

from autotune.database_url import check_listens, kind_of_database, without_password


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        ("search.storage=postgresql+psycopg://me:p%40ss@host:5/db", "search.storage=postgresql+psycopg://me:***@host:5/db"),
        ("http://me:secret@host:5000", "http://me:***@host:5000"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("sqlite:////tmp/a:b@c.db", "sqlite:////tmp/a:b@c.db"),
        ("no URL: at all@", "no URL: at all@"),
    ],
)
def test_passwords_are_not_shown(text: str, shown: str) -> None:
    assert without_password(text) == shown


def test_a_driver_is_no_part_of_a_databases_kind() -> None:
    assert kind_of_database("postgresql+psycopg://host/db") == "postgresql"
    assert kind_of_database("sqlite:///a.db") == "sqlite"


def test_a_host_on_which_nothing_listens_is_told() -> None:
    with pytest.raises(OSError, match="refused"):
        check_listens("postgresql://me@127.0.0.1:1/db")
    check_listens("postgresql:///db?host=/tmp")  # a socket: nothing to ask
    check_listens("sqlite:////nowhere/a.db")
