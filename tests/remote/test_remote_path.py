"""Files at URLs: what is there, copied here, written there; every failure in one line; clocks stand still meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from autotune.errors import DataError
from autotune.measurement import Phase, PhaseClock
from autotune.remote.path import RemotePath, located, paused_while_waiting, waiting
from tests.support.served import Server


def remote(url: str) -> RemotePath:
    place = located(url, "data.root")
    assert isinstance(place, RemotePath)
    return place


def refused(url: str) -> str:
    with pytest.raises(DataError) as raised:
        located(url, "data.root")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_file_url_is_the_path_it_names(tmp_path: Path) -> None:
    assert located(f"file://{tmp_path}/x", "data.root") == tmp_path / "x"
    assert located("~/x", "data.root") == Path.home() / "x"


def test_one_slash_is_no_folder_of_that_name() -> None:
    assert refused("s3:/bucket/x") == "data.root: found s3:/bucket/x, accepted is a path, or a URL such as s3://bucket/x"


def test_a_protocol_that_is_none_is_one_line() -> None:
    assert refused("s3x://bucket") == (
        "data.root: s3x://bucket: there is no protocol 's3x' (did you mean s3?); accepted are those of fsspec: s3, gs, az, hf, ..."
    )


@pytest.mark.parametrize(
    ("made_by", "said"),
    [
        ("no_such_package.FileSystem", "its package is not installed: pip install no_such_package"),
        ("fsspec.implementations.no_such.FileSystem", "a package is not installed: a far one needs nothing"),
    ],
)
def test_a_package_that_is_missing_is_named(made_by: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_implementations, "far", {"class": made_by, "err": "a far one needs nothing"})
    assert refused("far://place/x") == f"data.root: far://place/x: {said}"


def test_files_in_memory_are_found_and_listed(memory: str) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe(f"{memory}/b.txt", b"b")
    filesystem.pipe(f"{memory}/a.txt", b"a")
    filesystem.pipe(f"{memory}/deeper/c.txt", b"c")
    folder = remote(memory)
    assert [each.name for each in folder.files()] == ["a.txt", "b.txt"]
    assert (folder / "a.txt").is_file()
    assert not (folder / "deeper").is_file()
    assert not (folder / "z.txt").is_file()
    assert folder.is_folder()
    assert (folder / "deeper" / "c.txt").url == f"{memory}/deeper/c.txt"
    assert (folder / "deeper" / "c.txt").parent_url == f"{memory}/deeper"


def test_a_web_server_answers_for_each_file(server: Server) -> None:
    (server.folder / "a.txt").write_text("some text")
    (server.folder / "secret").mkdir()
    folder = remote(server.url)
    assert (folder / "a.txt").is_file()
    assert not (folder / "b.txt").is_file()
    assert [each.name for each in remote(f"{server.url}/").files()] == ["a.txt"]
    assert remote(f"{server.url}/a.txt?token=1").name == "a.txt"
    with pytest.raises(DataError, match=r"^data\.root: http://[\d.:]+/b\.txt: there is no such file or folder$"):
        (folder / "b.txt").version()
    with pytest.raises(DataError, match=r"^data\.root: http://.*/secret/x: cannot be looked at: no permission$"):
        (folder / "secret/x").version()


def test_a_file_that_may_not_be_looked_at_is_said_where_what_was_looked_for_is_not_there(server: Server) -> None:
    folder = remote(server.url)
    assert not (folder / "secret/x").is_file()
    assert str(folder.lacks("such set", "x")) == (
        f"data.root: no such set under {server.url} (accepted: x), and no permission to look at {server.url}/secret/x"
    )


def test_a_server_that_does_not_answer_is_one_line() -> None:
    nowhere = remote("http://127.0.0.1:9/x")
    with pytest.raises(DataError, match=r"^data\.root: http://127.0.0.1:9/x: cannot be looked at: .*[Cc]onnect") as raised:
        nowhere.is_file()
    assert "\n" not in str(raised.value)


def test_a_copy_that_is_not_whole_is_refused(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe(f"{memory}/a", b"four")
    place = remote(f"{memory}/a")
    monkeypatch.setattr(type(filesystem), "get_file", lambda self, path, local, **_: Path(local).write_bytes(b"fo"))
    with pytest.raises(DataError, match="2 bytes arrived of 4"):
        place.copy_to(tmp_path / "a")


@pytest.mark.parametrize("where", ["memory", "web"])
def test_a_file_is_written_in_place_of_another(where: str, memory: str, server: Server, tmp_path: Path) -> None:
    url = f"{memory if where == 'memory' else server.url}/run/state"
    for content in (b"old", b"new and longer"):
        (tmp_path / "local").write_bytes(content)
        remote(url).put(tmp_path / "local")
        remote(url).copy_to(tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == content
    assert [each.name for each in remote(url.removesuffix("state")).files()] == ["state"]


def test_a_write_that_fails_leaves_the_old_file(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, filesystem = remote(f"{memory}/state"), fsspec.filesystem("memory")
    (tmp_path / "local").write_bytes(b"old")
    place.put(tmp_path / "local")

    def breaks_off(self: object, local: str, path: str, **_: object) -> None:
        filesystem.pipe(path, b"ne")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(filesystem), "put_file", breaks_off)
    with pytest.raises(DataError, match=r"state: cannot be written: No space left on device$"):
        place.put(tmp_path / "local")
    assert filesystem.cat(f"{memory}/state") == b"old"
    assert [each.name for each in remote(memory).files()] == ["state"]


def test_a_folder_that_may_not_be_written_is_one_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(b"x")
    with pytest.raises(DataError, match=r"/secret/state: cannot be written: no permission$"):
        remote(f"{server.url}/secret/state").put(tmp_path / "local")


def test_what_was_said_to_pause_does_so_once_and_goes_on_however_waiting_ends() -> None:
    said = []

    @contextmanager
    def pause() -> Iterator[None]:
        said.append("stop")
        try:
            yield
        finally:
            said.append("go")

    with paused_while_waiting(pause):
        with waiting(), waiting():
            said.append("waits")
        with pytest.raises(OSError, match="gone"), waiting():
            raise OSError("gone")
    with waiting():
        pass
    assert said == ["stop", "waits", "go", "stop", "go"]


def test_a_clock_that_is_stopped_goes_on_in_its_phase() -> None:
    clock = PhaseClock()
    clock.enter(Phase.BUILD)
    with paused_while_waiting(clock.stopped):
        with waiting():
            assert clock.phase is None
            before = clock.seconds(Phase.BUILD)
            assert clock.seconds(Phase.BUILD) == before
        assert clock.phase is Phase.BUILD
