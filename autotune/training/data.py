"""The data of a training: loads and checks a data set, gathers batches of it, and brings both to
the device.

Contract of ``data:`` in the configuration: a callable that returns a mapping from split to data,
``train`` and ``validation`` and optionally ``test``. A split is a pair (inputs [samples, ...],
targets [samples, ...]) of tensors or arrays, or a map-style ``torch.utils.data.Dataset``, which is
read once into such a pair. Arrays may be mapped from files larger than memory: they are read one
batch at a time. If the mapping has ``transform``, it is applied on the device to the inputs of
every batch of every split, for example to turn bytes into standardised numbers. A process keeps the
last data set that it loaded, for later trials.

The samples of a step depend on the seed alone, never on where the data is or which process gathers
it. Batches of a split on the device are gathered there. Batches of a split in host memory (or
mapped from a file larger than memory) are gathered ahead by a thread or by worker processes, and
copied to a GPU from pinned memory on a separate stream while the previous step is computed.
"""

import hashlib
import json
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from autotune.config.build import build_partial
from autotune.config.schema import TrialConfig
from autotune.errors import DataError, explained


@dataclass(frozen=True)
class Split:
    """One split of a data set: inputs [samples, ...] and targets [samples, ...], on one device."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def num_bytes(self) -> int:
        """Size of inputs and targets in bytes."""
        return self.inputs.nbytes + self.targets.nbytes


def memory_format_of(inputs: Tensor) -> torch.memory_format:
    """Channels-last for 4-D inputs that are in this format only, else contiguous."""
    is_channels_last = (
        inputs.ndim == 4
        and inputs.is_contiguous(memory_format=torch.channels_last)
        and not inputs.is_contiguous()
    )
    return torch.channels_last if is_channels_last else torch.contiguous_format


@dataclass(frozen=True)
class LoadedData:
    """A data set in host memory that has passed all checks."""

    train: Split
    validation: Split
    test: Split | None
    transform: Callable[[Tensor], Tensor]
    """Function that turns stored inputs into model inputs, on the device."""
    is_mapped: bool
    """Whether the training split is mapped from a file."""
    checksum: str
    """Checksum of the shapes, dtypes and a sample of the bytes of all splits."""

    @property
    def example(self) -> Tensor:
        """The first transformed input, by whose shape and dtype a model is made."""
        return self.transform(self.train.inputs[:1])[0]

    @cached_property
    def num_classes(self) -> int | None:
        """Number of classes of integer targets; None for floating-point targets.

        Reads every target, once per data set.
        """
        if self.train.targets.is_floating_point():
            return None
        return max(int(split.targets.max()) for split in (self.train, self.validation)) + 1

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the training and validation splits on a device."""
        return self.train.num_bytes + self.validation.num_bytes


_loaded: tuple[str, LoadedData] | None = None


def load_data(config: TrialConfig) -> LoadedData:
    """Load the data set that a configuration names, or return it from memory if this process loaded
    it last.

    Raises:
        DataError: the data set is missing, unreadable or malformed.
        ConfigError: ``data._target_`` is not allowed or refuses its values.
    """
    global _loaded  # noqa: PLW0603  # a process keeps one data set
    key = json.dumps([config.data, config.allowed_targets], sort_keys=True, default=str)
    if _loaded is None or _loaded[0] != key:
        _loaded = None  # frees the old data set before the new one takes memory
        _loaded = (key, _load(config))
    return _loaded[1]


def _load(config: TrialConfig) -> LoadedData:
    load = build_partial(config.data, config.allowed_targets, "data")
    name = config.data["_target_"]
    with explained(f"data: {name} failed"):
        splits = load()
    if not isinstance(splits, Mapping) or not {"train", "validation"} <= set(splits):
        found = list(splits) if isinstance(splits, Mapping) else type(splits).__name__
        raise DataError(
            f"data: {name} returned {found}; it must return a mapping with train, validation and"
            " optionally test and transform"
        )
    train = splits["train"]
    checked = {
        split: _split(splits[split], f"data: {name}: {split}")
        for split in ("train", "validation", "test")
        if split in splits
    }
    return LoadedData(
        checked["train"],
        checked["validation"],
        checked.get("test"),
        splits.get("transform", lambda inputs: inputs),
        is_mapped=isinstance(train, tuple | list) and isinstance(train[0], np.memmap),
        checksum=_checksum(checked),
    )


def _split(given: Any, where: str) -> Split:
    kind = type(given).__name__
    with explained(
        f"{where}: a {kind} cannot be read as a pair (inputs, targets) of tensors or arrays"
    ):
        if isinstance(given, Dataset):
            size = len(given)  # type: ignore[arg-type]  # map-style by contract
            given = next(iter(DataLoader(given, batch_size=size)))
        inputs, targets = (_tensor(array) for array in given)
    if inputs.ndim == 0 or targets.ndim == 0 or not len(inputs) == len(targets) > 0:
        raise DataError(
            f"{where}: found inputs {list(inputs.shape)} and targets {list(targets.shape)}; both"
            " need the same number of samples, at least one"
        )
    return Split(inputs, targets)


