"""Studies in real databases that restart, crash, cut connections off or stay away: nothing is lost or done twice."""

import contextlib
import ctypes
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from autotune.errors import ConfigError, StudyError
from autotune.search import database as database_module
from autotune.search.study import open_study, read_study, told_storage_errors
from tests.postgresql import PostgreSql, running_postgresql

SPACE: dict[str, Any] = {"x": FloatDistribution(0, 1)}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSql]:
    with running_postgresql() as server:
        yield server


def open_in(folder: Path, url: str) -> optuna.Study:
    return open_study("first", folder, storage_url=url, make_sampler=optuna.samplers.RandomSampler, seed=0, definition={})[0]


def told(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(trial.number, trial.state.name, trial.params, trial.value, trial.user_attrs) for trial in study.trials]


def do_all(study: optuna.Study) -> None:
    """Each kind of operation that a policy does."""
    study.enqueue_trial({"x": 0.5}, user_attrs={"baseline": True})
    study.tell(study.ask(SPACE), 0.5)
    trial = study.ask({"x": FloatDistribution(0, 1)})
    trial.report(0.25, step=1)
    trial.set_constraint("infeasible", 1.0)
    trial.set_user_attr("result", {"seconds": [1.0, 2.0]})
    study.tell(trial, state=TrialState.PRUNED)
    study.tell(study.ask(SPACE), state=TrialState.FAIL)
    study.set_user_attr("confirmed", 1)


class LostAfterCommit:
    """Carries out the n-th commit of a database, and loses the connection before that is answered."""

    def __init__(self, storage: Any, first: int) -> None:
        self._dialect = storage._storage._backend.engine.dialect
        self._commit = self._dialect.do_commit
        self._dialect.do_commit = self.commit
        self._first = first
        self.num_commits = 0
        self.is_lost = False

    def commit(self, connection: Any) -> None:
        self._commit(connection)
        self.num_commits += 1
        if self.num_commits == self._first:
            self.is_lost = True
            connection.dbapi_connection.close()
            connection.dbapi_connection.cursor()  # which raises the client library's own error


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "_TRY_EVERY_SECONDS", 0.0)


@pytest.mark.usefixtures("no_pause")
def test_what_was_committed_before_the_connection_was_lost_is_not_done_twice(tmp_path: Path) -> None:
    def done(name: str, lost_after: int) -> tuple[list[tuple[Any, ...]], dict[str, Any], LostAfterCommit]:
        url = f"sqlite:///{tmp_path / name}.db"
        study = open_in(tmp_path, url)
        losing = LostAfterCommit(study._storage, lost_after)
        random.seed(0)
        study.sampler = optuna.samplers.RandomSampler(seed=0)
        do_all(study)
        read = read_study("first", tmp_path, storage_url=url)
        return told(read), read.user_attrs, losing

    whole, attributes, undisturbed = done("undisturbed", lost_after=-1)
    assert [(number, state) for number, state, *_ in whole] == [(0, "COMPLETE"), (1, "PRUNED"), (2, "FAIL")]
    assert undisturbed.num_commits > 20
    for lost_after in range(1, undisturbed.num_commits + 1):
        found, found_attributes, losing = done(f"lost-{lost_after}", lost_after)
        assert (found, found_attributes) == (whole, attributes), lost_after
        assert losing.is_lost


def test_a_trial_that_another_process_ended_is_refused_as_before(tmp_path: Path) -> None:
    study = open_in(tmp_path, f"sqlite:///{tmp_path / 'a.db'}")
    trial = study.ask()
    study.tell(trial, 1.0)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        study._storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [1.0])


def test_each_method_of_a_storage_is_one_that_waits() -> None:
    undone = [name for name in optuna.storages.BaseStorage.__abstractmethods__ if name not in vars(database_module.PatientStorage)]
    assert undone == []


