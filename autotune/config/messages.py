"""Errors of Hydra and OmegaConf as one line each: the key, what was found, and what is accepted
or was probably meant.
"""

import re
from collections.abc import Callable, Sequence

from hydra.errors import MissingConfigException

from autotune.errors import did_you_mean


def value_message(error: Exception) -> str:
    """An error of OmegaConf, YAML or the file system as one line that begins with the key, if
    there is one.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if part := re.search(
        r"(\w+) is not a subclass of (\w+)Config\. value: (.*)", lines[0] if lines else ""
    ):
        return f"{part[2].lower()}: found {part[3]}, accepted is a mapping"
    key = next(
        (line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")),
        "",
    )
    text = " ".join(
        line
        for line in lines
        if not re.match(
            r"(full_key|object_type|reference_type):?|object_type=|reference_type=", line
        )
    )
    if "is not a ListConfig, list or tuple" in text:
        text = f"accepted is a list, such as {key}=[...]"
    return f"{key}: {text}" if key else text


def composing_message(
    error: Exception,
    overrides: Sequence[str],
    known_keys: Callable[[], Sequence[str]],
    options: Callable[[str], Sequence[str]],
) -> str:
    """An error that Hydra raised while it composed as one line.

    Args:
        overrides: what was composed.
        known_keys: gives all keys and groups of the default configuration; it is called only if a
            key is unknown.
        options: gives the options of a config group, with the folders that they are in.
    """
    message = str(error)
    if not message and isinstance(error.__cause__, Exception):
        return value_message(error.__cause__)
    if isinstance(error, MissingConfigException) and (
        missing := re.search(r"Could not find '([^']+)'", message)
    ):
        chosen = (text.lstrip("+").partition("=") for text in overrides)
        group = next(
            (key for key, _, name in chosen if f"{key}/{name}" == missing[1]),
            missing[1].rpartition("/")[0],
        )
        option, known = missing[1].removeprefix(f"{group}/"), options(group)
        accepted = f"accepted are {', '.join(known)}" if known else "there is no such file"
        return f"{group}={option}: {accepted}{did_you_mean(option, known)}"
    if twice := re.search(
        r"Multiple values for (\S+)\. |force-add of config groups is not supported: '\++([^=]+)=",
        message,
    ):
        given = [
            text
            for text in overrides
            if text.startswith("+") and text.lstrip("+").partition("=")[0] == (twice[1] or twice[2])
        ]
        if given:
            return f"{given[-1]}: accepted is {given[-1].lstrip('+')}"
    if missing := re.search(r"In '([^']+)': Could not load '([^']+)'", message):
        return (
            f"{missing[2]}: no such file; the defaults list of {missing[1]}, or of a file that"
            " overrides it, names it"
        )
    if unknown := re.search(r"Could not override '([^']+)'", message):
        return _unknown_key(unknown[1], known_keys())
    return value_message(error)


_GONE = {
    "cluster.keep_cpus_awake": "no process keeps CPUs awake",
    "data.max_bytes": "data files may have any size",
    "data.max_columns": "data files may have any size",
    "notify": (
        "send the message from what starts the study, by its exit code and the study's summary.json"
    ),
}
"""Keys of the version before, and what took their place."""


def _unknown_key(key: str, known: Sequence[str]) -> str:
    if key in _GONE:
        return f"{key}: there is no such key any more; {_GONE[key]}"
    if key in known:
        return (
            f"{key}: is a config group; accepted is the name of one of its files, or a key in it as"
            f" in {key}.KEY=value"
        )
    part = key.rpartition(".")[0] + "."
    is_argument = f"{part}_target_" in known
    if is_argument:
        known = [name for name in known if name.startswith(part) and name != f"{part}_target_"]
    meant = did_you_mean(key, known)
    added = (
        f"; another argument is added with a plus: +{key}=VALUE"
        if is_argument and not meant
        else ""
    )
    return f"{key}: no such key{meant}; accepted keys are shown by --cfg job{added}"
