"""The contract of ``data:``, with data sets good and bad, and which samples a step sees, whoever
gathers them.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from autotune.config.schema import TrialConfig
from autotune.errors import DataError
from autotune.training.data import (
    Batch,
    LoadedData,
    Split,
    fits_on,
    gather,
    host_batches,
    load_data,
    sample_order,
)

PAIR = (torch.zeros(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]))
CPU = torch.device("cpu")
SPLIT = Split(torch.arange(40.0).view(20, 2), torch.arange(20))


def tensors(num_classes: int = 3, scale: float = 1.0) -> dict[str, Any]:
    targets = torch.arange(6) % num_classes
    inputs = scale * torch.arange(18.0).view(6, 3)
    return dict.fromkeys(("train", "validation", "test"), (inputs, targets))


def arrays() -> dict[str, Any]:
    return {
        name: [inputs.numpy(), targets.numpy()] for name, (inputs, targets) in tensors().items()
    }


def datasets() -> dict[str, Any]:
    return {name: TensorDataset(*pair) for name, pair in tensors().items()}


def regression() -> dict[str, Any]:
    return dict.fromkeys(
        ("train", "validation"), (torch.zeros(4, 3), torch.zeros(4, dtype=torch.bfloat16))
    )


class Broken(Dataset[Any]):
    """A data set whose samples cannot be read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise OSError(f"sample {index}:\nthe disk is gone")


