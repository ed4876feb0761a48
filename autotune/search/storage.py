"""A study's storage: Optuna's journal file in the study's folder, or Optuna's tables in a database.

Both are Optuna's own, so that its other tools read them. What fails there ends the study in one
line, and all that was written is kept.
"""

import json
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Any

import optuna
import psutil
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import TrialState
from sqlalchemy.orm import Session

from autotune.errors import ConfigError, StudyError
from autotune.redaction import without_secrets
from autotune.remote import check_listens

JOURNAL = "study.log"

_POSTGRESQL = {"connect_timeout": 10, "tcp_user_timeout": 60_000}
_MYSQL = {"connect_timeout": 10, "read_timeout": 60, "write_timeout": 60}
_CONNECT_ARGUMENTS = {
    "psycopg": _POSTGRESQL,
    "psycopg2": _POSTGRESQL,
    "pymysql": _MYSQL,
    "mysqldb": _MYSQL,
    "pysqlite": {"timeout": 60},
}
"""Limits on waiting for a database, by driver: without them a connection that went silent is
waited for without end, and a file that another study writes to not for long."""

DRIVER = "autotune:driver"
"""Attribute of a study: the process that runs it, and when that last said so; None after it ended
in good order."""
_BEAT_SECONDS = 20.0
"""Seconds after which the process that runs a study says so again."""
_DEAD_SECONDS = 60.0
"""Seconds of silence after which that process counts as dead, if it is another machine's."""
_LONG_AGO_SECONDS = 3600.0
"""Seconds since it last said so after which it counts as dead at once, however clocks differ."""

logger = getLogger("autotune.search")


def open_storage(folder: Path, url: str | None, *, is_owner: bool = False) -> BaseStorage:
    """Open a study's storage: the database of a URL, or else the journal in the study's folder,
    which is empty if there is none.

    Args:
        is_owner: whether this process alone writes to the journal. A last line that a killed
            process left unfinished is then dropped.

    Raises:
        StudyError: the journal cannot be read, or is damaged.
        ConfigError: the database does not answer, or refuses; the message holds no password.
    """
    if url is not None:
        return _open_database(url)
    path = folder / JOURNAL
    try:
        if is_owner and path.exists():
            _drop_unfinished_line(path)
        return JournalStorage(_JournalFile(path))
    except Exception as error:  # a damaged line may be any JSON, or none
        raise StudyError(
            f"{path}: cannot be read ({type(error).__name__}: {_reason(error)}); restore the file"
            " from a backup, or choose another study.name"
        ) from error


