"""Files of other machines are fetched once a machine, whole, and again when they have changed."""

import logging
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from autotune.errors import DataError
from autotune.remote.cache import cache_folder, fetched, logger, say_what_is_fetched
from autotune.remote.path import located
from tests.support.served import Server


def fetch(url: str) -> Path:
    return fetched(located(url, "data.root"))


def test_a_path_is_as_it_is(tmp_path: Path, cache: Path) -> None:
    assert fetched(tmp_path / "absent") == tmp_path / "absent"
    assert not cache.exists()


def test_a_file_is_fetched_once_under_its_own_name(server: Server, cache: Path) -> None:
    (server.folder / "a.csv").write_text("some text")
    path = fetch(f"{server.url}/a.csv")
    assert fetch(f"{server.url}/a.csv") == path
    assert path.read_text() == "some text"
    assert path.name == "a.csv"
    assert path.is_relative_to(cache)
    assert [each for each in server.asked if each.startswith("GET")] == ["GET /a.csv"]


def test_files_of_a_folder_lie_in_one_folder_and_those_of_others_elsewhere(memory: str, cache: Path) -> None:
    filesystem = fsspec.filesystem("memory")
    for name in ("one/a", "one/b", "other/a"):
        filesystem.pipe(f"{memory}/{name}", name.encode())
    one, also, other = (fetch(f"{memory}/{name}") for name in ("one/a", "one/b", "other/a"))
    assert one.parent == also.parent != other.parent
    assert other.read_text() == "other/a"


@pytest.mark.parametrize("content", [b"new text!", b"longer than it was"])
def test_a_file_that_has_changed_is_fetched_again(memory: str, cache: Path, content: bytes) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe(f"{memory}/a", b"some text")
    path = fetch(f"{memory}/a")
    with path.open("rb") as reader:
        filesystem.pipe(f"{memory}/a", content)
        assert fetch(f"{memory}/a") == path
        assert path.read_bytes() == content
        assert reader.read() == b"some text", "who reads the old file goes on with it"


def test_a_file_that_was_damaged_here_is_fetched_again(server: Server, cache: Path) -> None:
    (server.folder / "a").write_text("some text")
    path = fetch(f"{server.url}/a")
    path.write_text("some")
    assert fetch(f"{server.url}/a").read_text() == "some text"


def test_a_fetch_that_breaks_off_leaves_what_was_there(memory: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe(f"{memory}/a", b"old")
    path = fetch(f"{memory}/a")
    filesystem.pipe(f"{memory}/a", b"new")

    def breaks_off(self: object, remote: str, local: str, **_: object) -> None:
        Path(local).write_bytes(b"n")
        raise ConnectionResetError(104, "Connection reset by peer")

    with monkeypatch.context() as patched:
        patched.setattr(type(filesystem), "get_file", breaks_off)
        with pytest.raises(DataError, match=r"/a: cannot be read: Connection reset by peer$"):
            fetch(f"{memory}/a")
    assert path.read_bytes() == b"old"
    assert not path.with_name(".a.part").exists()
    assert fetch(f"{memory}/a").read_bytes() == b"new"


def test_processes_that_want_one_file_fetch_it_once(server: Server, cache: Path) -> None:
    (server.folder / "a").write_bytes(bytes(3_000_000))
    code = f"from autotune.remote.cache import *\nprint(fetched(located('{server.url}/a', 'data.root')).stat().st_size)"
    code = f"from autotune.remote.path import located\n{code}"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [each.communicate()[0] for each in processes] == ["3000000\n"] * 3
    assert [each for each in server.asked if each.startswith("GET")] == ["GET /a"]


def test_a_missing_file_is_one_line_and_leaves_none(memory: str, cache: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.root: memory://.*/a: there is no such file or folder$"):
        fetch(f"{memory}/a")
    assert not [each for each in cache.rglob("*") if each.is_file() and not each.name.endswith(".lock")]


def test_a_folder_is_no_file(memory: str, cache: Path) -> None:
    fsspec.filesystem("memory").pipe(f"{memory}/a/b", b"b")
    with pytest.raises(DataError, match=r"/a: is a folder, accepted is a file$"):
        fetch(f"{memory}/a")


def test_a_web_server_alone_is_no_file(server: Server, cache: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.root: http://.*/: is a folder, accepted is a file$"):
        fetch(f"{server.url}/")


def test_a_cache_that_cannot_be_written_is_one_line(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "file"))
    fsspec.filesystem("memory").pipe(f"{memory}/a", b"a")
    with pytest.raises(DataError, match=r"^AUTOTUNE_CACHE: .*: cannot be written: Not a directory; accepted is a folder with room"):
        fetch(f"{memory}/a")


def test_the_cache_lies_where_caches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/autotune")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "autotune"


def test_what_is_fetched_is_said(
    memory: str, cache: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "handlers", list[logging.Handler]())
    say_what_is_fetched()
    say_what_is_fetched()
    fsspec.filesystem("memory").pipe(f"{memory}/a", bytes(1_500_000))
    monkeypatch.setattr("autotune.remote.cache._SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("autotune.remote.cache._SECONDS_WORTH_A_LINE", 0.0)
    fetch(f"{memory}/a")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"fetching {memory}/a (1.5 MB) to {next(cache.iterdir())}"
    assert said[1].startswith(f"fetching {memory}/a: ")
    assert said[1].endswith(" of 1.5 MB")
    assert said[-1].startswith(f"fetched {memory}/a in ")
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == said
