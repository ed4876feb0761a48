"""Checkpoints: files with a model's weights, or with the whole state of a training, that are safe
to open.

Weights are a safetensors file, whose header says what model they belong to. A state is written by
``torch.save``, and read as plain data and tensors only (``weights_only``): reading a checkpoint
from anyone runs no code of it. Both are replaced as a whole.
"""

import copy
import json
import pickle
import random
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from errno import ENOSPC
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, DataError, FileError, StateError, explained, one_line
from autotune.files import FORMAT, STATE_FILE, check_format, make_folder, replace_file, replacing
from autotune.measurement import Evaluation
from autotune.redaction import without_secrets_in
from autotune.session import Checkpoint
from autotune.training.capabilities import versions
from autotune.training.parallel.sharded import (
    load_sharded,
    save_sharded,
    sharded_names,
    whole_state,
)

_ARRAY_TYPES = [
    bytes,
    np.ndarray,
    np.dtype,
    np.empty(0).__reduce__()[0],
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
]
"""What NumPy's arrays are made of in a file of ``torch.save``."""


def save_weights(
    path: Path, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]
) -> None:
    """Write named tensors, such as a model's ``state_dict()``, atomically: a reader sees the old
    file or the new one.

    One tensor under several names (tied weights) is written once. ``metadata`` is plain data, as
    JSON holds it; see ``weights_metadata``.

    Raises:
        DataError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first_names: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        first = first_names.setdefault(memory if tensor.numel() else (name,), name)
        if first == name:
            tensors[name] = tensor.detach().to(
                "cpu", copy=True, memory_format=torch.contiguous_format
            )
        else:
            tied[name] = first
    text = json.dumps({"format_version": FORMAT, "tied": tied, "metadata": metadata})
    make_folder(path.parent)
    try:
        replace_file(path, save(tensors, {"format": "pt", "autotune": text}))
    except (SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{path}: cannot be written: {one_line(error)}") from error


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the named tensors, on the CPU, and the metadata that ``save_weights`` wrote.

    Tied names hold the same tensor.

    Raises:
        DataError: the file is missing, damaged, or not a weights file of autotune.
    """
    with explained(f"{path}: is not a whole safetensors file"):
        if not path.exists():
            raise DataError(f"{path}: there is no such file")
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("autotune")
            # not a mapping
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if text is None:
        raise DataError(f"{path}: was not written by autotune")
    with explained(f"{path}: is damaged"):
        header = json.loads(text)
        check_format(header["format_version"], path)
        tied = {name: tensors[first] for name, first in header["tied"].items()}
        return {**tensors, **tied}, dict(header["metadata"])