class Endless(IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(0)


BAD: dict[str, tuple[Any, str]] = {
    "not a mapping": ([PAIR, PAIR], "returned list; it must return a mapping with train"),
    "no validation": ({"train": PAIR}, "returned .'train'.; it must return a mapping"),
    "unequal lengths": (
        {"train": PAIR, "validation": (PAIR[0], PAIR[1][:4])},
        r"validation: found inputs .6, 3. and targets .4.; both need",
    ),
    "empty": (
        {"train": (PAIR[0][:0], PAIR[1][:0]), "validation": PAIR},
        r"train: found inputs .0, 3. and targets .0.; both need",
    ),
    "three tensors": (
        {"train": (*PAIR, PAIR[1]), "validation": PAIR},
        "train: a tuple cannot be read as a pair",
    ),
    "text": ({"train": ("a", "b"), "validation": PAIR}, "train: a tuple cannot be read as a pair"),
    "a broken Dataset": (
        {"train": Broken(), "validation": PAIR},
        "train: a Broken cannot be read .* OSError: sample 0: the disk",
    ),
    "a stream": (
        {"train": Endless(), "validation": PAIR},
        "train: a Endless cannot be read .* TypeError",
    ),
}


def bad(kind: str) -> Any:
    return BAD[kind][0]


def failing() -> Any:
    raise FileNotFoundError("no such file:\n  train.bin")


def asking_too_much(path: str) -> Any:
    """Is never given its path."""


MakeConfig = Callable[..., TrialConfig]
Load = Callable[..., LoadedData]


@pytest.fixture
def load(trial_config: MakeConfig) -> Load:
    def load(function: Callable[..., Any], **arguments: Any) -> LoadedData:
        node = {"_target_": f"{__name__}.{function.__name__}", **arguments}
        return load_data(trial_config(data=node, allowed_targets=(__name__,)))

    return load


@pytest.mark.parametrize("kind", BAD)
def test_data_of_the_wrong_form_is_refused_in_one_line(load: Load, kind: str) -> None:
    with pytest.raises(DataError, match=BAD[kind][1]) as refused:
        load(bad, kind=kind)
    assert str(refused.value).startswith("data: ")
    assert "\n" not in str(refused.value)


def test_a_loader_that_fails_is_told_in_one_line(load: Load) -> None:
    with pytest.raises(
        DataError, match=r"failing failed: FileNotFoundError: no such file: train\.bin"
    ) as refused:
        load(failing)
    assert isinstance(refused.value.__cause__, FileNotFoundError)
    with pytest.raises(DataError, match="asking_too_much failed: TypeError"):
        load(asking_too_much)


@pytest.mark.parametrize("function", [arrays, datasets])
def test_arrays_and_datasets_are_read_as_tensors_are(
    load: Load, function: Callable[..., Any]
) -> None:
    expected, found = load(tensors), load(function)
    for split in ("train", "validation", "test"):
        assert torch.equal(getattr(found, split).inputs, getattr(expected, split).inputs)
        assert torch.equal(getattr(found, split).targets, getattr(expected, split).targets)
    assert found.checksum == expected.checksum


def test_the_data_says_what_a_model_needs_to_know(load: Load) -> None:
    data = load(tensors, num_classes=2)
    assert (data.example.shape, data.num_classes) == ((3,), 2)
    assert data.num_bytes == 2 * (18 * 4 + 6 * 8)
    assert load(regression).num_classes is None


def mapped(root: str) -> dict[str, Any]:
    """The splits of ``tensors``, their training inputs mapped from a file that may not be
    written.
    """
    splits = tensors()
    inputs, targets = splits["train"]
    np.save(f"{root}/inputs.npy", inputs.numpy())
    return {**splits, "train": (np.load(f"{root}/inputs.npy", mmap_mode="r"), targets)}


def test_a_mapped_split_stays_in_its_file_and_is_not_taken_for_resident(
    load: Load, tmp_path: Path
) -> None:
    data = load(mapped, root=str(tmp_path))
    assert data.is_mapped
    assert not fits_on(torch.device("cpu"), data)
    assert torch.equal(data.train.inputs, load(tensors).train.inputs)
    assert data.checksum == load(tensors).checksum


def bytes_and_transform(wrong: bool = False) -> dict[str, Any]:
    pair = (np.full((4, 3, 2, 2), 51, dtype=np.uint8), np.arange(4))
    return {"train": pair, "validation": pair, "transform": 3 if wrong else halves}


def halves(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.float().flatten(1) / 102


def test_a_transform_makes_what_the_model_sees(load: Load) -> None:
    data = load(bytes_and_transform)
    assert data.train.inputs.dtype is torch.uint8
    assert data.example.shape == (12,)
    assert data.transform(data.train.inputs).unique().tolist() == [0.5]


def order(*, total_steps: int = 7, first_step: int = 0, seed: int = 5) -> list[list[int]]:
    return [
        each.tolist()
        for each in sample_order(20, 6, total_steps, seed, first_step=first_step, device=CPU)
    ]


def test_an_epoch_shows_each_sample_at_most_once_and_leaves_the_incomplete_batch_out() -> None:
    batches = order(total_steps=6)
    assert [len(each) for each in batches] == [6] * 6
    for epoch in (batches[:3], batches[3:]):
        assert len({sample for batch in epoch for sample in batch}) == 18
    assert batches[:3] != batches[3:]


def test_an_order_taken_up_again_is_the_rest_of_it() -> None:
    for first_step in range(7):
        assert order(first_step=first_step) == order()[first_step:]


def sources() -> dict[str, Iterator[Batch]]:
    def steps() -> Iterator[torch.Tensor]:
        return sample_order(20, 6, 7, 5, first_step=0, device=CPU)

    settings = {"prefetch_batches": 2, "device": CPU}
    return {
        "resident": (gather(SPLIT, samples) for samples in steps()),
        "thread": host_batches(SPLIT, steps(), num_workers=0, **settings),
        "processes": host_batches(SPLIT, steps(), num_workers=2, **settings),
    }


@pytest.mark.parametrize("source", ["resident", "thread", "processes"])
def test_batches_hold_the_samples_of_the_order_in_its_order(source: str) -> None:
    batches = list(sources()[source])
    assert [batch.samples.tolist() for batch in batches] == order()
    for batch in batches:
        assert torch.equal(batch.inputs, SPLIT.inputs[batch.samples])
        assert torch.equal(batch.targets, SPLIT.targets[batch.samples])
