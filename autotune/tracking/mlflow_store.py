"""Opens an MLflow store, without MLflow's own retries and log output.

A store that cannot be reached is reported in one line before anything is trained. By itself MLflow
tries a database for two minutes, prints tracebacks of what it tries again, and lists the migrations
of every new database.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import sqlalchemy
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from autotune.errors import AutotuneError, ConfigError
from autotune.hiding import without_secrets
from autotune.remote import check_listens, kind_of_database
from autotune.tracking.mlflow_fields import MAX_TAG_CHARACTERS, plain_key

LOGGER = logging.getLogger("autotune.tracking")

_QUIET_LOGGERS = {
    "alembic": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}
_DATABASES = {"sqlite", "postgresql", "mysql", "mssql"}
_HALF_MADE = re.compile(r"table \S+ already exists|duplicate column")
"""What SQLite says of a file whose migration is begun again: MLflow's migrations are no
transactions."""
_HALF_MADE_REMEDY = (
    "MLflow was ended while it made or changed its tables; move the file away, or put back a copy"
    " of it"
)
_REMEDY = (
    "give the address of an MLflow server (http://host:5000) or a database (sqlite:///mlflow.db,"
    " postgresql://...)"
)


def store_uri(uri: str | None) -> str:
    """The URI of the store: ``uri`` if given, else MLFLOW_TRACKING_URI, else a SQLite file in the
    working folder.

    Raises:
        ConfigError: ``uri`` is no text.
    """
    if not isinstance(uri, str | None):
        raise ConfigError(f"tracking.uri: found {uri}; {_REMEDY}")
    return (
        uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').resolve()}"
    )


@contextlib.contextmanager
def first_contact(uri: str) -> Iterator[None]:
    """Context manager that quiets MLflow's loggers and turns any error that is not autotune's own
    into a one-line error.

    Raises:
        ConfigError: the store does not answer, is not an MLflow store, or refuses.
    """
    for logger, level in _QUIET_LOGGERS.items():
        logging.getLogger(logger).setLevel(level)
    try:
        # caused by MLflow's use of SQLAlchemy, which our users cannot change
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except AutotuneError:
        raise
    except Exception as error:  # each kind of store raises its own client's errors
        reason = reason_of(error)
        remedy = (
            _HALF_MADE_REMEDY if uri.startswith("sqlite") and _HALF_MADE.search(reason) else _REMEDY
        )
        raise ConfigError(
            f"tracking.uri: {without_secrets(uri)}: cannot be used ({reason}); {remedy}"
        ) from error


def reason_of(error: BaseException) -> str:
    """The first line, at most 200 characters, of the error at the start of the chain of causes,
    without a password.
    """
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, KeyError):
        return "MLflow knows no such kind of store"
    text = str(error).strip() or type(error).__name__
    return without_secrets(text.splitlines()[0])[:200]


def open_store(uri: str, *, must_exist: bool = False) -> MlflowClient:
    """A client of a store.

    A database is read once, since MLflow itself would try one that is away ten times.

    Raises:
        FileNotFoundError: there is no such SQLite file, which is made unless it ``must_exist``.
    """
    database = sqlalchemy.make_url(uri).database if uri.startswith("sqlite") else None
    if must_exist and database and not Path(database).is_file():
        raise FileNotFoundError(f"there is no file {database}")
    if kind_of_database(uri) in _DATABASES:
        check_listens(uri)
        engine = sqlalchemy.create_engine(uri)
        try:
            sqlalchemy.inspect(engine).get_table_names()
        finally:
            engine.dispose()
    return MlflowClient(uri)


def open_experiment(uri: str, name: str, parameters: Sequence[str]) -> tuple[MlflowClient, str]:
    """A client of the store, and the id of the named experiment, which is created or restored, and
    given a view, if necessary.

    Args:
        parameters: config keys whose params the view is to show as columns.
    """
    with contextlib.ExitStack() as stack:
        if (folder := _folder(uri)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder))
        client = open_store(uri)
        experiment = client.get_experiment_by_name(name)  # makes the tables of a new database
    if experiment is None:
        # Beside a SQLite file, whatever the working folder; other stores choose their own location.
        location = None if folder is None else str(folder / "mlruns" / quote(name, safe=""))
        try:
            client.create_experiment(name, artifact_location=location, tags=_TAGS)
        except MlflowException as error:
            # another study created it at the same time
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(name)
    elif experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
        LOGGER.info("MLflow experiment %s was deleted; restored it", name)
    view = _view(
        experiment.tags.get(_VIEW_TAG), [f"params.`{plain_key(key)}`" for key in parameters]
    )
    if view is not None:
        client.set_experiment_tag(experiment.experiment_id, _VIEW_TAG, view)
    return client, str(experiment.experiment_id)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make a database in a folder: MLflow's migrations of two would
    mix.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _folder(uri: str) -> Path | None:
    """The folder of a SQLite file; None for any other store."""
    database = sqlalchemy.make_url(uri).database if uri.startswith("sqlite") else None
    return Path(database).resolve().parent if database else None


_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Tags of an experiment: MLflow's pages then show its runs as trainings, not as evaluations of a
language model."""
_VIEW_KEY = "autotune"
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW_KEY}"
_VIEW = {
    "searchFilter": "tags.`autotune.phase` = 'search'",
    "orderByKey": "metrics.`score`",
    "orderByAsc": True,
    "selectedColumns": [
        "metrics.`score`",
        "metrics.`metric`",
        "tags.`autotune.outcome`",
        "tags.`autotune.study`",
    ],
}
"""State of MLflow's table of runs that its menu Views offers, but for columns of params: as MLflow
itself shows the table, it has neither.

Source: the experiment's tag that MLflow 3.17's page writes where a view is saved."""


