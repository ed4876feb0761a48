"""Opens an MLflow store and an experiment in it, without MLflow's own retries and log output.

A store that cannot be reached is reported in one line before anything is trained. By itself MLflow
tries a database for two minutes, prints tracebacks of what it tries again, and lists the migrations
of every new database.
"""

import contextlib
import fcntl
import json
import logging
import os
import shlex
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

# Short timeouts, since failed writes are tried again, no telemetry and less output. MLflow reads
# its environment while it is imported.
os.environ.update(
    {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        **os.environ,
    }
)

import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from autotune.errors import AutotuneError, ConfigError, one_line
from autotune.redaction import without_secrets
from autotune.remote import check_listens, kind_of_database
from autotune.tracking.fields import plain_key

logger = logging.getLogger(__name__)

_QUIET_LOGGERS = {
    "alembic": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}
_DATABASES = {"sqlite", "postgresql", "mysql", "mssql"}


def store_uri(uri: str | None) -> str:
    """The URI of the store: ``uri`` if given, else MLFLOW_TRACKING_URI, else a SQLite file in the
    working folder.
    """
    default = f"sqlite:///{Path('mlflow.db').resolve()}"
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or default


@contextlib.contextmanager
def first_contact(uri: str) -> Iterator[None]:
    """Context manager that quiets MLflow's loggers and turns any error that is not autotune's own
    into a one-line error.

    Raises:
        ConfigError: the store does not answer, is not an MLflow store, or refuses.
    """
    for name, level in _QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    try:
        # caused by MLflow's use of SQLAlchemy, which our users cannot change
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except AutotuneError:
        raise
    except Exception as error:  # each kind of store raises its own client's errors
        cause: BaseException = error
        while (earlier := cause.__cause__ or cause.__context__) is not None:
            cause = earlier
        is_unknown = isinstance(cause, KeyError | AttributeError)
        reason = "MLflow knows no such kind of store" if is_unknown else one_line(cause)
        raise ConfigError(
            f"tracking.uri: {without_secrets(str(uri))}: cannot be used ({reason}); give the"
            " address of an MLflow server (http://host:5000) or a database (sqlite:///mlflow.db,"
            " postgresql://...)"
        ) from error


def open_store(uri: str) -> MlflowClient:
    """A client of a store.

    A database is read once, since MLflow itself would try one that is away ten times.
    """
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
    file = database_file(uri)
    with contextlib.nullcontext() if file is None else _locked(file.parent):
        client = open_store(uri)
        experiment = client.get_experiment_by_name(name)  # makes the tables of a new database
    if experiment is None:
        # beside a SQLite file, whatever the working folder; other stores choose their own location
        location = None if file is None else str(file.parent / "mlruns" / quote(name, safe=""))
        # MLflow's pages then show the runs as trainings, not as evaluations of a language model
        tags = {"mlflow.experimentKind": "custom_model_development"}
        try:
            client.create_experiment(name, artifact_location=location, tags=tags)
        except MlflowException as error:
            # another study created it at the same time
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(name)
    elif experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
        logger.info("MLflow experiment %s was deleted; restored it", name)
    if _VIEW_TAG not in experiment.tags:
        client.set_experiment_tag(experiment.experiment_id, _VIEW_TAG, _view(parameters))
    return client, str(experiment.experiment_id)


def database_file(uri: str) -> Path | None:
    """The file of a SQLite database; None for any other store."""
    database = sqlalchemy.make_url(uri).database if uri.startswith("sqlite") else None
    return Path(database).resolve() if database else None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make a database in a folder: MLflow's migrations of two would
    mix.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_VIEW_KEY = "autotune"
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW_KEY}"
_MAX_PARAMETERS_SHOWN = 40
"""MLflow limits the length of an experiment's tag."""


def _view(parameters: Sequence[str]) -> str:
    """State of MLflow's table of runs that its menu Views offers: as MLflow itself shows the table,
    it has neither score nor params.

    Source: the experiment's tag that MLflow 3.17's page writes where a view is saved.
    """
    state = {
        "searchFilter": "tags.`autotune.phase` = 'search'",
        "orderByKey": "metrics.`score`",
        "orderByAsc": True,
        "selectedColumns": [
            "metrics.`score`",
            "metrics.`metric`",
            "tags.`autotune.outcome`",
            "tags.`autotune.study`",
            *(f"params.`{plain_key(key)}`" for key in parameters[:_MAX_PARAMETERS_SHOWN]),
        ],
    }
    now = round(time.time() * 1000)
    view = {"name": "trials, best first", "createdAt": now, "updatedAt": now}
    return json.dumps({**view, "state": json.dumps(state)})


def view_page(uri: str, experiment: str) -> str:
    """Address of the page that shows the view, of the store's server or of ``mlflow ui`` on this
    machine; ``experiment`` is its id.
    """
    server = uri.rstrip("/") if uri.startswith(("http://", "https://")) else "http://127.0.0.1:5000"
    return (
        f"{without_secrets(server)}/#/experiments/{experiment}/runs?viewStateShareKey={_VIEW_KEY}"
    )


def browse_command(uri: str | None) -> str:
    """The command, or the address of the server, that shows the store of ``store_uri(uri)``."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return "mlflow ui"
    shown = without_secrets(uri)
    is_server = uri.startswith(("http://", "https://"))
    return shown if is_server else f"mlflow ui --backend-store-uri {shlex.quote(shown)}"
