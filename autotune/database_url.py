"""URLs of databases, as the study's storage and MLflow's store take them: passwords hidden, and a check that the server answers.

Without the check, a database client retries for minutes when the server does not answer.
"""

import re
import socket
from urllib.parse import urlsplit

_PORTS = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306, "mssql": 1433, "oracle": 1521}
_CONNECT_SECONDS = 10


def without_password(text: str) -> str:
    """The text with the password in every URL hidden."""
    return re.sub(r"(://[^\s:/@]*):[^\s/]*@", r"\1:***@", text)


def kind_of_database(url: str) -> str:
    """Kind of the database that a URL names, such as ``postgresql``, without the driver."""
    return urlsplit(url).scheme.partition("+")[0]


def check_listens(url: str) -> None:
    """Raise OSError if nothing listens at the host and port of a database's URL; a URL without a host is not checked."""
    parts, kind = urlsplit(url), kind_of_database(url)
    if parts.hostname and kind in _PORTS:
        socket.create_connection((parts.hostname, parts.port or _PORTS[kind]), timeout=_CONNECT_SECONDS).close()
