"""Experiments that others start from: which checkpoint is meant where a technique names an experiment as its source.

The file's name holds a hash of all that the experiment trains, so a checkpoint belongs to one configuration and another one makes
another file. Nothing is trained here: see ``autotune.training.sources``.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.config.schema import TrialConfig

INHERITED_KEYS = frozenset({"device", "data.root", "data.download", "study.folder"})
"""What a source takes over from the command line: where things are, never what is trained."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An experiment that is trained once, for others to start from."""

    experiment: str
    arguments: tuple[str, ...]
    """The command line of ``autotune.train`` that trains it."""
    path: Path
    """The file of its weights; it need not be there yet."""


def checkpoint_of(experiment: str, config: TrialConfig, folder: Path) -> Path:
    """The file that an experiment's weights are kept in, in the folder of all studies."""
    content = _set(config.as_dict() | {"allowed_targets": None})
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return (folder / "checkpoints" / f"{experiment.replace('/', '_')}-{digest}.safetensors").absolute()


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are not off (null or false), nested ones too: a key that is added later changes no name while it is off."""
    kept = {key: _set(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value is not None and value is not False and value != {}}
