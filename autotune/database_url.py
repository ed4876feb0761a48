"""Databases by URL, as the study's storage and MLflow's store take them: shown without their password, and asked whether they answer.

A client left alone retries a database that does not answer for minutes.
"""

import re
import socket
from urllib.parse import urlsplit

_PORTS = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306, "mssql": 1433, "oracle": 1521}
_CONNECT_SECONDS = 10


def without_password(text: str) -> str:
    """Text with the passwords of the URLs in it hidden."""
    return re.sub(r"(://[^\s:/@]*):[^\s/]*@", r"\1:***@", text)


def kind_of_database(url: str) -> str:
    """What kind a URL names, such as ``postgresql``, whatever its driver."""
    return urlsplit(url).scheme.partition("+")[0]


def check_listens(url: str) -> None:
    """Raise OSError where nothing listens at the host that a database's URL names; a URL without a host is not asked."""
    parts, kind = urlsplit(url), kind_of_database(url)
    if parts.hostname and kind in _PORTS:
        socket.create_connection((parts.hostname, parts.port or _PORTS[kind]), timeout=_CONNECT_SECONDS).close()