def read_weights_once(path: Path) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """Cached ``read_weights``: a process keeps the last two files that it read, until they change;
    callers must not change the result.

    Raises:
        DataError: the file is missing, damaged, or not a weights file of autotune.
    """
    try:
        status = path.stat()
    except OSError:
        return read_weights(path)  # raises the error
    return _read_version(path.absolute(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2)
def _read_version(
    path: Path, modified_ns: int, num_bytes: int
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    return read_weights(path)


def weights_metadata(
    config: TrialConfig,
    *,
    input_shape: tuple[int, ...],
    input_dtype: torch.dtype = torch.float32,
    num_classes: int | None,
    evaluation: Evaluation | None,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Metadata of a weights file: enough to make the model again and to know where its weights come
    from.

    Args:
        config: configuration of the training.
        input_shape: shape of one input that the model was made for.
        input_dtype: type of the model's inputs.
        num_classes: number of classes that the model was made for.
        evaluation: last evaluation of the training; None if there was none.
        origin: where the weights come from, for a reader: the experiment, the command line, the
            study and trial.
    """
    return {
        "config": without_secrets_in(config.as_dict()),
        "input_shape": list(input_shape),
        "input_dtype": str(input_dtype).removeprefix("torch."),
        "num_classes": num_classes,
        "evaluation": None if evaluation is None else evaluation.as_dict(),
        "versions": versions(),
        "origin": without_secrets_in(dict(origin)),
    }


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a training into a folder atomically: a reader sees the old state or the
    new one.

    ``state`` nests mappings, lists and tuples of numbers, text, None, tensors and NumPy arrays in
    any way, like a ``state_dict()``.

    Raises:
        DataError: the file cannot be written, or the state holds a value of another type.
    """
    content = {"format_version": FORMAT, "state": as_plain(state)}
    path = make_folder(folder) / STATE_FILE
    try:
        with replacing(path) as part:
            torch.save(content, part)
    except RuntimeError as error:  # torch's, also where the disk is full
        raise FileError(f"{path}: cannot be written: {one_line(error)}", ENOSPC) from error


def as_plain(value: Any, where: str = "") -> Any:
    """A state without types of its own, as ``save_state`` writes it.

    ``where`` is its key, for error messages.

    Raises:
        DataError: the state holds a value that cannot be written.
    """
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    if value is None or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        return value
    if isinstance(value, Mapping):
        return {
            as_plain(key, where): as_plain(item, f"{where}.{key}".lstrip("."))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [as_plain(item, f"{where}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise DataError(
        f"checkpoint: {where} is of type {type(value).__name__}; a checkpoint holds tensors,"
        " arrays, numbers, text and None, in mappings, lists and tuples"
    )


def num_bytes(state: Any) -> int:
    """Size of the tensors and arrays of a state, about that of its file."""
    if isinstance(state, torch.Tensor | np.ndarray):
        return state.nbytes
    if isinstance(state, Mapping):
        state = [*state.values()]
    return sum(map(num_bytes, state)) if isinstance(state, list | tuple) else 0


def read_state(folder: Path, *, is_checked: bool = True) -> dict[str, Any]:
    """Open the state that ``save_state`` wrote: its tensors are on the CPU, and lie in the file
    until they are used, so that the ranks of a machine have one copy of it in memory.

    What keeps tensors of it longer than the file is there needs a copy, see ``load_part``.

    Args:
        is_checked: read all of it once, to compare its checksums.

    Raises:
        StateError: the file is missing or damaged.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise StateError(f"{path}: there is no such file")
    with told_damage(folder), torch.serialization.safe_globals(_ARRAY_TYPES):
        with zipfile.ZipFile(path) as archive:
            # torch does not look at the checksums that it writes
            if is_checked and (damaged := archive.testzip()) is not None:
                raise ValueError(f"{damaged} does not have its checksum")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:  # whose text tells how to load code, too
            raise ValueError("it is no file of plain data and tensors") from error
        check_format(content["format_version"], path)
        return dict(content["state"])


def load_part(owner: Any, state: Any, device: torch.device) -> None:
    """Give an object of a training its part of an opened state.

    A module copies what it is given, and so does an optimizer of parameters on a GPU, except for
    its counts of steps; any other object may keep it.
    """
    is_copied = isinstance(owner, torch.nn.Module) or (
        isinstance(owner, torch.optim.Optimizer) and device.type != "cpu"
    )
    owner.load_state_dict(state if is_copied else copy.deepcopy(state))


def told_damage(folder: Path) -> AbstractContextManager[None]:
    """Context in which a state that can be read, and yet does not hold what a training needs to go
    on, is told in one line.

    Raises:
        StateError: something within the context does not fit.
    """
    return explained(f"{folder / STATE_FILE}: is damaged", StateError)


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the global random number generators: Python's, NumPy's, torch's on the CPU and on
    the device.
    """
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the global random number generators to the state that ``random_state`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and (on_device := state.get("cuda")) is not None:
        torch.cuda.set_rng_state(on_device, device)


class TrainingCheckpoint(Checkpoint):
    """The ``checkpoint`` of a custom training function: what it saved last, and what it was resumed
    from.

    Args:
        device: device of the training, whose random numbers belong to its state.
        resumed: state that ``write`` wrote, for the function to load; None if the training begins.
        folder: folder that it was written into.
        on_load: called when the function has loaded its state.
        rank: number of this process among those that train together.
    """

    def __init__(
        self,
        device: torch.device,
        resumed: Mapping[str, Any] | None,
        folder: Path | None,
        on_load: Callable[[], None],
        rank: int = 0,
    ) -> None:
        self._device, self._on_load, self._rank = device, on_load, rank
        self._folder = folder
        self._resumed = resumed
        """None as soon as it is loaded: it is as large as the training's own."""
        if resumed is not None and rank and folder and (folder / f"rank-{rank}").is_dir():
            self._resumed = {**resumed, **read_state(folder / f"rank-{rank}")}
        self._state: Mapping[str, Any] | None = None
        self._weights: Mapping[str, Any] | None = None
        self._write_files: Callable[[Path], object] | None = None
        self.is_resumed = False
        """Whether the training was begun by an earlier process."""
        self.end: Callable[[], float] | None = None
        """Ends a command, which then saves into its trial's folder, and returns the seconds that it
        trained until it had; None for a training that is saved as it goes on."""
        self.ended_at: Evaluation | None = None
        """The last evaluation before the training was ended so."""

    def load(self, objects: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See ``Checkpoint.load``.

        Raises:
            ConfigError: an object's name was not saved.
        """
        if (resumed := self._resumed) is None:
            return {}
        values, objects = dict(resumed["values"]), objects or {}
        for name in objects:
            if name not in values:
                raise ConfigError(
                    f"checkpoint.load: {name!r} was not saved; saved are {', '.join(values)}"
                )
        sharded = {name: objects[name] for name in sharded_names(objects)}
        if sharded and self._folder is not None:
            load_sharded(self._folder / "sharded", sharded)
        for name, owner in objects.items():
            state = values.pop(name)
            if name not in sharded:
                load_part(owner, state, self._device)
        set_random_state(resumed["random"], self._device)
        values, self._resumed = copy.deepcopy(values), None
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
                "checkpoint.save needs a mapping such as {'model': model, 'epoch': 1}, not"
                f" {type(state).__name__}"
            )
        self._state, self._weights, self._write_files = state, weights, write_files

    @property
    def files(self) -> Path | None:
        """See ``Checkpoint.files``."""
        files = None if self._folder is None else self._folder / "files"
        return files if files is not None and files.is_dir() else None

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
        self.end = None

    def check(self) -> None:
        """Check that what was saved can be written.

        Raises:
            DataError: it holds a value that cannot.
        """
        as_plain(self._values())

    def num_bytes(self) -> int:
        """Size of what the function saved before its last evaluation, about; of files that it
        writes, the weights only.
        """
        return num_bytes([*map(_as_state, (self._state or {}).values()), self._weights])

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of what was saved."""
        return bool(sharded_names(self._state or {}))

    def write_part(self, folder: Path) -> None:
        """Write this rank's part of what the function saved before its last evaluation: files,
        its shards, and its random numbers.

        Raises:
            DataError: it cannot be written.
        """
        state = self._state or {}
        try:
            if self._write_files is not None:
                self._write_files(make_folder(folder / "files"))
            if sharded := sharded_names(state):
                save_sharded(folder / "sharded", {name: state[name] for name in sharded})
        except OSError as error:
            said = f"{folder}: cannot be written: {error.strerror}"
            raise FileError(said, error.errno) from error
        if self._rank:
            save_state(folder / f"rank-{self._rank}", {"random": random_state(self._device)})

    def fault_of_writing(self, folder: Path) -> str:
        """Write what a process of a script saved before its last report; why that is not possible,
        empty if it was written.
        """
        try:
            self.write_part(folder)
            if not self._rank:
                self.write(folder / "rank-0", {})
        except Exception as error:  # noqa: BLE001  # the process that decides raises it
            return f"rank {self._rank}: {' '.join(str(error).split())}"
        return ""

    def write(self, folder: Path, contents: Mapping[str, Any]) -> None:
        """Write what the function saved before its last evaluation, with further ``contents``, into
        a folder, which has each rank's part: this makes the state a whole one.

        Raises:
            DataError: the state cannot be written.
        """
        own = {"random": random_state(self._device), "values": self._values()}
        save_state(folder, {**contents, **own})

    def weights(self) -> Mapping[str, Any] | None:
        """The weights that the function saved before its last evaluation; None if it saved none.

        Of a model that is divided among ranks, all of these call this.
        """
        values = (self._state or {}).values()
        model = next((value for value in values if isinstance(value, torch.nn.Module)), None)
        return self._weights if self._weights is not None or model is None else whole_state(model)

    def write_weights(
        self, path: Path, config: TrialConfig, evaluation: Evaluation, origin: Mapping[str, Any]
    ) -> None:
        """Write the weights that the function saved before its last evaluation, if it saved any.

        Raises:
            DataError: the file cannot be written.
        """
        if (weights := self.weights()) is not None:
            metadata = weights_metadata(
                config, input_shape=(), num_classes=None, evaluation=evaluation, origin=origin
            )
            save_weights(path, weights, metadata)

    def _values(self) -> dict[str, Any]:
        state = self._state or {}
        sharded = dict.fromkeys(sharded_names(state))  # of which each rank writes its part
        return {name: _as_state(value) for name, value in {**state, **sharded}.items()}


def _as_state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def script_checkpoint(
    folder: Path | None, rank: int, on_load: Callable[[], None]
) -> TrainingCheckpoint:
    """The checkpoint of a script's process, which continues from what ``fault_of_writing`` wrote
    into a folder, if there is one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = None if folder is None else read_state(folder / "rank-0", is_checked=rank == 0)
    return TrainingCheckpoint(device, state, folder, on_load, rank)
