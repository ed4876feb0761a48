"""A study in a database: Optuna's relational storage, which waits for a database that restarts or cannot be reached, and goes on.

A statement that met a lost connection may have been carried out or not, and its transaction is over. So whole operations of Optuna's
are done again, on a new connection, and the two that must not be done twice are asked for first: a trial is created with a token of
its own, by which it is found if it was created; a trial that has ended as it was to end has been told already.
"""

import abc
import sqlite3
import time
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from logging import getLogger
from typing import Any, TypeVar
from uuid import uuid4

import sqlalchemy
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.errors import ConfigError
from autotune.hiding import without_secrets
from autotune.remote.url import check_listens

PATIENCE_SECONDS = 120.0
"""Longest time that a database may be unreachable before the study gives up."""

logger = getLogger("autotune.search")

_TRY_EVERY_SECONDS = 1.0
_CONNECT_SECONDS = 10
"""Seconds in which a database that is there accepts a connection, or lets go of a lock."""
_SILENT_SECONDS = 60
"""Seconds after which a connection that is silent counts as lost: firewalls forget one that is idle, and tell neither side."""
_CREATION = "autotune:creation"
"""System attribute of a trial: the token that it was created with."""
_ACCEPTED = "null, or a database: sqlite:////DIR/studies.db, postgresql://USER@HOST/DATABASE (pip install 'autotune[postgresql]')"

_Result = TypeVar("_Result")


def open_database(url: str) -> BaseStorage:
    """Open a database as Optuna's storage, and make its tables if there are none.

    Raises:
        ConfigError: the URL does not answer, refuses, or is no database; the message holds no password.
    """
    try:
        check_listens(url)
        database = _patiently(lambda *, is_again: _opened(url))  # that it is done again makes no difference to it
    except Exception as error:  # each kind of database raises its own client's errors
        raise ConfigError(f"search.storage: {without_secrets(url)}: cannot be opened ({reason(error)}); accepted is {_ACCEPTED}") from error
    sqlalchemy.event.listen(database.engine, "handle_error", _raise_if_lost)
    storage = PatientStorage(database)  # type: ignore[abstract]  # its other methods are made below, from the names of Optuna's
    weakref.finalize(storage, database.engine.dispose)
    return storage


def _opened(url: str) -> RDBStorage:
    parsed = sqlalchemy.engine.make_url(url)
    limits = _limits(parsed.get_driver_name())
    arguments = {name: value for name, value in limits.items() if name not in parsed.query}
    try:
        return RDBStorage(url, engine_kwargs={"pool_pre_ping": True, "connect_args": arguments})
    except Exception as error:
        if _is_locked(_root_cause(error)):
            raise _ConnectionLostError(reason(error)) from error
        raise


def _limits(driver: str) -> dict[str, int]:
    """Limits on waiting for a database, as arguments of a driver's connections: by default most wait for ever."""
    if driver == "pysqlite":
        return {"timeout": _CONNECT_SECONDS}  # of waiting for a lock, which is then tried again
    if driver in ("psycopg", "psycopg2"):
        return {
            "connect_timeout": _CONNECT_SECONDS,
            "tcp_user_timeout": 1000 * _SILENT_SECONDS,  # of what was sent and is not acknowledged
            "keepalives_idle": max(1, _SILENT_SECONDS // 2),  # of an answer that is waited for
            "keepalives_interval": max(1, _SILENT_SECONDS // 6),
            "keepalives_count": 3,
        }
    if driver in ("pymysql", "mysqldb"):
        return {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _SILENT_SECONDS, "write_timeout": _SILENT_SECONDS}
    return {}


def _root_cause(error: BaseException) -> BaseException:
    """The error that an error came from in the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_locked(error: BaseException) -> bool:
    """Whether another process keeps SQLite's file locked: nothing of the operation was then carried out."""
    return isinstance(error, sqlite3.OperationalError) and getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def reason(error: BaseException) -> str:
    """The first line of an error's root cause, without passwords, cut to 200 characters."""
    error = _root_cause(error)
    return without_secrets(next(iter(str(error).strip().splitlines()), type(error).__name__))[:200]


class _ConnectionLostError(Exception):
    """The connection to the database was lost, or could not be made, or another process has the database locked.

    It is none of SQLAlchemy's errors, so that Optuna, which repeats some statements after those by itself, passes it on.
    """


def _raise_if_lost(context: sqlalchemy.engine.ExceptionContext) -> None:
    is_new = context.connection is None  # it was being made
    is_locked = _is_locked(context.original_exception)
    if not context.is_pre_ping and (
        context.is_disconnect or is_locked or (is_new and isinstance(context.sqlalchemy_exception, _UNREACHABLE))
    ):
        raise _ConnectionLostError(reason(context.original_exception)) from context.original_exception


_UNREACHABLE = (sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError)


class PatientStorage(BaseStorage):
    """A database as Optuna's storage that does each operation again, once the database is back, if the connection was lost in it.

    Each operation waits for up to ``PATIENCE_SECONDS``, and raises StorageInternalError then.
    """

    def __init__(self, database: RDBStorage) -> None:
        self._storage = get_storage(database)  # with Optuna's own cache

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Create a trial, once."""
        template = create_trial(state=TrialState.RUNNING) if template_trial is None else copy(template_trial)
        token = uuid4().hex
        template.system_attrs = {**template.system_attrs, _CREATION: token}

        def create(*, is_again: bool) -> int:
            trials = self._storage.get_all_trials(study_id, deepcopy=False) if is_again else []
            created = next((trial for trial in trials if trial.system_attrs.get(_CREATION) == token), None)
            return self._storage.create_new_trial(study_id, template) if created is None else created._trial_id  # noqa: SLF001  # no public way

        return _patiently(create)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Start or end a trial, once."""

        def change(*, is_again: bool) -> bool:
            try:
                is_changed = self._storage.set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                trial = self._storage.get_trial(trial_id)
                if is_again and trial.state is state and (values is None or trial.values == list(values)):
                    return True
                raise
            return is_changed or (is_again and self._storage.get_trial(trial_id).state is state)

        return _patiently(change)


def _repeated(name: str) -> Callable[..., Any]:
    """A method of storages that may be done twice: it reads, or sets what is the same if it is set again."""

    def method(self: PatientStorage, *arguments: Any, **keywords: Any) -> Any:
        operation = partial(getattr(self._storage, name), *arguments, **keywords)
        return _patiently(lambda *, is_again: operation())  # noqa: PLW0108  # that it is done again makes no difference to it

    method.__name__ = name
    return method


for _name in BaseStorage.__abstractmethods__ - vars(PatientStorage).keys():
    setattr(PatientStorage, _name, _repeated(_name))
abc.update_abstractmethods(PatientStorage)  # type: ignore[type-abstract]


def _patiently(operation: Callable[..., _Result]) -> _Result:
    """Do an operation, again and again while the connection is lost in it, until ``PATIENCE_SECONDS`` have passed.

    Args:
        operation: takes ``is_again``: whether it was begun before, and may have been carried out.
    """
    began_at, is_again = time.monotonic(), False
    while True:
        try:
            result = operation(is_again=is_again)
        except _ConnectionLostError as error:
            if time.monotonic() - began_at > PATIENCE_SECONDS:
                raise StorageInternalError(f"no answer for {PATIENCE_SECONDS:g} s") from error
            if not is_again:
                logger.warning("search.storage does not answer (%s); it is waited for", error)
            is_again = True
        else:
            if is_again:
                logger.warning("search.storage answers again after %.0f s; the study goes on", time.monotonic() - began_at)
            return result
        time.sleep(_TRY_EVERY_SECONDS)
