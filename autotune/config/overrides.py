"""Values in Hydra's grammar and as OmegaConf holds them, and lists of overrides:
``a=[device=cpu,model.widths=[16,32]]``.

``autotune.space.override_text`` writes a value in Hydra's grammar, and ``read_value`` reads it. The
grammar has no ``key=value`` within a list, so a list of overrides is split at its own commas, and
each element is then parsed as an override.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from autotune.errors import ConfigError

_OPENING = {"[": "]", "{": "}", "(": ")"}
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
        override = OverridesParser.create().parse_override(f"value={text}")
    except (HydraException, ValueError, RecursionError) as error:
        raise _no_value(text) from error
    if override.is_sweep_override():
        raise _no_value(text)
    return override.value()


def _no_value(text: str) -> ConfigError:
    return ConfigError(
        f"{text[:_MAX_SHOWN]!r}: not a value; accepted is a number, true, false, null, a list, or"
        " text in quotes"
    )


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


def parse_override(text: str, where: str = "") -> Override:
    """Parse one override.

    Args:
        where: name of the list that the override is in, for messages.

    Raises:
        ConfigError: the text is no override.
    """
    found = repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
    found = f"{where}: {found}" if where else found
    try:
        override = OverridesParser.create().parse_override(text)
    # ValueError: a number of thousands of digits
    except (HydraException, ValueError, RecursionError) as error:
        raise _no_override(found) from error
    if not override.key_or_group:
        raise _no_override(found)
    return override


def _no_override(found: str) -> ConfigError:
    return ConfigError(
        f"{found}: not an override; accepted is key=value (quote values with special characters:"
        " 'key=\"a b\"')"
    )


def read_override_list(text: str, where: str) -> tuple[str, ...]:
    """Split the text of a list into its overrides; an element may be quoted as a whole.

    Args:
        text: such as ``[device=cpu,model.widths=[16,32]]``.
        where: the list's name, for messages.

    Raises:
        ConfigError: the text is no list, or an element is no override.
    """
    stripped = text.strip()
    accepted = (
        f"accepted is a list of overrides, as in {where}=[device=cpu,optimizer.lr=0.1], or"
        f" {where}=[]"
    )
    if not (stripped.startswith("[") and stripped.endswith("]")):
        raise ConfigError(f"{where}: found {text!r}, {accepted}")
    elements = [_unquoted(element.strip()) for element in _split(stripped[1:-1], where)]
    if elements == [""]:
        return ()
    for element in elements:
        if "=" not in element:
            raise ConfigError(f"{where}: found {element!r} in it, {accepted}")
        override_key(element, where)
    return tuple(elements)


def override_key(override: str, where: str) -> str:
    """Key or config group that an override sets.

    Raises:
        ConfigError: the override does not parse.
    """
    return str(parse_override(override, where).key_or_group)


def _split(text: str, where: str) -> Sequence[str]:
    """Split a text at the commas that are neither in brackets nor in quotes."""
    elements, start, closing, quote, is_escaped = [], 0, [""], "", False
    for index, character in enumerate(text):
        if is_escaped or character == "\\":
            is_escaped = not is_escaped
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _OPENING:
            closing.append(_OPENING[character])
        elif character == closing[-1]:
            closing.pop()
        elif character in "]})":
            raise ConfigError(
                f"{where}: found {character!r} in {text!r} without its opening bracket"
            )
        elif character == "," and len(closing) == 1:
            elements.append(text[start:index])
            start = index + 1
    if quote or len(closing) > 1:
        raise ConfigError(f"{where}: found {text!r}, in which {quote or closing[-1]!r} is missing")
    return [*elements, text[start:]]


def _unquoted(element: str) -> str:
    """Remove the quotes around an element, if they enclose all of it."""
    quote = element[:1]
    if len(element) < 2 or quote not in ("'", '"') or element[-1] != quote:
        return element
    inner = element[1:-1].replace(f"\\{quote}", "\0")
    return element if quote in inner else inner.replace("\0", quote)
