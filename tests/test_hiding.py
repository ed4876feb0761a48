"""Secrets are hidden however a text holds them, and what holds none is left as it is."""

import logging
import re
import string
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.errors import ConfigError
from autotune.hiding import LogFormatter, without_secrets, without_secrets_in
from tests.fuzz import examples

CANARY = "cAnArY7f3Q"
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        ("search.storage=postgresql+psycopg://me:p%40ss@host:5/db", "search.storage=postgresql+psycopg://me:***@host:5/db"),
        ("http://me:secret@host:5000", "http://me:***@host:5000"),
        ("postgresql://host/db?user=me&password=x&sslmode=require", "postgresql://host/db?user=me&password=***&sslmode=require"),
        ("https://host/x.csv?token=x#top", "https://host/x.csv?token=***#top"),
        ("postgresql://user@dom:secret@host/db", "postgresql://user@dom:***@host/db"),
        ("postgresql://me:pa/ss@host/db", "postgresql://me:***@host/db"),
        ("//me:p@ss@host/x", "//me:***@host/x"),
        ("http://me:0}a,b@host/x", "http://me:***@host/x"),
        ("data.root=zip::https://me:a b@host/x.zip", "data.root=zip::https://me:***@host/x.zip"),
        ("{'root': 'zip::https://me:a b@host/x.zip'}", "{'root': 'zip::https://me:***@host/x.zip'}"),
        ("https://abc123@host/x", "https://***@host/x"),
        ("https://abc123@host:5432/x @", "https://***@"),
        ("cannot connect to 'mysql://me:a b@host/db' now", "cannot connect to 'mysql://me:***@host/db' now"),
        ("s3://b/x?X-Amz-Signature=1&X-Amz-Credential=2&versionId=3", "s3://b/x?X-Amz-Signature=***&X-Amz-Credential=***&versionId=3"),
        ("https://h/x?sv=1&se=2&sig=3%3D", "https://h/x?sv=***&se=***&sig=***"),
        ("https://h/x?AWSAccessKeyId=1&Signature=2", "https://h/x?AWSAccessKeyId=***&Signature=***"),
        ("https://h/x#access_token=1&state=2", "https://h/x#access_token=***&state=2"),
        ("https://h/?to=https%3A%2F%2Fme%3Ax%40k%2F", "https://h/?to=***"),
        ("host=h password=x dbname=d", "host=h password=*** dbname=d"),
        ("WANDB_API_KEY=0123456789abcdef", "WANDB_API_KEY=***"),
        ("{'Authorization': 'Bearer 0123456789'}", "{'Authorization': '***'}"),
    ],
)
def test_a_secret_is_hidden_and_nothing_else(text: str, expected: str) -> None:
    assert without_secrets(text) == expected


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
        "loss: token_cross_entropy",
        "num_tokens: 128, model.token=5",
        "password=null secret: None",
        "Train simple_cnn on digits until accuracy is 0.97.",
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


WORDS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
AROUND = st.text(string.ascii_letters + string.digits + "!$()*+,.:;<=>[]^_`{|}~-\\%&#?/ @", max_size=5)
"""What a password may have beside the canary; quotes and line ends are tested apart."""
SCHEMES = st.sampled_from(["postgresql", "postgresql+psycopg", "mysql", "http", "https", "ftp", "s3", "sftp", "redis", "zip::https", "gs"])
PARAMETERS = st.sampled_from(
    [
        "password",
        "pwd",
        "token",
        "access_token",
        "sig",
        "se",
        "X-Amz-Signature",
        "X-Amz-Credential",
        "X-Amz-Security-Token",
        "X-Goog-Signature",
        "AWSAccessKeyId",
        "Signature",
        "sas_token",
        "api_key",
        "sslpassword",
        "client_secret",
        "x%2Damz%2Dsignature",
    ]
)
KEYS = st.sampled_from(["search.storage", "tracking.uri", "data.root", "+data.path", "technique.checkpoint", "checkpoint.folder"])