@pytest.mark.store
@pytest.mark.parametrize(
    ("fault", "num_wanted"),
    [
        ("kill", 1),
        ("end_connections", 3),
        pytest.param("kill", 5, marks=pytest.mark.slow),
        pytest.param("stop_immediately", 3, marks=pytest.mark.slow),
        pytest.param("stop", 3, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_goes_and_comes_back_loses_nothing(server: PostgreSql, tmp_path: Path, fault: str, num_wanted: int) -> None:
    url = server.new_database(f"{fault}_{num_wanted}")
    study = open_in(tmp_path, url)
    num_faults, is_over = 0, threading.Event()

    def disturb() -> None:
        nonlocal num_faults
        while not is_over.is_set():
            time.sleep(random.uniform(0.1, 0.4))
            getattr(server, fault)()
            num_faults += 1
            if fault != "end_connections":
                time.sleep(0.2)
                server.start()

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    number = 0
    try:
        while num_faults < num_wanted:
            study.enqueue_trial({"x": number / 1000})
            study.tell(study.ask(SPACE), float(number))
            study.set_user_attr(f"confirmed:{number}", number)
            number += 1
    finally:
        is_over.set()
        disturbing.join()
    read = read_study("first", tmp_path, storage_url=url)
    expected = [(each, "COMPLETE", {"x": each / 1000}, float(each), {}) for each in range(number)]
    assert told(read) == expected
    assert {key for key in read.user_attrs if key.startswith("confirmed:")} == {f"confirmed:{each}" for each in range(number)}


@pytest.mark.store
def test_one_that_stays_away_is_one_line_with_the_command_that_goes_on(
    server: PostgreSql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_in(tmp_path, server.new_database("stays_away"))
    monkeypatch.setattr(database_module, "PATIENCE_SECONDS", 0.1)
    server.kill()
    try:
        with (
            pytest.raises(StudyError, match=r"search.storage: .*goes on with: python -m autotune x") as caught,
            told_storage_errors("python -m autotune x"),
        ):
            study.set_user_attr("after", 2)
    finally:
        server.start()
    assert "\n" not in str(caught.value)


_LOCKS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("begin exclusive")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(path: Path, *, seconds: float) -> Iterator[None]:
    """A SQLite file that another process locks, for some seconds or until the context ends."""
    with subprocess.Popen([sys.executable, "-c", _LOCKS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        timer = threading.Timer(seconds, process.stdin.close)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            process.stdin.close()


def test_a_file_that_another_process_locks_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "studies.db"
    url = f"sqlite:///{path}?timeout=0.1"
    study = open_in(tmp_path, url)
    with locked(path, seconds=1):
        study.set_user_attr("first", 1)
    do_all(study)
    assert [state for _, state, *_ in told(study)] == ["COMPLETE", "PRUNED", "FAIL"]
    assert "search.storage does not answer (database is locked); it is waited for" in caplog.text
    with locked(path, seconds=1):
        assert told(open_in(tmp_path, url)) == told(study)


def test_a_file_that_stays_locked_is_one_line_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "studies.db"
    url = f"sqlite:///{path}?timeout=0.1"
    study = open_in(tmp_path, url)
    monkeypatch.setattr(database_module, "PATIENCE_SECONDS", 0.1)
    with locked(path, seconds=300):
        with pytest.raises(StudyError, match=r"^search\.storage: database is locked; what was in it is kept"), told_storage_errors("x"):
            study.set_user_attr("after", 1)
        with pytest.raises(ConfigError, match=r"cannot be opened \(database is locked\)"):
            open_in(tmp_path, url)


class Forwarding:
    """A port that leads to a server's socket, through a firewall that can forget its connections: it drops all they send."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._accepted: list[socket.socket] = []
        self._sockets = [self._listening]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._path)
                self._accepted.append(client)
                self._sockets += (client, server)
                for source, to in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._forward, args=(source, to)))
                    self._threads[-1].start()

    @staticmethod
    def _forward(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                to.sendall(content)
            to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def forget(self) -> None:
        """Drop all packets that come by the connections that there are, also those that would acknowledge them."""
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a filter of one instruction: return 0 bytes
        program = struct.pack("HL", 1, ctypes.addressof(drop_all))
        for client in self._accepted:
            client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


_SO_ATTACH_FILTER = 26


@pytest.mark.store
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's socket filters")
def test_a_connection_that_goes_silent_is_given_up_and_made_again(
    server: PostgreSql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database_module, "_SILENT_SECONDS", 2)
    url = sqlalchemy.engine.make_url(server.new_database("silent"))
    lost = threading.Event()
    with contextlib.closing(Forwarding(f"{url.query['host']}/.s.PGSQL.5432")) as forwarding:
        study = open_in(tmp_path, f"postgresql://{url.username}@127.0.0.1:{forwarding.port}/silent")
        database = study._storage._storage._backend

        def forget(*_: Any) -> None:
            if not lost.is_set():
                forwarding.forget()
                lost.set()

        sqlalchemy.event.listen(database.engine, "before_cursor_execute", forget)
        do_all(study)
        assert lost.is_set()
        assert [state for _, state, *_ in told(study)] == ["COMPLETE", "PRUNED", "FAIL"]
        database.engine.dispose()
    assert "search.storage answers again" in caplog.text
