"""Keys that belong to a command, not to the configuration: fields of a dataclass, which OmegaConf
reads and ``--help`` lists.

@dataclass(kw_only=True)
class ProfileKeys:
    num_steps: int = own_key(20, "steps to time, and again to profile", least=1)

own, overrides = read_own_keys(ProfileKeys, ["experiment=cnn", "num_steps=5"])
own.num_steps == 5
"""

import difflib
import math
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from autotune.errors import ConfigError

Keys = TypeVar("Keys")

_SIMILAR = 0.75
"""Similarity ratio of ``difflib`` from which an unknown key counts as a misspelling of a known
one."""
_MOST = sys.float_info.max
"""Upper limit of numbers without one of their own: infinity is never accepted."""


def own_key(
    default: Any,
    help: str,  # noqa: A002  # named as in argparse
    *,
    name: str | None = None,
    shown: str | None = None,
    accepted: str | None = None,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """Make a field of a command's dataclass, as ``dataclasses.field`` does.

    Args:
        default: value if the key is not given; ``...`` for a key that must be given.
        help: what the key does, in a few words.
        name: the key as it is typed; None for the field's name.
        shown: the value that ``--help`` shows; None for the default.
        accepted: what error messages say is accepted; None for a text made from the type and the
            limits.
        least: lowest accepted number.
        most: highest accepted number.
        choices: accepted texts; empty accepts any text.
    """
    metadata = {
        "help": help,
        "name": name,
        "shown": shown,
        "accepted": accepted,
        "least": least,
        "most": most,
        "choices": choices,
    }
    if default is ...:
        return field(metadata=metadata)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def own_keys_help(keys: type[Any]) -> str:
    """List the keys of a command as lines of a help text."""
    rows = [(f"{_name(key)}={_shown(key)}", key.metadata["help"]) for key in fields(keys)]
    width = max(len(usage) for usage, _ in rows)
    return "\n".join(
        ["keys of this command:", *(f"  {usage:<{width}}  {purpose}" for usage, purpose in rows)]
    )


def read_own_keys(keys: type[Keys], overrides: Sequence[str]) -> tuple[Keys, tuple[str, ...]]:
    """Separate a command's own keys from the other overrides of a command line.

    Returns:
        The command's keys with their values, and all other overrides.

    Raises:
        ConfigError: a key is missing, is given twice, is misspelt, or has a value that is not
            accepted.
    """
    # always a dataclass
    known = {_name(key): key for key in fields(keys)}  # type: ignore[arg-type]
    given: dict[str, str] = {}
    others: list[str] = []
    for text in overrides:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            _check_spelling(name, list(known))
            others.append(text)
        elif name in given:
            raise ConfigError(f"{name}: found twice; accepted is once")
        else:
            given[name] = value
    values = {known[name].name: _value(keys, known[name], text) for name, text in given.items()}
    missing = [name for name, key in known.items() if _is_required(key) and name not in given]
    if missing:
        accepted = " ".join(f"{name}={_shown(known[name])}" for name in missing)
        raise ConfigError(f"{' and '.join(missing)}: missing; accepted is {accepted}")
    return keys(**values), tuple(others)


def refuse_other_keys(keys: type[Any], others: Sequence[str]) -> None:
    """Refuse all keys that are not a command's own, for a command without a configuration.

    Raises:
        ConfigError: there is another key; names it and the accepted keys.
    """
    if others:
        accepted = ", ".join(f"{_name(key)}={_shown(key)}" for key in fields(keys))
        raise ConfigError(f"{others[0].partition('=')[0]}: no such key; accepted are {accepted}")


def _name(key: "Field[Any]") -> str:
    return key.metadata["name"] or key.name


def _is_required(key: "Field[Any]") -> bool:
    return key.default is MISSING and key.default_factory is MISSING


def _shown(key: "Field[Any]") -> str:
    if key.metadata["shown"] is not None:
        return str(key.metadata["shown"])
    default = key.default_factory() if key.default_factory is not MISSING else key.default
    return "null" if default is None else str(default).replace(" ", "")


def _value(keys: type[Any], key: "Field[Any]", text: str) -> Any:
    """Convert the text of a key's value to the field's type and check it.

    Raises ConfigError if it is not accepted.
    """
    refusal = ConfigError(f"{_name(key)}: found {text!r}, accepted is {_accepted(key)}")
    value: Any = text
    if key.type is not str:
        from omegaconf import OmegaConf  # noqa: PLC0415  # after --help
        from omegaconf.errors import OmegaConfBaseException  # noqa: PLC0415  # after --help

        from autotune.yaml_files import load_yaml  # noqa: PLC0415  # after --help

        config = OmegaConf.structured(keys)
        try:
            config[key.name] = (
                load_yaml(text, _name(key)) if text == "null" or text.startswith("[") else text
            )
        except (OmegaConfBaseException, ConfigError) as error:
            raise refusal from error
        # made from a dataclass
        value = OmegaConf.to_container(config)[key.name]  # type: ignore[index,call-overload]
    least, most, choices = (key.metadata[name] for name in ("least", "most", "choices"))
    numbers = [
        number
        for number in (value if isinstance(value, list) else [value])
        if isinstance(number, int | float)
    ]
    is_within = all(
        (-math.inf if least is None else least) <= number <= (_MOST if most is None else most)
        for number in numbers
    )
    if not is_within or (choices and value not in choices):
        raise refusal
    return value


def _accepted(key: "Field[Any]") -> str:
    least, most, choices, accepted = (
        key.metadata[name] for name in ("least", "most", "choices", "accepted")
    )
    if accepted is not None:
        return str(accepted)
    if choices:
        return f"one of {', '.join(choices)}"
    if key.type is bool:
        return "true or false"
    whole = "whole " if key.type is int else ""
    limits = "" if least is None else f" from {least:g}" + ("" if most is None else f" to {most:g}")
    return f"a {whole}number{limits}" + (", or null" if key.type == float | None else "")


def _check_spelling(name: str, known: Sequence[str]) -> None:
    """Refuse a key that is similar to one of the command's keys and is no key of the
    configuration.
    """
    from autotune.config.schema import Config  # noqa: PLC0415  # after --help; imports OmegaConf

    if name.partition(".")[0].partition("/")[0] in {
        "experiment",
        *(key.name for key in fields(Config)),
    }:
        return
    close = [key for key in known if key == name.lower()] or difflib.get_close_matches(
        name, known, n=1, cutoff=_SIMILAR
    )
    if close:
        raise ConfigError(f"{name}: no such key (did you mean {close[0]}=...?)")
