"""The address of an MLflow store, and whether a server answers there; without MLflow, whose import takes seconds."""

import os
from pathlib import Path

from autotune.errors import ConfigError
from autotune.hiding import without_secrets

_ACCEPTED = "the address of an MLflow server (http://host:5000) or a database (sqlite:///mlflow.db, postgresql://...)"
_ANSWER_SECONDS = 2.0
"""Seconds that a server has for its first answer; whether a slower one will do is found out by MLflow."""


def store_uri(uri: str | None) -> str:
    """The URI of the store: ``uri`` if given, else MLFLOW_TRACKING_URI, else a SQLite file in the working folder."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').resolve()}"


def check_answers(uri: str) -> None:
    """Ask the server of a store once, if the store is a server; a proxy, a certificate or a slow answer is left to MLflow to judge.

    Raises:
        ConfigError: nothing listens at its address, its host is unknown, or it hangs up.
    """
    if not uri.startswith(("http://", "https://")):
        return
    import requests  # noqa: PLC0415  # only for a server; takes a tenth of a second

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=_ANSWER_SECONDS, stream=True, allow_redirects=False).close()
    except (requests.Timeout, requests.exceptions.SSLError, requests.exceptions.ProxyError):
        return
    except requests.ConnectionError as error:
        raise unusable(uri, reason_of(error)) from error
    except (requests.RequestException, ValueError):
        return


def unusable(uri: str, reason: str, remedy: str | None = None) -> ConfigError:
    """The error of one line for a store that cannot be used, with what to do about it, and without a password of its URI."""
    return ConfigError(f"tracking.uri: {without_secrets(uri)}: cannot be used ({reason}); {remedy or f'accepted is {_ACCEPTED}'}")


def reason_of(error: BaseException) -> str:
    """The first line, at most 200 characters, of the error at the start of the chain of causes, without a password."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, KeyError):
        return "MLflow knows no such kind of store"
    text = str(error).strip() or type(error).__name__
    return without_secrets(text.splitlines()[0])[:200]