def _view(stored: str | None, columns: Sequence[str]) -> str | None:
    """The view with further columns, as many as its tag has room for.

    None if somebody changed it, or it has them all.
    """
    now = round(time.time() * 1000)
    view = {
        "name": "trials, best first",
        "createdAt": now,
        "updatedAt": now,
        "state": json.dumps(_VIEW),
    }
    if stored is not None:
        view = json.loads(stored)
        if view["updatedAt"] != view["createdAt"]:
            return None
    text = stored
    state = json.loads(str(view["state"]))
    for column in [column for column in columns if column not in state["selectedColumns"]]:
        state["selectedColumns"].append(column)
        longer = json.dumps({**view, "state": json.dumps(state)})
        if len(longer) > MAX_TAG_CHARACTERS:
            break
        text = longer
    return None if text == stored and stored is not None else text or json.dumps(view)


def view_page(uri: str, experiment: str) -> str:
    """Address of the page that shows the view, of the store's server or of ``mlflow ui`` on this
    machine; ``experiment`` is its id.
    """
    server = uri.rstrip("/") if uri.startswith(("http://", "https://")) else "http://127.0.0.1:5000"
    return (
        f"{without_secrets(server)}/#/experiments/{experiment}/runs?viewStateShareKey={_VIEW_KEY}"
    )


def find_run(client: MlflowClient, run_id: str) -> Run | None:
    """The run of that id; None if there is none."""
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def tagged_runs(
    client: MlflowClient, experiment: str, tags: Mapping[str, str], condition: str = ""
) -> list[Run]:
    """All runs of an experiment that have all the given tags, and meet a condition in MLflow's
    grammar; ``experiment`` is its id.
    """
    query = " and ".join(
        [
            *(f"tags.`{key}` = {_quoted(value)}" for key, value in tags.items()),
            *filter(None, [condition]),
        ]
    )
    runs: list[Run] = []
    token: str | None = None
    while True:
        page = client.search_runs([experiment], query, page_token=token)
        runs += page
        token = page.token
        if not token:
            return runs


def _quoted(text: str) -> str:
    return f'"{text}"' if "'" in text else f"'{text}'"
