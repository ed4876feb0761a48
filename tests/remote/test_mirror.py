"""A folder here in place of one at a URL: brought, sent when it has changed, and named by its URL."""

from pathlib import Path

import fsspec
import pytest

from autotune.errors import DataError
from autotune.remote.mirror import mirrored
from tests.support.served import Server


def test_a_path_is_the_folder_itself(tmp_path: Path) -> None:
    for location in (str(tmp_path / "run"), f"file://{tmp_path}/run"):
        with mirrored(location, "checkpoint.folder") as mirror:
            mirror.bring("state")
            mirror.send("state")
            assert mirror.folder == tmp_path / "run"
            assert mirror.shown("state") == str(tmp_path / "run" / "state")
    assert not (tmp_path / "run").exists()


def test_files_go_to_the_url_and_come_back(memory: str) -> None:
    filesystem = fsspec.filesystem("memory")
    with mirrored(f"{memory}/run", "checkpoint.folder") as mirror:
        mirror.bring("state")
        mirror.send("state")
        assert [path.name for path in mirror.folder.iterdir()] == []
        (mirror.folder / "state").write_bytes(b"one")
        mirror.send("state")
        assert mirror.shown("state") == f"{memory}/run/state"
        here = mirror.folder
    assert not here.exists()
    assert filesystem.cat(f"{memory}/run/state") == b"one"
    assert [path.rpartition("/")[2] for path in filesystem.find(f"{memory}/run")] == ["state"]
    with mirrored(f"{memory}/run", "checkpoint.folder") as mirror:
        mirror.bring("state")
        assert (mirror.folder / "state").read_bytes() == b"one"


def test_what_has_not_changed_is_not_sent_again(server: Server) -> None:
    with mirrored(f"{server.url}/run", "checkpoint.folder") as mirror:
        for content in (b"one", b"two"):
            (mirror.folder / "state").write_bytes(content)
            mirror.send("state")
            mirror.send("state")
    assert server.asked.count("PUT /run/state") == 2
    with mirrored(f"{server.url}/run", "checkpoint.folder") as mirror:
        mirror.bring("state")
        mirror.send("state")
    assert server.asked.count("PUT /run/state") == 2


@pytest.mark.parametrize(("folder", "done"), [("secret", "written"), ("drop", "looked at")])
def test_a_url_that_cannot_be_written_or_read_is_refused_at_once(server: Server, folder: str, done: str) -> None:
    with (
        pytest.raises(DataError, match=rf"^checkpoint\.folder: http://.*/{folder}/run: cannot be {done}: no permission$"),
        mirrored(f"{server.url}/{folder}/run", "checkpoint.folder"),
    ):
        pytest.fail("nothing is begun")


def test_an_error_names_the_url(memory: str) -> None:
    with pytest.raises(DataError, match=rf"^{memory}/state: is damaged$"), mirrored(memory, "checkpoint.folder") as mirror:
        raise DataError(f"{mirror.folder / 'state'}: is damaged")
