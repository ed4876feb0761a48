"""Sources: experiments whose trained weights another experiment's technique starts from, and the
files of those weights.

The name of a checkpoint contains a hash of the source's configuration, so each configuration has a
checkpoint of its own. Sources are trained by ``autotune.training.sources``.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.config.schema import TrialConfig

INHERITED_KEYS = frozenset({"device", "data.root", "data.download", "study.folder"})
"""Keys that a source takes over from the command line: the device, and where files are, never
what is trained."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An experiment that is trained once, so that others start from its weights."""

    experiment: str
    arguments: tuple[str, ...]
    """Arguments of ``autotune train`` that train the source."""
    path: Path
    """File of the source's weights; it may not exist yet."""


def checkpoint_of(experiment: str, config: TrialConfig, folder: Path) -> Path:
    """File of an experiment's weights, in the folder of all studies.

    Its name has a hash of the configuration.
    """
    content = _without_keys_off(config.as_dict() | {"allowed_targets": None})
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[
        :12
    ]
    return (
        folder / "checkpoints" / f"{experiment.replace('/', '_')}-{digest}.safetensors"
    ).absolute()


def _without_keys_off(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove keys that are off (null or false), nested ones too, so that a key added in a later
    version changes no hash while it is off.
    """
    kept = {
        key: _without_keys_off(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }
    return {
        key: value
        for key, value in kept.items()
        if value is not None and value is not False and value != {}
    }