def _tensor(array: Any) -> Tensor:
    """A tensor or array as a tensor in host memory.

    An array, mapped from a file or not, shares its memory with the result.
    """
    with warnings.catch_warnings():
        # nothing here writes to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(array).detach().cpu()


def _checksum(splits: Mapping[str, Split]) -> str:
    digest = hashlib.sha256()
    for name, split in splits.items():
        for tensor in (split.inputs, split.targets):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            sample = tensor[:: max(1, len(tensor) // 256)].contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def fits_on(device: torch.device, data: LoadedData | Split) -> bool:
    """Whether the data set, or a split, can be kept on the device: in half of the memory that was
    free even at this process's peak since the last reset.

    For the CPU, whether it is not mapped from a file.
    """
    if device.type == "cpu":
        return isinstance(data, Split) or not data.is_mapped
    cached = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return data.num_bytes <= (torch.cuda.mem_get_info(device)[0] + cached) / 2


class Batch(NamedTuple):
    """One batch: inputs ``[batch, ...]``, targets ``[batch, ...]`` and the samples' indices in
    the training split ``[batch]``.
    """

    inputs: Tensor
    targets: Tensor
    samples: Tensor


def sample_order(
    num_samples: int,
    batch_size: int,
    total_steps: int,
    seed: int,
    *,
    first_step: int,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield the sample indices ``[batch]`` of every step from ``first_step`` on.

    Each epoch has a new order, without its incomplete last batch. The order is drawn on the CPU, so
    that it is the same for every device. It is moved one epoch at a time; to a GPU from pinned
    memory, so that the host does not wait for the copy.
    """
    generator = torch.Generator().manual_seed(seed)
    steps_per_epoch = num_samples // batch_size
    for step in range(0, total_steps, steps_per_epoch):
        order = torch.randperm(num_samples, generator=generator)
        last = min(steps_per_epoch, total_steps - step)
        if first_step < step + last:
            if device.type == "cuda":
                order = order.pin_memory()
            batches = torch.split(order.to(device, non_blocking=True), batch_size)
            yield from batches[max(0, first_step - step) : last]


def host_batches(
    split: Split,
    order: Iterator[Tensor],
    *,
    num_workers: int,
    prefetch_batches: int,
    device: torch.device,
) -> Generator[Batch]:
    """Yield batches of a split in host memory, gathered ahead of time and copied to the device.

    Args:
        split: the split, in host memory.
        order: sample indices of each batch, in host memory.
        num_workers: number of processes that gather; 0 for a thread.
        prefetch_batches: number of batches gathered ahead, by the thread or by each process.
        device: the device that trains.
    """
    pinned = device.type == "cuda"
    if num_workers == 0:
        gathered = _ahead((gather(split, samples, pinned) for samples in order), prefetch_batches)
    else:
        loader = DataLoader(
            _Rows(split),
            sampler=(samples.tolist() for samples in order),
            batch_size=None,  # the sampler has whole batches
            num_workers=num_workers,
            prefetch_factor=prefetch_batches,
            pin_memory=pinned,
        )
        gathered = (batch for batch in loader)
    with closing(gathered):
        yield from _moved_ahead(gathered, device) if pinned else gathered


def gather(split: Split, samples: Tensor, pinned: bool = False) -> Batch:
    """The batch of some samples ``[batch]`` of a split on the same device, in pinned memory if
    requested.
    """
    batch = Batch(
        _selected_rows(split.inputs, samples), split.targets.index_select(0, samples), samples
    )
    return Batch(*(tensor.pin_memory() for tensor in batch)) if pinned else batch


def _selected_rows(inputs: Tensor, samples: Tensor) -> Tensor:
    """The selected rows of a tensor, in the tensor's memory format."""
    if memory_format_of(inputs) is torch.channels_last:
        return inputs.permute(0, 2, 3, 1).index_select(0, samples).permute(0, 3, 1, 2)
    return inputs.index_select(0, samples)


def _ahead(batches: Iterator[Batch], num_batches: int) -> Generator[Batch]:
    """Yield batches that a thread takes from an iterator, ``num_batches`` ahead of the consumer."""
    thread = ThreadPoolExecutor(1, "batches")
    try:
        coming = deque(thread.submit(next, batches, None) for _ in range(num_batches))
        while (batch := coming.popleft().result()) is not None:
            coming.append(thread.submit(next, batches, None))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)


class _Rows(Dataset[Batch]):
    """A split as a Dataset that gathers a whole batch in one call."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __getitem__(self, samples: list[int]) -> Batch:
        return gather(self._split, torch.tensor(samples))


def _moved_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches moved to a GPU, each copied on a separate stream while the GPU trains on the
    previous batch.

    The training's stream waits until a copy has completed, the host does not wait.
    """
    # missing in torch's stubs
    copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    coming: tuple[Batch, torch.cuda.Event] | None = None
    for batch in chain(batches, [None]):
        moved = coming
        if batch is not None:
            with torch.cuda.stream(copy_stream):
                copies = Batch(*(tensor.to(device, non_blocking=True) for tensor in batch))
                coming = copies, copy_stream.record_event()
        if moved is not None:
            copies, arrival = moved
            current = torch.cuda.current_stream()
            current.wait_event(arrival)
            for tensor in copies:
                tensor.record_stream(current)
            yield copies
