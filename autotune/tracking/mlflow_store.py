"""Opens an MLflow store, without MLflow's own retries and log output.

A store that cannot be reached is reported in one line before a study takes any device. By itself MLflow retries a server for
minutes and a database for two minutes, prints tracebacks of what it retries, and lists the migrations of every new database.
"""

import inspect
import json
import logging
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import sqlalchemy
from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from autotune.errors import AutotuneError
from autotune.hiding import without_secrets
from autotune.remote import check_listens, kind_of_database
from autotune.tracking.mlflow_fields import MAX_TAG_CHARACTERS, plain_key
from autotune.tracking.mlflow_uri import reason_of, unusable

LOGGER = logging.getLogger("autotune.tracking")

_QUIET_LOGGERS = {
    "alembic": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}
_DATABASES = {"sqlite", "postgresql", "mysql", "mssql"}
_RUNS_PER_PAGE = 1000
_HALF_MADE = re.compile(r"table \S+ already exists|duplicate column")
"""What SQLite says of a file whose migration is begun again: MLflow's migrations are no transactions."""
_HALF_MADE_REMEDY = "MLflow was ended while it made or changed its tables; move the file away, or put back a copy of it"


@contextmanager
def first_contact(uri: str) -> Iterator[None]:
    """Context manager that quiets MLflow's loggers and turns any error that is not autotune's own into a one-line error.

    Raises:
        ConfigError: the store does not answer, is not an MLflow store, or refuses.
    """
    for logger, level in _QUIET_LOGGERS.items():
        logging.getLogger(logger).setLevel(level)
    try:
        with warnings.catch_warnings():  # caused by MLflow's use of SQLAlchemy, which our users cannot change
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except AutotuneError:
        raise
    except Exception as error:  # each kind of store raises its own client's errors
        reason = reason_of(error)
        raise unusable(uri, reason, _HALF_MADE_REMEDY if uri.startswith("sqlite") and _HALF_MADE.search(reason) else None) from error


_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Tags of an experiment: MLflow's pages then show its runs as trainings, not as evaluations of a language model."""
_VIEW_KEY = "autotune"
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW_KEY}"
_VIEW_NAME = "trials, best first"
_VIEW = {
    "searchFilter": "tags.`autotune.phase` = 'search'",
    "orderByKey": "metrics.`score`",
    "orderByAsc": True,
    "selectedColumns": ["metrics.`score`", "metrics.`metric`", "tags.`autotune.outcome`", "tags.`autotune.study`"],
}
"""State of MLflow's table of runs that its menu Views offers, but for columns of params: as MLflow itself shows the table, it has neither.

Source: the experiment's tag that MLflow 3.17's page writes where a view is saved.
"""


def open_experiment(uri: str, name: str, parameters: Sequence[str] = ()) -> tuple[MlflowClient, str]:
    """A client of the store, and the id of the named experiment, which is created or restored, and given a view, if necessary.

    Args:
        parameters: config keys whose params the view is to show as columns.
    """
    _check_database(uri)
    _make_tables(uri)
    client = MlflowClient(uri)
    experiment = _experiment_id(client, uri, name)
    stored = client.get_experiment(experiment).tags.get(_VIEW_TAG)
    if (view := _view_with(stored, [f"params.`{plain_key(key)}`" for key in parameters])) != stored:
        client.set_experiment_tag(experiment, _VIEW_TAG, view)
    return client, experiment


def _view_with(stored: str | None, columns: Sequence[str]) -> str:
    """The view with further columns, as many as its tag has room for; one that somebody changed stays as it is."""
    now = round(time.time() * 1000)
    view: dict[str, Any] = {"name": _VIEW_NAME, "createdAt": now, "updatedAt": now, "state": json.dumps(_VIEW)}
    try:
        view = view if stored is None else json.loads(stored)
        state = json.loads(view["state"])
        if stored is not None and view["updatedAt"] != view["createdAt"]:
            return stored
        for column in columns:
            state["selectedColumns"] += [column] if column not in state["selectedColumns"] else []
            with_column = {**view, "state": json.dumps(state)}
            if len(json.dumps(with_column)) > MAX_TAG_CHARACTERS:
                break
            view = with_column
    except (LookupError, TypeError, ValueError):  # it is not autotune's own any more
        return str(stored)
    return json.dumps(view)


