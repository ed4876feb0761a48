"""The ``checkpoint`` of a training function of the user's: what it saved is written when its training is paused."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, DataError
from autotune.files import make_folder
from autotune.hiding import without_secrets_in
from autotune.measurement import Evaluation
from autotune.session import Checkpoint
from autotune.training.capabilities import versions
from autotune.training.checkpoint import check_state, random_state, save_state, save_weights, set_random_state, weights_metadata

_FILES = "files"
"""Folder, within a saved state's, of the files that the function's own library wrote."""


class TrainingCheckpoint(Checkpoint):
    """What a training function saved last, and what it was resumed from.

    Args:
        device: device of the training, whose random numbers belong to its state.
        on_load: called when the function has loaded its state.
    """

    def __init__(self, device: torch.device, on_load: Callable[[], None] = lambda: None) -> None:
        self._device = device
        self._on_load = on_load
        self._resumed: Mapping[str, Any] | None = None
        self._files: Path | None = None
        self._state: Mapping[str, Any] | None = None
        self._weights: Mapping[str, Any] | None = None
        self._write_files: Callable[[Path], object] | None = None

    def resume(self, state: Mapping[str, Any], folder: Path) -> None:
        """Let the function load a state that ``write`` wrote into ``folder``."""
        self._resumed = state
        self._files = folder / _FILES if (folder / _FILES).is_dir() else None

    def load(self, objects: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See ``Checkpoint.load``.

        Raises:
            ConfigError: an object's name was not saved.
        """
        if self._resumed is None:
            return {}
        values = dict(self._resumed["values"])
        for name, owner in (objects or {}).items():
            if name not in values:
                raise ConfigError(f"checkpoint.load: found {name!r}, accepted is what was saved: {', '.join(values)}")
            owner.load_state_dict(values.pop(name))
        set_random_state(self._resumed["random"], self._device)
        self._resumed = None
        self._on_load()
        return values

    def save(
        self,
        state: Mapping[str, Any] | None,
        *,
        weights: Mapping[str, Any] | None = None,
        write_files: Callable[[Path], object] | None = None,
    ) -> None:
        """See ``Checkpoint.save``.

        Raises:
            ConfigError: the state is no mapping.
        """
        if state is not None and not isinstance(state, Mapping):
            raise ConfigError(
                f"checkpoint.save: found {type(state).__name__}, accepted is a mapping such as {{'model': model, 'epoch': 1}}"
            )
        self._state, self._weights, self._write_files = state, weights, write_files

    @property
    def files(self) -> Path | None:
        """See ``Checkpoint.files``."""
        return self._files

    @property
    def is_fresh(self) -> bool:
        """See ``Checkpoint.is_fresh``."""
        return self._state is not None

    @property
    def is_loaded(self) -> bool:
        """See ``Checkpoint.is_loaded``."""
        return self._resumed is None

    def expire(self) -> None:
        """Forget what was saved, because the training goes on."""
        self._state = self._weights = self._write_files = None

    def check(self) -> None:
        """Check that what was saved can be written.

        Raises:
            DataError: it holds a value that cannot.
        """
        check_state(self._values())

    def write(self, folder: Path, config: TrialConfig, evaluation: Evaluation) -> None:
        """Write what the function saved before its last evaluation into a folder, in place of its earlier state.

        Raises:
            DataError: the state cannot be written.
        """
        files = folder / _FILES
        try:
            shutil.rmtree(files, ignore_errors=True)
            if self._write_files is not None:
                make_folder(files)
                self._write_files(files)
        except OSError as error:
            raise DataError(f"{files}: cannot be written: {error.strerror}") from error
        save_state(
            folder,
            {
                "config": without_secrets_in(config.as_dict()),
                "evaluation": evaluation.as_dict(),
                "random": random_state(self._device),
                "values": self._values(),
            },
        )

    def write_weights(self, path: Path, config: TrialConfig, evaluation: Evaluation, origin: Mapping[str, Any]) -> None:
        """Write the weights that the function saved before its last evaluation, if it saved any.

        Raises:
            DataError: the file cannot be written.
        """
        models = (value for value in (self._state or {}).values() if isinstance(value, torch.nn.Module))
        model = next(models, None)
        weights = self._weights if self._weights is not None or model is None else model.state_dict()
        if weights is not None:
            metadata = weights_metadata(config, input_shape=(), num_classes=None, evaluation=evaluation, versions=versions(), origin=origin)
            save_weights(path, weights, metadata)

    def _values(self) -> dict[str, Any]:
        assert self._state is not None, "nothing was saved"
        return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in self._state.items()}
