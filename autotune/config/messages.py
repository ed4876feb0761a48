"""Errors of Hydra and OmegaConf as one line each."""

import re
from collections.abc import Sequence

from autotune.errors import did_you_mean

_GONE = {
    "cluster.keep_cpus_awake": "no process keeps CPUs awake",
    "data.max_bytes": "data files may have any size",
    "data.max_columns": "data files may have any size",
    "reuse_process": "each trial has a process of its own",
    "training._reuse_process_": "each trial has a process of its own",
    "notify": (
        "send the message from what starts the study, by its exit code and the study's summary.json"
    ),
}
"""Keys of the version before, and what took their place."""


def value_message(error: BaseException) -> str:
    """An error of Hydra, OmegaConf, YAML or the file system as one line, which begins with the key
    if there is one.
    """
    cause = error.__cause__
    if getattr(cause, "full_key", None) or (cause and not str(error)):
        return value_message(cause)  # type: ignore[arg-type]  # not None
    key = getattr(error, "full_key", None)
    text = " ".join(re.split(r"\n\s*full_key:", str(error))[0].split())
    if found := re.search(r"is not a subclass of (\w+?)(?:Config)?\. value: (.*)", text):
        return f"{found[1].lower()}: found {found[2]}; write {found[1].lower()}.KEY=VALUE"
    return f"{key}: {text}" if key else text


def unknown_key_message(key: str, known: Sequence[str]) -> str:
    """What to write in place of a key that no configuration has.

    Args:
        known: the keys of the configuration.
    """
    if key in _GONE:
        return f"{key}: there is no such key any more; {_GONE[key]}"
    parent = key.rpartition(".")[0]
    is_argument = f"{parent}._target_" in known
    siblings = [name for name in known if name.startswith(f"{parent}.")] if is_argument else known
    hint = did_you_mean(key, [name for name in siblings if not name.endswith("._target_")])
    added = f"; +{key}=VALUE adds an argument" if is_argument and not hint else ""
    return f"{key}: no such key{hint}; --cfg job prints all keys{added}"
