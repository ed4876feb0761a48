"""Values in Hydra's grammar and as OmegaConf holds them, and lists of overrides:
``a=[device=cpu,model.widths=[16,32]]``.

``autotune.space.override_text`` writes a value in Hydra's grammar, and ``read_value`` reads it. The
grammar has no ``key=value`` within a list, so a list of overrides is split at those commas that end
an override.
"""

import re
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from autotune.errors import ConfigError

_MAX_SHOWN = 200

_MISSING = "???"
_MISSING_AS_TEXT = "${autotune.text:???}"
OmegaConf.register_new_resolver("autotune.text", lambda text: text, replace=True)


def read_value(text: str) -> Any:
    """Value, with its type, of a text that ``autotune.space.override_text`` wrote.

    Raises:
        ConfigError: the text is no value in Hydra's grammar.
    """
    try:
        override = parse_override(f"value={text}")
        if override.is_sweep_override():
            raise ConfigError("it is a sweep")
    except ConfigError as error:
        raise ConfigError(
            f"{text[:_MAX_SHOWN]!r}: not a value, which is a number, true, false, null, a list, or"
            " text in quotes"
        ) from error
    return override.value()


def as_configured(value: Any) -> Any:
    """Plain data as OmegaConf is to hold it, so that it resolves to the same data.

    ``${`` in a text gets a backslash (and those before it are doubled), since it would begin an
    interpolation; the text ``???``, which would be a missing value, is what a resolver of
    autotune's gives.
    """
    if isinstance(value, str):
        return _MISSING_AS_TEXT if value == _MISSING else re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: as_configured(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_configured(item) for item in value]
    return value


def without_plain_text(text: str) -> str:
    """A text as OmegaConf holds it, without what ``as_configured`` wrote: each ``${`` that is
    left stands for something else.
    """
    return "" if text == _MISSING_AS_TEXT else re.sub(r"(?<!\\)((?:\\\\)*)\\\$\{", r"\1\\ ", text)


def parse_override(text: str) -> Override:
    """Parse one override.

    Raises:
        ConfigError: the text is no override.
    """
    found = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.key_or_group:
            raise ValueError("it has no key")
    # ValueError: a number of thousands of digits, too
    except (HydraException, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{found!r}: not an override; write key=value (quote values with special characters:"
            " 'key=\"a b\"')"
        ) from error
    return override


def read_override_list(text: str, where: str) -> tuple[str, ...]:
    """Split the text of a list into its overrides; an element may be quoted as a whole.

    Args:
        text: such as ``[device=cpu,model.widths=[16,32]]``.
        where: the list's name, for messages.

    Raises:
        ConfigError: the text is no list, or an element is no override.
    """
    stripped = text.strip()
    example = f"write a list of overrides, {where}=[device=cpu,optimizer.lr=0.1], or {where}=[]"
    if not (stripped.startswith("[") and stripped.endswith("]")):
        raise ConfigError(f"{where}: found {text!r}; {example}")
    overrides: list[str] = []
    pieces = stripped[1:-1].split(",") if stripped[1:-1].strip() else []
    while pieces:
        element = _unquoted(pieces[0].strip())
        if not pieces[0].endswith("\\") and _is_override(element):
            overrides.append(element)
            pieces.pop(0)
        elif len(pieces) > 1:  # the comma is escaped, or in brackets or quotes
            pieces[:2] = [",".join(pieces[:2])]
        else:
            raise ConfigError(f"{where}: found {element!r} in it; {example}")
    return tuple(overrides)


def _is_override(text: str) -> bool:
    try:
        return "=" in text and bool(parse_override(text))
    except ConfigError:
        return False


def _unquoted(element: str) -> str:
    """Remove the quotes around an element, if they enclose all of it."""
    quote = element[:1]
    if len(element) < 2 or quote not in ("'", '"') or element[-1] != quote:
        return element
    inner = element[1:-1].replace(f"\\{quote}", "\0")
    return element if quote in inner else inner.replace("\0", quote)