def view_page(uri: str, experiment: str) -> str:
    """Address of the page that shows the view, of the store's server or of ``mlflow ui`` on this machine; ``experiment`` is its id."""
    server = uri.rstrip("/") if uri.startswith(("http://", "https://")) else "http://127.0.0.1:5000"
    return f"{without_secrets(server)}/#/experiments/{experiment}/runs?viewStateShareKey={_VIEW_KEY}"


def open_store(uri: str) -> MlflowClient:
    """A client that reads an existing store; a SQLite file that does not exist is an error and is not created."""
    database = sqlalchemy.make_url(uri).database if uri.startswith("sqlite") else None
    if database is not None and not Path(database).is_file():
        raise FileNotFoundError(f"there is no file {database}")
    _check_database(uri)
    return MlflowClient(uri)


def find_run(client: MlflowClient, run_id: str) -> Run | None:
    """The run of that id; None if there is none."""
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def tagged_runs(client: MlflowClient, experiment: str, tags: Mapping[str, str], condition: str = "") -> list[Run]:
    """All runs of an experiment that have all the given tags, and meet a condition in MLflow's grammar; ``experiment`` is its id."""
    query = " and ".join([*(f"tags.`{key}` = {_quoted(value)}" for key, value in tags.items()), *filter(None, [condition])])
    runs: list[Run] = []
    token: str | None = None
    while True:
        page = client.search_runs([experiment], query, max_results=_RUNS_PER_PAGE, page_token=token)
        runs += page
        token = page.token
        if not token:
            return runs


@dataclass(frozen=True, kw_only=True)
class ChildRun:
    """What a study needs to know of a run of its own that is in the store."""

    run_id: str
    run_name: str
    status: str
    tags: Mapping[str, str]
    """Some of its tags."""


def child_runs(client: MlflowClient, experiment: str, parent: str, tags: Sequence[str]) -> list[ChildRun]:
    """The child runs of a run with those of the tags that they have, the last started first; ``experiment`` is its id.

    A database is asked for just that: MLflow itself would read all metrics and params of every run, which takes 3 ms for each.
    """
    if not has_transactions(client):
        runs = tagged_runs(client, experiment, {MLFLOW_PARENT_RUN_ID: parent})
        return [
            ChildRun(run_id=str(run.info.run_id), run_name=str(run.info.run_name), status=run.info.status, tags=run.data.tags)
            for run in runs
        ]
    from mlflow.store.tracking.dbmodels.models import SqlRun, SqlTag  # noqa: PLC0415  # only a database has them

    of_parent = sqlalchemy.select(SqlTag.run_uuid).where(SqlTag.key == MLFLOW_PARENT_RUN_ID, SqlTag.value == parent)
    of_runs = sqlalchemy.and_(SqlRun.run_uuid.in_(of_parent), SqlRun.lifecycle_stage == LifecycleStage.ACTIVE)
    rows = sqlalchemy.select(SqlRun.run_uuid, SqlRun.name, SqlRun.status).where(of_runs).order_by(SqlRun.start_time.desc(), SqlRun.run_uuid)
    tagged = sqlalchemy.select(SqlTag.run_uuid, SqlTag.key, SqlTag.value).where(SqlTag.run_uuid.in_(of_parent), SqlTag.key.in_(tags))
    with _session_maker(client)() as session:
        found: dict[str, dict[str, str]] = {}
        for run_id, key, value in session.execute(tagged):
            found.setdefault(run_id, {})[key] = value
        runs = session.execute(rows).all()
        return [ChildRun(run_id=run_id, run_name=name, status=status, tags=found.get(run_id, {})) for run_id, name, status in runs]


def has_transactions(client: MlflowClient) -> bool:
    """Whether ``one_transaction`` works for the client's store: for a database, but not for a server."""
    return hasattr(_store_of(client), "ManagedSessionMaker")


