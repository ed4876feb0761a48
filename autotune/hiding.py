"""Hides what is secret in a text: the one place that everything passes which autotune prints, logs or writes.

Texts come from command lines, from configurations and from the errors of libraries, so a secret is recognised by how it is written: as a
part of a URL, as the value of a name such as ``password``, or by the form of a well-known kind of token. A text without any is unchanged.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MARK = "***"

_DATABASES = r"(?:postgres(?:ql)?|mysql|mariadb|mssql|oracle|mongodb|rediss?|amqps?|cockroachdb|redshift|snowflake|databricks)"
_URL = re.compile(
    r"""(?P<quote>["']?)(?P<scheme>(?:\b[A-Za-z][A-Za-z0-9+.-]{0,30}::){0,4}\b[A-Za-z][A-Za-z0-9+.-]{0,30}:)?(?<!/)//(?![/\s])
        (?:(?P<port>[^\s:/?\#@"'\[]+:\d{1,5})(?=$|[/?\#'"\s]|[,;)\]}>](?![^\s/?\#"']*@))  # a host and its port, not a user and a password
          |(?P<user>[^\s:/?\#"'\[]*):(?P<password>)
          |(?P<only>[^\s/?\#"']*)@)""",
    re.VERBOSE,
)
"""The start of a URL up to a host with its port, to the colon before a password, or to the ``@`` after a name alone."""
_USER = re.compile(r"[A-Za-z_][\w.+-]{0,31}")
"""A name before ``@`` that is a user or a container; with HTTP it is a token, as anything longer is elsewhere."""

_WORDS = r"passw(?:or)?d|passphrase|passcode|pwd|secret|credentials?"
_NAME = (
    rf"(?:{_WORDS}|(?<![A-Za-z])(?:pass|token|api_?key|apikey|signature|sig|sas|jwt|bearer)|access_?token|auth_?token|id_?token|refresh_?token"
    r"|sas_?token|api[_-]?key|access[_-]?key(?:[_-]?id)?|account[_-]?key|private[_-]?key|shared[_-]?key|connection[_-]?string|aws_?access_?key_?id)"
)
_VALUE = re.compile(
    rf"""(?P<name>(?i:{_NAME}))(?P<sep>\\?["']?\s{{0,3}}(?:=>|[=:])\s{{0,3}})
        (?!\*\*\*|(?i:null|none|true|false|~)\b)(?P<value>"(?:\\.|[^"\\])+"|'(?:\\.|''|[^'\\])+'|\\".+?\\"|[^\s"']\S*)""",
    re.VERBOSE,
)
"""A name that only secrets have, and its value: ``password=...``, ``"token": "..."``, ``api_key: ...``."""
_SHORT = re.compile(r"(?i)(?:.*[^a-z])?(?:pass|token|sig|sas|signature|bearer|jwt)$")
"""Names that other things have too, such as a number of tokens: short values and numbers are then no secrets."""
_SHORTEST = 8
"""Characters of the shortest secret under such a name."""
_HEADER = re.compile(
    r"""(?i)(authorization\\?["']?\s{0,3}[=:]\s{0,3}\\?["']?)(?!\*\*\*)[^\s"'][^"'\r\n]*|\b(bearer\s+)(?!\*\*\*)[^\s"',;]{8,}"""
)

_PARAMETER = re.compile(r"""([?&;\#])([^\s=&;?\#/"'<>]{1,80})=((?:[^\s&\#"']|["'](?![\s,)\]}:;.]|$))+)""")
_SECRET_PARAMETER = re.compile(
    r"(?i)pass|pwd|secret|token|sig|cred|auth|key|sas|jwt|session|cookie|bearer|code$|^(?:x-)?(?:amz|goog|ms|oss|cos)-|^(?:se|st|sp|sr|sv|spr)$"
)
_TOKEN = re.compile(
    r"\b(?:hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|sk-[\w-]{20,}|wandb_v\d_\w{20,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{4,}\.[\w-]*)"
)


_ENCODED = re.compile(r"""(?<![^\s"'=&?])[^\s"'=&?]*%[0-9A-Fa-f]{2}[^\s"'&]*""")
_MAY_HOLD = re.compile(rf"(?i)//|[?&;#]|%|bearer|authorization|{_NAME}|hf_|gh[pousr]_|github_pat|glpat|xox|sk-|wandb_v|AKIA|ASIA|eyJ")
_MAX_PASSWORD = 4096
"""Characters of the longest password that is looked for: tokens that stand for one have some two thousand."""


def without_secrets(text: str) -> str:
    """The text with every secret in it replaced by ``***``.

    Hidden are in a URL the password, a token in place of a user, and parameters of the query or fragment that have a secret's name, such
    as a signature; elsewhere the value of such a name, a header ``Authorization``, and tokens of well-known forms. The name of a user is
    shown.
    """
    return _hidden(text, 3)


def without_secrets_in(value: Any, key: str = "") -> Any:
    """Nested plain data with the secrets in all its texts hidden; ``key`` is the name of the value, which may be a secret's."""
    if isinstance(value, Mapping):
        return {name: without_secrets_in(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_secrets_in(item, key) for item in value)
    if not isinstance(value, str) or not value:
        return value
    if re.search(rf"(?i){_NAME}$", key) and not (_SHORT.match(key) and len(value) < _SHORTEST):
        return MARK
    return without_secrets(value)


class LogFormatter(logging.Formatter):
    """Formats log messages, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        return without_secrets(super().format(record))


def _hidden(text: str, depth: int) -> str:
    """The text without secrets, those included that are percent-encoded up to ``depth`` times."""
    if not _MAY_HOLD.search(text):
        return text

    def holds_secret(encoded: str) -> bool:
        decoded = unquote(encoded)
        return depth > 0 and decoded != encoded and _hidden(decoded, depth - 1) != decoded

    def parameter(found: "re.Match[str]") -> str:
        is_secret = _SECRET_PARAMETER.search(unquote(found[2])) is not None or holds_secret(found[3])  # which may be a URL of its own
        return f"{found[1]}{found[2]}={MARK}" if is_secret else found[0]

    text = _PARAMETER.sub(parameter, _hide_users(text))
    text = _HEADER.sub(lambda found: f"{found[1] or found[2]}{MARK}", text)
    text = _TOKEN.sub(MARK, _VALUE.sub(_hide_value, text))
    return _ENCODED.sub(lambda found: MARK if holds_secret(found[0]) else found[0], text)


def _hide_users(text: str) -> str:
    """The text with passwords, and tokens in place of users, in its URLs hidden."""
    pieces, position = [], 0
    argument = re.match(r"\+{0,2}[\w./@:-]*=", text)
    starts = [0, argument.end() if argument else 0]
    starts += [start + 1 for start in starts if re.match(r"\W", text[start : start + 1])]
    while (found := _URL.search(text, position)) is not None:
        pieces.append(text[position : found.start()])
        position, scheme = found.end(), found["scheme"] or ""
        is_http = scheme.endswith(("http:", "https:", "ws:", "wss:"))
        end, name = -1, found["only"] or ""
        if found["user"] is not None:
            colon = found.end("user")
            is_argument = found.start() in starts  # spaces are a part of its URL then
            end = _end_of_password(text, colon + 1, None if is_argument else found["quote"])
        elif found["port"] is not None and re.match(_DATABASES, scheme):  # SQLAlchemy takes all up to an @ for a password
            colon = found.start("port") + found["port"].rindex(":")
            end = _end_of_password(text, colon + 1, found["quote"])
        if end >= 0:
            is_token = is_http and "@" in (found["user"] or "")  # or may be one: the colon is then the port's
            pieces.append(f"{text[found.start() : found.start('user') if is_token else colon + 1]}{MARK}@")
            position = end + 1
            continue
        if found["user"] is not None:
            name = found["user"].rpartition("@")[0]  # the colon was the port's
        is_user = not name or (_USER.fullmatch(name) and not is_http)
        pieces.append(found[0] if is_user else found[0].replace(f"//{name}@", f"//{MARK}@", 1))
    return "".join([*pieces, text[position:]])


def _end_of_password(text: str, start: int, quote: str | None) -> int:
    """Index of the last ``@`` of the URL whose password starts there; -1 if there is none, so that it is no password.

    The URL ends at its closing quote, or, where ``quote`` is empty, at a space; None means that it ends with the text.
    """
    end = min(len(text), start + _MAX_PASSWORD)
    if quote is not None:
        closing = re.compile(re.escape(quote) if quote else r"\s").search(text, start, end)
        end = closing.start() if closing else end
    return text.rfind("@", start, end)


def _hide_value(found: "re.Match[str]") -> str:
    value = found["value"]
    if found["sep"].endswith(": ") and found.string[: found.start()].endswith("/"):
        return found[0]  # the end of a path, and what is said of it
    quote = value[0] if value[0] in "\"'" and value[-1] == value[0] and len(value) > 1 else ""
    if _SHORT.match(found["name"]) and (len(value) - 2 * len(quote) < _SHORTEST or value.strip("\"'").replace(".", "").isdecimal()):
        return found[0]
    return f"{found['name']}{found['sep']}{quote}{MARK}{quote}"
