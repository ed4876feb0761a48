"""Passwords, tokens and signatures in URLs are hidden, and what holds none is left as it is."""

import logging
import sys
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.redaction import LogFormatter, without_secrets, without_secrets_in

CANARY = "cAnArY7f3Q"
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        (
            "search.storage=postgresql+psycopg://me:p%40ss@host:5/db",
            "search.storage=postgresql+psycopg://me:***@host:5/db",
        ),
        ("http://me:secret@host:5000", "http://me:***@host:5000"),
        ("postgresql://me:pa/ss@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:5432@host/db", "postgresql://me:***@host/db"),
        ("{'root': 'zip::https://me:a@host/x.zip'}", "{'root': 'zip::https://me:***@host/x.zip'}"),
        (
            "postgresql://host/db?user=me&password=x&sslmode=require",
            "postgresql://host/db?user=me&password=***&sslmode=require",
        ),
        ("https://host/x.csv?token=x#top", "https://host/x.csv?token=***#top"),
        (
            "s3://b/x?X-Amz-Signature=1&X-Amz-Credential=2&versionId=3",
            "s3://b/x?X-Amz-Signature=***&X-Amz-Credential=***&versionId=3",
        ),
        ("https://h/x?sv=1&sig=3%3D", "https://h/x?sv=1&sig=***"),
        (
            "https://h/x?AWSAccessKeyId=1&Signature=2",
            "https://h/x?AWSAccessKeyId=***&Signature=***",
        ),
        ("https://h/x#access_token=1&state=2", "https://h/x#access_token=***&state=2"),
    ],
)
def test_a_secret_is_hidden_and_nothing_else(text: str, expected: str) -> None:
    assert without_secrets(text) == expected
    assert without_secrets(expected) == expected
    assert without_secrets_in({"a": [text, 1, (text,)]}) == {"a": [expected, 1, (expected,)]}
    assert str(ConfigError(f"x: {text}")) == f"x: {expected}"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me@host/db",
        "sqlite:////tmp/a:b@c.db",
        "no URL: at all@",
        "http://localhost:5000/a@b",
        "http://[::1]:5000/a@b?page=2#top",
        "see http://host:80, and mail me@host",
        "abfs://container@account.dfs.core.windows.net/x",
        "s3://bucket/a?b",
        "loss: token_cross_entropy // 2",
        "num_tokens: 128, model.token=5",
    ],
)
def test_a_text_without_a_secret_is_left_as_it_is(text: str) -> None:
    assert without_secrets(text) == text


def test_what_ships_with_the_package_holds_no_secret() -> None:
    files = [*ROOT.glob("conf/**/*.yaml"), *ROOT.glob("search_spaces/*.yaml"), ROOT / "README.md"]
    assert len(files) > 20
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            assert without_secrets(line) == line


def test_a_log_has_no_secret_in_its_messages_and_tracebacks() -> None:
    try:
        raise OSError(f"cannot reach postgresql://me:{CANARY}@host/db")
    except OSError:
        record = logging.LogRecord(
            "a", logging.ERROR, "a.py", 1, "at http://me:%s@host", (CANARY,), sys.exc_info()
        )
    text = LogFormatter().format(record)
    assert CANARY not in text
    assert "postgresql://me:***@host/db" in text
