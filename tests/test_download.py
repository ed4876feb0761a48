import hashlib
import logging
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from autotune.download import RemoteDataSet, RemoteFile, obtain
from autotune.errors import DataError
from autotune.workloads import cifar10, fashion_mnist

NOWHERE = "http://127.0.0.1:9/"  # the discard port: nothing listens there


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a folder with one file, ``data.gz``."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "data.gz").write_bytes(b"some data")
    with HTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/"
        httpd.shutdown()
        thread.join()


def data_set(url: str, content: bytes = b"some data") -> RemoteDataSet:
    file = RemoteFile(url=url, md5=hashlib.md5(content).hexdigest())
    return RemoteDataSet(name="Some-Data", files=(file,), accepted="data.gz")


def refused(url: str, folder: Path, content: bytes = b"some data") -> str:
    """The one line that says why a download failed."""
    with pytest.raises(DataError) as raised:
        obtain(data_set(url, content), folder, root=folder, download=True)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_file_is_fetched_quietly(server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="autotune"):
        obtain(data_set(f"{server}data.gz"), tmp_path / "root", root=tmp_path / "root", download=True)
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["data.gz"]
    assert (tmp_path / "root" / "data.gz").read_bytes() == b"some data"
    assert capfd.readouterr() == ("", "")
    assert [record.name for record in caplog.records if record.name != "urllib3.connectionpool"] == ["autotune.download"]


def test_wrong_content_is_refused_and_not_kept(server: str, tmp_path: Path) -> None:
    message = refused(f"{server}data.gz", tmp_path / "root", content=b"other data")
    assert "checksum is not the official file's" in message
    assert list((tmp_path / "root").iterdir()) == []


def test_file_that_the_server_does_not_have(server: str, tmp_path: Path) -> None:
    assert "the server answered 404" in refused(f"{server}other.gz", tmp_path / "root")


def test_folder_that_cannot_be_written(server: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "failed: Not a directory" in refused(f"{server}data.gz", tmp_path / "file" / "root")


def test_no_network_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    message = refused(f"{NOWHERE}data.gz", tmp_path)
    assert message == (
        f"data.root: no Some-Data under '{tmp_path}' (accepted: data.gz), and downloading {NOWHERE}data.gz to '{tmp_path}' "
        "failed: no connection; put the files there or set data.root"
    )


def test_absent_and_not_wanted_says_how_to_fetch_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set data\.download=true to fetch it, or data\.root to where it lies"):
        obtain(data_set(f"{NOWHERE}data.gz"), tmp_path, root=tmp_path, download=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("workload", "module"), [("cifar10", cifar10), ("fashion_mnist", fashion_mnist)])
def test_workload_without_network_is_refused(workload: str, module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMOTE", data_set(f"{NOWHERE}data.gz"))
    with pytest.raises(DataError, match="no connection; put the files there"):
        getattr(module, workload)(str(tmp_path), download=True)