def _store_of(client: MlflowClient) -> object:
    return getattr(getattr(client, "_tracking_client", None), "store", None)


@contextmanager
def one_transaction(client: MlflowClient) -> Iterator[None]:
    """Context manager in which all that this thread writes to a database is one transaction: it is kept as a whole or not at all.

    MLflow takes some six transactions for one run, each of which waits for the disk. All methods of its database store use sessions of its
    ``ManagedSessionMaker``; here they share one. ``has_transactions`` says whether the store has such an attribute.

    Raises:
        Exception: whatever the store raises; nothing that was written within the context is kept then.
    """
    store: Any = _store_of(client)
    make_session = store.ManagedSessionMaker
    with _session_maker(client)() as session:
        # Methods that commit midway leave that to the end here, and those that would undo a part of what they did undo everything.
        session.commit, commit = session.flush, session.commit
        session.rollback, rollback = _refuse_rollback, session.rollback

        @contextmanager
        def share_session(*_: object, **__: object) -> Iterator[Any]:
            yield session
            session.flush()

        store.ManagedSessionMaker = share_session
        try:
            yield
        finally:
            store.ManagedSessionMaker = make_session
            session.commit, session.rollback = commit, rollback


def _session_maker(client: MlflowClient) -> Callable[[], Any]:
    """What makes a context manager of a session that writes, or reads, in one transaction."""
    store: Any = _store_of(client)
    make_session = store.ManagedSessionMaker
    has_readers = "read_only" in inspect.signature(make_session).parameters
    return partial(make_session, read_only=False) if has_readers else partial(make_session)


def _refuse_rollback() -> NoReturn:
    raise MlflowException("a part of a transaction failed")


def _quoted(text: str) -> str:
    return f'"{text}"' if "'" in text else f"'{text}'"


def _check_database(uri: str) -> None:
    """Read a database once, so that an unreachable one fails at once instead of after MLflow's ten attempts."""
    if kind_of_database(uri) not in _DATABASES:
        return
    check_listens(uri)
    url = sqlalchemy.make_url(uri)
    if kind_of_database(uri) == "sqlite" and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = sqlalchemy.create_engine(url)
    try:
        sqlalchemy.inspect(engine).get_table_names()
    finally:
        engine.dispose()


def _make_tables(uri: str) -> None:
    """Make MLflow's tables in a SQLite file that has none, all of them or none.

    MLflow itself makes them one by one, cannot open a file again in which it was cut off, and fails where another process makes them, too.
    """
    path = sqlalchemy.make_url(uri).database if uri.startswith("sqlite") else None
    if not path or path.startswith((":", "file:")) or Path(path).stat().st_size:
        return
    from mlflow.store.db.utils import _initialize_tables  # noqa: PLC0415  # only for a new file; MLflow has no public way to another engine

    engine = sqlalchemy.create_engine("sqlite://", poolclass=sqlalchemy.StaticPool)  # in memory
    try:
        _initialize_tables(engine)
        made: Any = engine.raw_connection().driver_connection
        with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as file:
            file.execute("begin exclusive")
            if not file.execute("select count(*) from sqlite_master").fetchone()[0]:  # no other process was first
                for statement in made.iterdump():
                    if statement not in ("BEGIN TRANSACTION;", "COMMIT;"):
                        file.execute(statement)
            file.execute("commit")
    finally:
        engine.dispose()


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name, artifact_location=_artifact_location(uri, name), tags=_TAGS))
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # another study may have created it at the same time
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
        LOGGER.info("MLflow experiment %s was deleted; restored it", name)
    return str(experiment.experiment_id)


def _artifact_location(uri: str, experiment: str) -> str | None:
    """The folder ``mlruns`` beside a SQLite file, whatever the working folder; None for other stores, which choose their own location."""
    if not uri.startswith("sqlite"):
        return None
    database = sqlalchemy.make_url(uri).database
    return str(Path(database).resolve().parent / "mlruns" / quote(experiment, safe="")) if database else None