def _reason(error: BaseException) -> str:
    """The first line of an error's root cause, without passwords, cut to 200 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    return without_secrets(next(iter(str(error).strip().splitlines()), type(error).__name__))[:200]


def _open_database(url: str) -> RDBStorage:
    try:
        check_listens(url)
        parsed = sqlalchemy.engine.make_url(url)
        limits = _CONNECT_ARGUMENTS.get(parsed.get_driver_name(), {})
        arguments = {name: value for name, value in limits.items() if name not in parsed.query}
        storage = RDBStorage(url, engine_kwargs={"pool_pre_ping": True, "connect_args": arguments})
    except Exception as error:  # each kind of database raises its own client's errors
        raise ConfigError(
            f"search.storage: {without_secrets(url)}: cannot be opened ({_reason(error)}); it must"
            " be null, or a database: sqlite:////DIR/studies.db, postgresql://USER@HOST/DATABASE"
            " (pip install 'autotune[postgresql]')"
        ) from error
    weakref.finalize(storage, storage.engine.dispose)
    return storage


@contextmanager
def written_together(storage: BaseStorage) -> Iterator[None]:
    """Context whose values of trials are written at once, at its end: by one append to a journal,
    or in one transaction of a database. Nothing that was set within may be read within.

    One within another is a part of it; of one that raises an error nothing is written.
    """
    backend = _backend(storage)
    if isinstance(backend, _JournalFile):
        of_thread = backend.of_thread
        if hasattr(of_thread, "held"):
            yield
            return
        held: list[dict[str, Any]] = []
        of_thread.held = held
        try:
            yield
        finally:
            del of_thread.held
        if held:
            backend.append_logs(held)
    elif isinstance(backend, RDBStorage) and backend.scoped_session().bind is backend.engine:
        with backend.engine.begin() as connection:
            session = Session(connection, join_transaction_mode="rollback_only")
            backend.scoped_session.registry.set(session)
            try:
                yield
            finally:
                backend.scoped_session.remove()
    else:
        yield


def is_any_waiting(study: optuna.Study) -> bool:
    """Whether a trial of a study is enqueued; reads no other trials from a database, as Optuna's
    cache would, with all their evaluations.
    """
    storage, waiting = study._storage, (TrialState.WAITING,)  # noqa: SLF001
    number = study._study_id  # noqa: SLF001
    backend = _backend(storage)
    source = backend if isinstance(backend, RDBStorage) else storage
    return bool(source.get_all_trials(number, deepcopy=False, states=waiting))


def _backend(storage: BaseStorage) -> object:
    """The file of a journal, or the database behind Optuna's cache of it, which have no public way
    to them.
    """
    return getattr(storage, "_backend", None)


class _JournalFile(JournalFileBackend):
    """Optuna's journal file; of records that cannot be written nothing is left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.of_thread = threading.local()
        """Has, in ``held``, a thread's records that are to be written together, if any are."""
        # The lock is held for milliseconds: after three seconds it counts as that of a killed
        # process.
        super().__init__(str(path), JournalFileSymlinkLock(str(path), grace_period=3))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records, flushed to disk, or none of them.

        Raises:
            StorageInternalError: the file cannot be written, as on a full disk.
        """
        if hasattr(self.of_thread, "held"):
            self.of_thread.held.extend(logs)
            return
        size = self._path.stat().st_size
        try:
            super().append_logs(logs)
        except OSError as error:
            with suppress(OSError):
                os.truncate(self._path, size)
            raise StorageInternalError(
                f"{self._path}: cannot be written ({error.strerror or error})"
            ) from None


def _drop_unfinished_line(path: Path) -> None:
    """Drop a last line that a killed process did not finish: Optuna would write the next record
    behind it.
    """
    *lines, unfinished = path.read_bytes().split(b"\n")
    json.loads(lines[-1] if lines else b"{}")  # Optuna lets a damaged last line pass
    if unfinished:
        logger.warning(
            "%s: a last line that was not finished is dropped: %r", path, unfinished[:40]
        )
        os.truncate(path, path.stat().st_size - len(unfinished))


@contextmanager
def sole_driver(
    study: optuna.Study, interrupt: threading.Event, say: Callable[[str], object]
) -> Iterator[None]:
    """Keep a study's storage to this process, among the processes of all machines.

    One that was killed on this machine is seen to be gone. Of one that was killed on another
    machine nothing is heard any more, which is waited for.

    Args:
        interrupt: ends the wait; it is also set where another process has taken the study over,
            since this one stood still for too long.
        say: prints a line for the user.

    Raises:
        StudyError: another process runs the study; names it.
    """
    me = this_process()
    _wait_for_other_driver(study, me, interrupt, say)
    is_over = threading.Event()
    study.set_user_attr(DRIVER, {**me, "at": time.time()})

    def beat() -> None:
        heard_at = time.monotonic()
        while not is_over.wait(_BEAT_SECONDS):
            with suppress(*_STORAGE_ERRORS):  # whoever needs the storage meets them too
                if time.monotonic() - heard_at > _DEAD_SECONDS and _is_of_another(study, me):
                    say(f"study.name={study.study_name}: another process has taken it over")
                    interrupt.set()
                    return
                study.set_user_attr(DRIVER, {**me, "at": time.time()})
                heard_at = time.monotonic()

    beating = threading.Thread(target=beat, name="driver of the study", daemon=True)
    beating.start()
    try:
        yield
    finally:
        is_over.set()
        beating.join(1.0)
        with suppress(*_STORAGE_ERRORS):
            if not _is_of_another(study, me):
                study.set_user_attr(DRIVER, None)


def _wait_for_other_driver(
    study: optuna.Study,
    me: dict[str, Any],
    interrupt: threading.Event,
    say: Callable[[str], object],
) -> None:
    first = found = _driver(study)
    if first is None or time.time() - first["at"] > _LONG_AGO_SECONDS:
        return
    name, other = study.study_name, f"process {first['pid']} on {first['host']}"
    if first["machine"] == me["machine"]:
        process = process_facts(first["pid"])
        if process["pid"] == me["pid"] or abs(process["started"] - first["started"]) > 2:
            return
    else:
        say(
            f"study.name={name}: {other} ran it and did not end in order; waiting, at most"
            f" {_DEAD_SECONDS:.0f} s, to hear whether it still runs"
        )
        dead_at = time.monotonic() + _DEAD_SECONDS  # by this clock: others may differ from it
        while (found := _driver(study)) == first:
            if time.monotonic() > dead_at:
                return
            if interrupt.wait(1.0):
                raise KeyboardInterrupt
    if found is not None:
        raise StudyError(f"study.name={name}: {other} runs it; give another study.name")


def _is_of_another(study: optuna.Study, me: dict[str, Any]) -> bool:
    driver = _driver(study)
    return driver is not None and {**driver, "at": 0} != {**me, "at": 0}


def _driver(study: optuna.Study) -> dict[str, Any] | None:
    # Study.user_attrs copies all of them, with all confirmation runs
    storage, number = study._storage, study._study_id  # noqa: SLF001
    driver: dict[str, Any] | None = storage.get_study_user_attrs(number).get(DRIVER)
    return driver


def this_process() -> dict[str, Any]:
    """What tells this process from all others, on any machine."""
    return {"host": platform.node(), "machine": _machine(), **process_facts(os.getpid())}


def process_facts(pid: int) -> dict[str, Any]:
    """Id and start, as Unix time, of a process of this machine; 0 if there is none."""
    with suppress(psutil.Error):
        return {"pid": pid, "started": round(psutil.Process(pid).create_time())}
    return {"pid": pid, "started": 0}


def _machine() -> str:
    """Text that identifies the space of process ids: the running kernel, and the container."""
    with suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{kernel} {Path('/proc/self/ns/pid').readlink()}"
    return platform.node()


_STORAGE_ERRORS = (StorageInternalError, sqlalchemy.exc.SQLAlchemyError)


@contextmanager
def told_storage_errors(resume_command: str) -> Iterator[None]:
    """Report a study storage that fails in one line, with the command that resumes the study once
    it works again.

    Raises:
        StudyError: the storage failed within the context.
    """
    try:
        yield
    except _STORAGE_ERRORS as error:
        raise StudyError(
            f"search.storage: {_reason(error)}; what was in it is kept, and the study continues"
            f" with: {resume_command}"
        ) from error
