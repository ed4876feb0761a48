"""A relational database as a study's storage, by URL: opens it, waits while it does not answer, and reports a lost one in one line.

Between two statements a database may restart, or be unreachable for a while: the next connection is tried again and again, and the
study continues where it stood. A statement that fails midway is not repeated, since it may have been carried out.
"""

import logging
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage

from autotune.database_url import check_listens, without_password
from autotune.errors import ConfigError, StudyError

LOGGER = logging.getLogger("autotune.search")
PATIENCE_SECONDS = 120.0
"""Longest time that a database may be unreachable before the study gives up."""
_TRY_EVERY_SECONDS = 1.0
_ACCEPTED = "null, or a database: sqlite:////DIR/studies.db, postgresql://USER@HOST/DATABASE (pip install 'autotune[postgresql]')"


def open_database(url: str) -> RDBStorage:
    """Open a database as Optuna's storage, and make its tables if there are none.

    Raises:
        ConfigError: the URL does not answer, refuses, or is no database; the message holds no password.
    """
    try:
        check_listens(url)
        storage = RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    except Exception as error:  # each kind of database raises its own client's errors
        raise ConfigError(
            f"search.storage: {without_password(url)}: cannot be opened ({_reason(error)}); accepted is {_ACCEPTED}"
        ) from error
    sqlalchemy.event.listen(storage.engine, "do_connect", _connect)
    weakref.finalize(storage, storage.engine.dispose)
    return storage


@contextmanager
def told_storage_errors(resume_command: str) -> Iterator[None]:
    """Report a lost study storage in one line, with the command that resumes the study once the storage is back.

    Raises:
        StudyError: the storage failed within the context.
    """
    try:
        yield
    except (StorageInternalError, sqlalchemy.exc.DBAPIError) as error:
        raise StudyError(
            f"search.storage: went away ({_reason(error)}); what was in it is kept, and the study goes on with: {resume_command}"
        ) from error


def _connect(dialect: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Open a connection, trying again until the database answers or ``PATIENCE_SECONDS`` have passed."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    has_warned = False
    while True:
        try:
            return dialect.connect(*arguments, **keywords)
        except dialect.loaded_dbapi.OperationalError as error:
            if time.monotonic() > deadline:
                raise
            if not has_warned:
                LOGGER.warning("search.storage does not answer (%s); it is waited for", _reason(error))
                has_warned = True
        time.sleep(_TRY_EVERY_SECONDS)


def _reason(error: BaseException) -> str:
    """The first line of an error's root cause, without passwords, cut to 200 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    return without_password(next(iter(str(error).strip().splitlines()), type(error).__name__))[:200]
