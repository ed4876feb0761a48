"""Hides passwords and signatures in URLs: the one place that all passes which autotune prints,
logs or writes.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

MARK = "***"

_PASSWORD = re.compile(
    r"""(//[^\s/?\#@'":\[]{0,200}:)(?!\d{1,5}(?:[/?\#\s'"]|$)|\*\*\*@)[^\s@'"]{1,4096}(?=@)"""
)
"""What stands between a user and a host: the colon and up to the ``@``, unless it reads as a
port."""
_PARAMETER = re.compile(
    r"""(?i)([?&;\#][\w.%-]{0,60}"""
    r"""(?:passw(?:or)?d|pwd|token|secret|signature|credential|api_?key|accesskeyid|\bsig)=)"""
    r"""(?!\*\*\*)[^\s&;\#'"]+"""
)
"""A parameter with a secret's name in the query or fragment of a URL, such as the signature of
one that was signed for a while."""


def without_secrets(text: str) -> str:
    """The text with the passwords, tokens and signatures of its URLs replaced by ``***``."""
    if "//" not in text:
        return text
    return _PARAMETER.sub(rf"\1{MARK}", _PASSWORD.sub(rf"\1{MARK}", text))


def without_secrets_in(value: Any) -> Any:
    """Nested plain data with the secrets in all its texts hidden."""
    if isinstance(value, Mapping):
        return {name: without_secrets_in(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_secrets_in, value))
    return without_secrets(value) if isinstance(value, str) else value


class LogFormatter(logging.Formatter):
    """Formats log messages, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        return without_secrets(super().format(record))
