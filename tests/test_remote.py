"""Files at URLs: fetched once a machine, written, refused in one line.

Clocks stand still meanwhile; official downloads.
"""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.registry import known_implementations

from autotune.errors import ConfigError, DataError
from autotune.remote import (
    check_listens,
    download_files,
    fetched,
    is_file,
    is_url,
    paused_while_waiting,
    refuse_url,
    user_path,
)
from autotune.workloads.splits import memory_mapped
from autotune.workloads.text import text
from tests.support.served import Server

KEY = "data.root"


@pytest.mark.parametrize(
    ("location", "found"),
    [
        ("data", False),
        ("/data", False),
        ("~/data:/x", False),
        ("a:b", False),
        ("s3://b/x", True),
        ("s3:/b", True),
        ("zip::s3://b", True),
    ],
)
def test_a_url_is_told_from_a_path(location: str, found: bool) -> None:
    assert is_url(location) is found


def test_paths_of_this_machine_need_no_fetching(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        fetched("~/x", KEY)
        == fetched(f"file://{tmp_path}/x", KEY)
        == user_path("~/x")
        == tmp_path / "x"
    )
    assert not is_file("~/x", KEY)
    assert user_path("~no-such-user/studies") == Path("~no-such-user/studies")
    assert not cache.exists()


def test_where_only_a_path_will_do_a_url_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"study\.folder: found the URL s3://bucket/x, use a folder of this machine",
    ):
        refuse_url("s3://bucket/x", "study.folder")
    refuse_url("outputs", "study.folder")


@pytest.mark.parametrize("url", ["s3x://bucket/x", "s3:/bucket/x", "http://127.0.0.1:9/x"])
def test_what_cannot_be_reached_is_one_line(url: str, cache: Path) -> None:
    with pytest.raises(DataError, match=rf"^{KEY}: {url}: .+$"):
        is_file(url, KEY)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        known_implementations,
        "far",
        {"class": "no_such_package.FileSystem", "err": "Install farfs to read it"},
    )
    with pytest.raises(
        DataError, match=rf"^{KEY}: far://place/x: ImportError: Install farfs to read it$"
    ):
        is_file("far://place/x", KEY)


def test_a_web_server_s_file_is_fetched_once_under_its_own_name(
    server: Server, cache: Path
) -> None:
    (server.folder / "a.csv").write_text("some text")
    code = f"from autotune.remote import fetched\nprint(fetched('{server.url}/a.csv', 'data.root'))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {process.communicate()[0].strip() for process in processes} | {
        str(fetched(f"{server.url}/a.csv", KEY))
    }
    (path,) = map(Path, paths)
    assert (path.name, path.read_text()) == ("a.csv", "some text")
    assert path.is_relative_to(cache)
    assert [line for line in server.asked if line.startswith("GET")] == ["GET /a.csv"]
    assert not is_file(f"{server.url}/secret/x", KEY)
    with pytest.raises(DataError, match=rf"^{KEY}: {server.url}/absent: "):
        fetched(f"{server.url}/absent", KEY)


def test_a_file_that_has_changed_is_fetched_again(
    memory: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload_bytes(memory, b"some text")
    old = fetched(f"{memory}/a", KEY)
    assert capsys.readouterr().err == f"fetching {memory}/a (0.0 MB) to {old.parent}\n"
    upload_bytes(memory, b"new text!")
    assert fetched(f"{memory}/a", KEY).read_bytes() == b"new text!"
    assert old.read_bytes() == b"some text", "a reader of the old file keeps it"


def test_a_fetch_that_breaks_off_leaves_no_file(
    memory: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_bytes(memory, b"content")

    def breaks_off(self: object, remote: str, local: str, **_: object) -> None:
        Path(local).write_bytes(b"n")
        raise ConnectionResetError(104, "Connection reset by peer")

    with monkeypatch.context() as patched:
        patched.setattr(type(fsspec.filesystem("memory")), "get_file", breaks_off)
        with pytest.raises(
            DataError, match=r"/a: ConnectionResetError: .*Connection reset by peer$"
        ):
            fetched(f"{memory}/a", KEY)
    assert fetched(f"{memory}/a", KEY).read_bytes() == b"content"


def upload_bytes(memory: str, content: bytes) -> None:
    fsspec.filesystem("memory").pipe(f"{memory}/a", content)


def test_data_sets_are_the_same_from_a_path_and_from_a_url(
    memory: str, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "set").mkdir()
    for name in ("train_inputs", "train_targets", "validation_inputs", "validation_targets"):
        np.save(tmp_path / "set" / f"{name}.npy", np.arange(20).reshape(10, 2))
    (tmp_path / "set" / "a.txt").write_text("abcd" * 40)
    fsspec.filesystem("memory").put(str(tmp_path / "set"), memory, recursive=True)
    mapped = memory_mapped(root=memory, scale=1, mean=None, std=None)["train"][0]
    assert isinstance(mapped, np.memmap)
    assert (mapped == np.arange(20).reshape(10, 2)).all()
    settings = {
        "length": 8,
        "max_characters": 100,
        "validation_fraction": 0.2,
        "test_fraction": 0.2,
        "min_count": 1,
    }
    here, there = (text(root=f"{root}/a.txt", **settings) for root in (tmp_path / "set", memory))  # type: ignore[arg-type]
    assert (here["train"][0] == there["train"][0]).all()


def test_clocks_stand_still_while_a_file_is_fetched_and_go_on_after_a_failure(
    memory: str, cache: Path
) -> None:
    said: list[str] = []

    @contextmanager
    def pause() -> Iterator[None]:
        said.append("stop")
        try:
            yield
        finally:
            said.append("go")

    with paused_while_waiting(pause):
        assert not is_file(f"{memory}/a", KEY)
        with pytest.raises(DataError):
            fetched(f"{memory}/a", KEY)
    is_file(f"{memory}/a", KEY)
    assert said == ["stop", "go", "stop", "go"]


def test_an_official_file_is_downloaded_quietly(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (server.folder / "data.gz").write_bytes(b"some data")
    download_files(
        {f"{server.url}/data.gz": hashlib.md5(b"some data").hexdigest()},
        tmp_path / "root",
        "data.root: none",
    )
    assert (tmp_path / "root" / "data.gz").read_bytes() == b"some data"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "said"), [("data.gz", "does not match the known hash"), ("other.gz", "404")]
)
def test_a_download_that_fails_is_one_line_and_leaves_nothing(
    server: Server, tmp_path: Path, name: str, said: str
) -> None:
    (server.folder / "data.gz").write_bytes(b"some data")
    with pytest.raises(
        DataError,
        match=(
            rf"^data\.root: none, and downloading .*{said}.*; put the files there or set"
            r" data\.root$"
        ),
    ):
        download_files(
            {f"{server.url}/{name}": hashlib.md5(b"other data").hexdigest()},
            tmp_path / "root",
            "data.root: none",
        )
    assert list((tmp_path / "root").iterdir()) == []


def test_a_host_on_which_nothing_listens_is_told() -> None:
    with pytest.raises(OSError, match="refused"):
        check_listens("postgresql+psycopg://me@127.0.0.1:1/db")
    check_listens("postgresql:///db?host=/tmp")  # a socket: nothing to ask
    check_listens("sqlite:////nowhere/a.db")