@st.composite
def urls(draw: Any) -> str:
    """A URL that holds the canary in one place."""
    scheme, host, path = draw(SCHEMES), draw(WORDS) + draw(st.sampled_from(["", ".org", ":5432"])), "/" + draw(WORDS)
    place = draw(st.sampled_from(["password", "encoded", "token", "query", "fragment", "nested"]))
    raw = draw(AROUND.filter(lambda text: "@" not in text)).strip() + CANARY + draw(AROUND).strip()
    if place == "password":
        kept = "".join(letter for letter in raw if letter not in ("/?#" if not scheme.startswith(("post", "my", "redis")) else ""))
        assume(not re.match(r"\d{1,5}\W*\s", kept))  # reads as a port, and what is said after it
        return f"{scheme}://{draw(WORDS)}:{kept}@{host}{path}"
    if place == "encoded":
        return f"{scheme}://{draw(WORDS)}%40dom:{quote(raw, safe='')}@{host}{path}"
    if place == "token":
        return f"https://{quote(raw, safe='')}@{host}{path}"
    value, others = quote(raw, safe="*,;:()!"), draw(st.lists(WORDS.map(lambda word: f"n{word}=1"), max_size=2))
    if place == "nested":
        return f"{scheme}://{host}{path}?to=" + quote(f"https://me:{quote(raw, safe='')}@{host}", safe="")
    parameters = "&".join(draw(st.permutations([f"{draw(PARAMETERS)}={value}", *others])))
    return f"{scheme}://{host}{path}{'?' if place == 'query' else '#'}{parameters}"


@examples(300)
@given(urls(), KEYS)
def test_no_part_of_a_url_shows_a_secret(url: str, key: str) -> None:
    for text in (url, f"{key}={url}", f"{key}='{url}'", f'{{"uri": "{url}"}}', repr({"a": [url]})):
        hidden = without_secrets(text)
        assert CANARY not in hidden
        assert without_secrets(hidden) == hidden
    assert CANARY not in str(without_secrets_in({"a": [{"b": url}]}))


@examples(200)
@given(urls().filter(lambda url: " " not in url), st.text(string.ascii_letters + " .,:()'\n", max_size=30), st.text(max_size=30))
def test_a_library_that_tells_a_url_tells_no_secret(url: str, before: str, after: str) -> None:
    assert CANARY not in without_secrets(f"{before} {url} {after}")
    assert CANARY not in str(ConfigError(f"{before}\n{url}: {after}"))


@examples(200)
@given(
    st.sampled_from(["password", "PGPASSWORD", "db_password", "api_key", "WANDB_API_KEY", "token", "secret", "aws_secret_access_key"]),
    st.sampled_from(["=", ": ", " = "]),
    st.sampled_from(["", "'", '"']),
    st.text(string.ascii_letters + string.digits + "/+=_-.~!*", min_size=0, max_size=20),
)
def test_the_value_of_a_secrets_name_is_not_shown(name: str, separator: str, mark: str, more: str) -> None:
    assert CANARY not in without_secrets(f"options: host=h {name}{separator}{mark}{CANARY}{more}{mark} port=5")
    assert CANARY not in without_secrets(repr({"a": 1, name: CANARY + more}))
    assert CANARY not in str(without_secrets_in({"a": [{name: f"{CANARY} {more}"}]}))


@examples(100)
@given(
    st.lists(
        st.sampled_from(["//", ":", "@", "a", "?", "=", "&", "%25", "'", '"', "hook", "password", "eyJ", " ", "http://"]),
        max_size=20,
    )
)
def test_no_text_takes_long_to_look_through(parts: list[str]) -> None:
    without_secrets("".join(parts) * 500)  # a text for which the time grew with the square of its length would end at the time limit


@pytest.mark.parametrize("part", [":1", "%", "%4", "http://", "//a:", "http://a/", "a.", "postgres://a:1"])
def test_the_time_for_a_long_text_does_not_grow_with_its_square(part: str) -> None:
    before = time.process_time()
    without_secrets("1&" + part * (64_000 // len(part)))
    assert time.process_time() - before < 10  # the square of the length took longer


def test_a_log_has_no_secret_in_its_messages_and_tracebacks() -> None:
    try:
        raise OSError(f"cannot reach postgresql://me:{CANARY}@host/db")
    except OSError:
        import sys

        record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "password=%s", (CANARY,), sys.exc_info())
    text = LogFormatter().format(record)
    assert CANARY not in text
    assert "postgresql://me:***@host/db" in text
