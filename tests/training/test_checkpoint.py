"""Checkpoints: what is written is read back exactly, a broken write leaves the old file, a
strange file is one line.
"""

import pickle
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from autotune.errors import DataError, StateError
from autotune.files import STATE_FILE, WEIGHTS_FILE
from autotune.training.checkpoint import (
    read_state,
    read_weights,
    save_state,
    save_weights,
    weights_metadata,
)
from tests.conftest import MakeTrialConfig


def same(found: Any, wanted: Any) -> bool:
    """Whether two nested values are equal, types, tensor types and memory formats included.

    NaN equals itself.
    """
    if isinstance(wanted, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and (found.dtype, found.shape, steps(found))
            == (wanted.dtype, wanted.shape, steps(wanted))
            and found.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(wanted.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(wanted, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and found.dtype == wanted.dtype
            and np.array_equal(found, wanted, equal_nan=True)
        )
    if isinstance(wanted, dict):
        return (
            type(found) is dict
            and list(found) == list(wanted)
            and all(same(found[key], wanted[key]) for key in wanted)
        )
    if isinstance(wanted, list | tuple):
        return (
            type(found) is type(wanted)
            and len(found) == len(wanted)
            and all(map(same, found, wanted))
        )
    # NaN
    return type(found) is type(wanted) and (
        found == wanted or (found != found and wanted != wanted)  # noqa: PLR0124
    )


def steps(tensor: torch.Tensor) -> list[int]:
    """The strides of the dimensions that have any step to take."""
    return [
        stride
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1 and tensor.numel()
    ]


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
TENSORS = st.builds(
    lambda shape, dtype, flip: (
        (torch.arange(1, 1 + int(np.prod(shape))).reshape(shape) % 5)
        .to(dtype)
        .permute(tuple(range(len(shape)))[::flip])
    ),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([1, -1]),
)
ARRAYS = st_numpy.arrays(
    st.sampled_from([np.float64, np.uint32, np.int8, np.bool_]),
    st_numpy.array_shapes(min_dims=0, min_side=0),
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats() | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.booleans())
NESTED = st.recursive(
    SCALARS | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(state=st.dictionaries(KEYS, NESTED, max_size=4))
@settings(max_examples=40)
def test_any_nested_state_comes_back_exactly(
    state: dict[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "nested"
    save_state(folder, state)
    assert same(read_state(folder), state)


def test_tied_weights_are_stored_once_and_read_under_both_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100))
    model[1].weight = model[0].weight
    path = tmp_path / WEIGHTS_FILE
    save_weights(path, model.state_dict(), {})
    weights, _ = read_weights(path)
    assert list(weights) == ["0.weight", "1.bias", "1.weight"]
    assert weights["0.weight"] is weights["1.weight"]
    assert path.stat().st_size < 1.5 * model[0].weight.nbytes
    model.load_state_dict(weights)


def test_metadata_tells_what_was_trained(tmp_path: Path, trial_config: MakeTrialConfig) -> None:
    config = trial_config("optimizer.lr=0.25")
    metadata = weights_metadata(
        config,
        input_shape=(1, 8, 8),
        num_classes=10,
        evaluation=None,
        origin={"experiment": "cnn", "overrides": ["optimizer.lr=0.25"]},
    )
    save_weights(tmp_path / WEIGHTS_FILE, {"a": torch.ones(1)}, metadata)
    _, read = read_weights(tmp_path / WEIGHTS_FILE)
    assert read == metadata
    assert type(config).from_dict(read["config"]) == config


@pytest.fixture
def little_room() -> Iterator[None]:
    """Files of this process cannot grow past 8,000 bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path: Path, little_room: None) -> None:
    save_state(tmp_path, {"step": 1})
    with pytest.raises(DataError, match=r"state\.pt: cannot be written: .*") as refused:
        save_state(tmp_path, {"step": 2, "large": torch.zeros(10_000)})
    assert "\n" not in str(refused.value)
    assert read_state(tmp_path) == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == [STATE_FILE]


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 100, pickle.dumps({"state": Path.cwd}), None],
    ids=["empty", "noise", "code", "torn"],
)
def test_a_file_that_holds_no_state_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no such file"):
        read_state(tmp_path)
    save_state(tmp_path, {"weight": torch.ones(300)})
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:900] if content is None else content)
    with pytest.raises(StateError, match=r"state\.pt: is damaged: ") as refused:
        read_state(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_flipped_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    save_state(tmp_path, {"weight": torch.full((300,), 1.5)})
    path = tmp_path / STATE_FILE
    content = path.read_bytes()
    place = content.index(300 * struct.pack("f", 1.5)) + 600
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(StateError, match="does not have its checksum"):
        read_state(tmp_path)


@pytest.mark.parametrize("value", [{1, 2}, np.array([object()]), Path()])
def test_what_a_checkpoint_does_not_hold_is_said_with_its_place(value: Any, tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=(
            f"^checkpoint: optimizer.state.0.1 is of type {type(value).__name__}; a checkpoint"
            " holds tensors"
        ),
    ):
        save_state(tmp_path, {"optimizer": {"state": {0: [1, value]}}})
    assert list(tmp_path.iterdir()) == []
