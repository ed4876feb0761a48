"""A study's storage: Optuna's journal file in the study's folder, or Optuna's tables in a database.

Both are Optuna's own, so that its other tools read them. What fails there ends the study in one
line, and all that was written is kept.
"""

import json
import os
import weakref
from collections.abc import Generator
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import Any

import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from autotune.errors import ConfigError, StudyError
from autotune.hiding import without_secrets
from autotune.remote import check_listens

JOURNAL = "study.log"
STORAGE_ERRORS = (StorageInternalError, sqlalchemy.exc.SQLAlchemyError)
"""What operations of a storage raise that cannot be read or written."""

_CONNECT_ARGUMENTS = {
    "psycopg": {"connect_timeout": 10, "tcp_user_timeout": 60_000},
    "psycopg2": {"connect_timeout": 10, "tcp_user_timeout": 60_000},
    "pymysql": {"connect_timeout": 10, "read_timeout": 60, "write_timeout": 60},
    "mysqldb": {"connect_timeout": 10, "read_timeout": 60, "write_timeout": 60},
}
"""Limits on waiting for a database, by driver: without them a connection that went silent is
waited for without end."""
_DATABASES = (
    "null, or a database: sqlite:////DIR/studies.db, postgresql://USER@HOST/DATABASE (pip install"
    " 'autotune[postgresql]')"
)

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
    return (
        _open_journal(folder / JOURNAL, is_owner=is_owner) if url is None else _open_database(url)
    )


def reason(error: BaseException) -> str:
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
        found = f"{without_secrets(url)}: cannot be opened ({reason(error)})"
        raise ConfigError(f"search.storage: {found}; accepted is {_DATABASES}") from error
    weakref.finalize(storage, storage.engine.dispose)
    return storage


def _open_journal(path: Path, *, is_owner: bool) -> JournalStorage:
    try:
        backend = _JournalFile(path)
    except OSError as error:
        raise StudyError(f"{path}: cannot be made: {error.strerror}") from error
    try:
        if is_owner:
            backend.drop_unfinished_line()
        return JournalStorage(backend)
    except StudyError:
        raise
    except OSError as error:
        raise StudyError(f"{path}: cannot be read: {error.strerror}; {_RESTORE}") from error
    except Exception as error:  # JSON, but nothing that Optuna can replay
        raise StudyError(
            f"{path}: line {backend.num_read}: is no record of Optuna's; {_RESTORE}"
        ) from error


class _JournalFile(JournalFileBackend):
    """Optuna's journal file.

    What damages it is told with its line; of records that cannot be written nothing is left.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The lock is held for milliseconds: after three seconds it counts as that of a killed
        # process.
        super().__init__(str(path), JournalFileSymlinkLock(str(path), grace_period=3))
        self.num_read = 0
        """Number of the line that was read last, from 1."""

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Read the records from a number on.

        Raises:
            StudyError: the file cannot be read, or a line of it is no JSON.
        """
        self.num_read = log_number_from
        try:
            for record in super().read_logs(log_number_from):
                self.num_read += 1
                yield record
        except OSError as error:
            raise StudyError(
                f"{self._path}: cannot be read: {error.strerror}; {_RESTORE}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise StudyError(
                f"{self._path}: line {self.num_read + 1}: is not JSON; {_RESTORE}"
            ) from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records, flushed to disk, or none of them.

        Raises:
            StorageInternalError: the file cannot be written, as on a full disk.
        """
        size = self._path.stat().st_size
        try:
            super().append_logs(logs)
        except OSError as error:
            with suppress(OSError):
                os.truncate(self._path, size)
            raise StorageInternalError(
                f"{self._path}: cannot be written ({error.strerror or error})"
            ) from None

    def drop_unfinished_line(self) -> None:
        """Drop a last line that a killed process did not finish: Optuna would write the next record
        behind it.

        Raises:
            StudyError: the last whole line is no JSON.
        """
        content = self._path.read_bytes()
        num_bytes = content.rfind(b"\n") + 1
        last = content[content.rfind(b"\n", 0, max(0, num_bytes - 1)) + 1 : num_bytes]
        try:
            json.loads(last or b"{}")
        except (ValueError, RecursionError) as error:
            raise StudyError(f"{self._path}: its last line is not JSON; {_RESTORE}") from error
        if content[num_bytes:]:
            logger.warning(
                "%s: a last line that was not finished is dropped: %r",
                self._path,
                content[num_bytes:][:40],
            )
            os.truncate(self._path, num_bytes)


_RESTORE = "restore the file from a backup, or choose another study.name"
