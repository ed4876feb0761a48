"""Keys that belong to a command, not to the configuration: fields of a dataclass, which OmegaConf
reads and ``--help`` lists.

@dataclass(kw_only=True)
class ProfileKeys:
    num_steps: int = own_key(20, "steps to time, and again to profile", least=1)

own, overrides = read_own_keys(ProfileKeys, ["experiment=cnn", "num_steps=5"])
own.num_steps == 5
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, field, fields
from types import NoneType
from typing import Any, TypeVar, get_args

from autotune.config.experiments import help_rows
from autotune.errors import ConfigError, did_you_mean

Keys = TypeVar("Keys")


def own_key(
    default: Any,
    help: str,  # noqa: A002  # named as in argparse
    *,
    name: str | None = None,
    shown: str | None = None,
    least: float = -math.inf,
    most: float = math.inf,
) -> Any:
    """Make a field of a command's dataclass, as ``dataclasses.field`` does.

    Args:
        default: value if the key is not given; ``...`` for a key that must be given.
        help: what the key does, in a few words.
        name: the key as it is typed; None for the field's name.
        shown: the value that ``--help`` shows; None for the default.
        least: lowest accepted number.
        most: highest accepted number.
    """
    return field(
        default=MISSING if default is ... else default,
        metadata={
            "help": help,
            "name": name,
            "shown": shown,
            "least": least,
            "most": most,
        },
    )


def own_keys_help(keys: type[Any]) -> str:
    """List the keys of a command as lines of a help text."""
    rows = [(_usage(key), key.metadata["help"]) for key in fields(keys)]
    return f"keys of this command:\n{help_rows(rows)}"


def read_own_keys(keys: type[Keys], overrides: Sequence[str]) -> tuple[Keys, tuple[str, ...]]:
    """Separate a command's own keys from the other overrides of a command line.

    Returns:
        The command's keys with their values, and all other overrides.

    Raises:
        ConfigError: a key is missing, is given twice, is misspelt, or has a wrong value.
    """
    # always a dataclass
    known = {_name(key): key for key in fields(keys)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    others: list[str] = []
    for text in overrides:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            _check_spelling(name, known)
            others.append(text)
        elif known[name].name in values:
            raise ConfigError(f"{name}: found twice; give it once")
        else:
            values[known[name].name] = _value(known[name], value)
    missing = [key for key in known.values() if key.default is MISSING and key.name not in values]
    if missing:
        names = " and ".join(map(_name, missing))
        raise ConfigError(f"{names}: missing; add {' '.join(map(_usage, missing))}")
    return keys(**values), tuple(others)


def refuse_other_keys(keys: type[Any], others: Sequence[str]) -> None:
    """Refuse all keys that are not a command's own, for a command without a configuration.

    Raises:
        ConfigError: there is another key; names it and the command's keys.
    """
    if others:
        name = others[0].partition("=")[0]
        raise ConfigError(f"{name}: no such key; there are {', '.join(map(_usage, fields(keys)))}")


def _name(key: "Field[Any]") -> str:
    return key.metadata["name"] or key.name


def _usage(key: "Field[Any]") -> str:
    shown = key.metadata["shown"]
    default = "null" if key.default is None else str(key.default)
    return f"{_name(key)}={default if shown is None else shown}"


def _value(key: "Field[Any]", text: str) -> Any:
    """Convert the text of a key's value to the field's type and check it."""
    kinds = get_args(key.type) or (key.type,)
    least, most = key.metadata["least"], key.metadata["most"]
    if text == "null" and NoneType in kinds:
        return None
    if str in kinds:
        return text
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{_name(key)}: found {text!r}; give true or false")
        return text.lower() == "true"
    try:
        number = kinds[0](text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and least <= number <= most):
        limits = f" from {least:g}" if math.isfinite(least) else ""
        limits += f" to {most:g}" if math.isfinite(most) else ""
        null = ", or null" if NoneType in kinds else ""
        raise ConfigError(
            f"{_name(key)}: found {text!r}; give a"
            f" {'whole ' if int in kinds else ''}number{limits}{null}"
        )
    return number


def _check_spelling(name: str, known: Iterable[str]) -> None:
    """Refuse a key that is similar to one of the command's keys and is no key of the
    configuration.
    """
    from autotune.config.schema import Config  # noqa: PLC0415  # after --help; imports OmegaConf

    if name.partition(".")[0].partition("/")[0] in {
        "experiment",
        *(key.name for key in fields(Config)),
    }:
        return
    if hint := did_you_mean(name.lower(), known):
        raise ConfigError(f"{name}: no such key{hint}")
