"""A server that does not answer is told before MLflow is imported; what may still be well is left to MLflow."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autotune.errors import ConfigError
from autotune.tracking import mlflow_uri
from autotune.tracking.mlflow_tracker import check

ANSWER = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """The port of a server that gives one answer to whatever it is asked; None: it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(answer or b"")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_a_server_that_hangs_up_is_told() -> None:
    with (
        listening(None) as port,
        pytest.raises(ConfigError, match=rf"tracking\.uri: http://127\.0\.0\.1:{port}: cannot be used \(Remote end closed"),
    ):
        check({"uri": f"http://127.0.0.1:{port}"})


def test_a_port_on_which_nothing_listens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1")
    with pytest.raises(
        ConfigError, match=r"tracking\.uri: http://me:\*\*\*@127\.0\.0\.1:1: cannot be used \(.*Connection refused\); accepted is the"
    ):
        check({"uri": None})


def test_a_uri_that_is_no_text_is_told() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.uri: \[1\]: cannot be used \(it is no text\); accepted is the address"):
        check({"uri": [1]})


@pytest.mark.parametrize(
    "uri", ["sqlite:////no/such/folder/mlflow.db", "postgresql://127.0.0.1:1/mlflow", "http://[::1", "http://", "no kind"]
)
def test_what_is_no_server_is_left_to_mlflow(uri: str) -> None:
    check({"uri": uri})


def test_any_answer_will_do() -> None:
    with listening(ANSWER) as port:
        check({"uri": f"http://127.0.0.1:{port}/mlflow/"})


def test_no_tls_is_left_to_mlflow() -> None:
    with listening(ANSWER) as port:
        check({"uri": f"https://127.0.0.1:{port}"})


def test_a_slow_answer_is_left_to_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_uri, "_ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        check({"uri": f"http://127.0.0.1:{server.getsockname()[1]}"})


def test_a_proxy_that_is_away_is_left_to_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    check({"uri": "http://mlflow.example:5000"})
