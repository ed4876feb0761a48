"""Checkpoints: what is written is read back exactly, a broken write leaves the old file, a strange file is one line."""

import json
import random
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from safetensors.torch import load_file, save_file

from autotune.errors import DataError
from autotune.training.checkpoint import (
    random_state,
    read_state,
    read_weights,
    save_state,
    save_weights,
    set_random_state,
    weights_metadata,
)
from autotune.training.state_files import STATE_FILE, WEIGHTS_FILE
from tests.conftest import MakeTrialConfig


def same(found: Any, wanted: Any) -> bool:
    """Whether two nested values are equal, types, tensor types and memory formats included; NaN equals itself."""
    if isinstance(wanted, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and (found.dtype, found.shape, steps(found)) == (wanted.dtype, wanted.shape, steps(wanted))
            and found.contiguous().view(-1).view(torch.uint8).equal(wanted.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(wanted, np.ndarray):
        return isinstance(found, np.ndarray) and found.dtype == wanted.dtype and np.array_equal(found, wanted, equal_nan=True)
    if isinstance(wanted, dict):
        return type(found) is dict and list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(same, found, wanted))
    return type(found) is type(wanted) and (found == wanted or (found != found and wanted != wanted))  # noqa: PLR0124  # NaN


def steps(tensor: torch.Tensor) -> list[int]:
    """The strides of the dimensions that have any step to take."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and tensor.numel()]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
TENSORS = st.builds(
    lambda shape, dtype, flip: (
        (torch.arange(1, 1 + int(np.prod(shape))).reshape(shape) % 5).to(dtype).permute(tuple(range(len(shape)))[::flip])
    ),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([1, -1]),
)
ARRAYS = st_numpy.arrays(st.sampled_from([np.float64, np.uint32, np.int8, np.bool_]), st_numpy.array_shapes(min_dims=0, min_side=0))
SCALARS = st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats() | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.booleans())
NESTED = st.recursive(
    SCALARS | TENSORS | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(state=st.dictionaries(KEYS, NESTED, max_size=4))
@settings(max_examples=40)
def test_any_nested_state_comes_back_exactly(state: dict[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "nested"
    save_state(folder, state)
    assert same(read_state(folder), state)


@pytest.mark.parametrize("values", [np.zeros(0), np.broadcast_to(np.float64(3), (1,)), np.zeros((0, 2, 3), np.uint32)], ids=str)
def test_a_state_with_an_array_of_any_stride_is_written(values: Any, tmp_path: Path) -> None:
    save_state(tmp_path, {"values": values, "tensor": torch.ones(1, dtype=torch.bfloat16).as_strided((1,), (0,))})
    assert same(read_state(tmp_path)["values"], values)


def train_a_bit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> torch.Tensor:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.detach()


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_a_training_goes_on_from_its_state_as_if_nothing_had_been(optimizer_class: Any, tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5))
        model = model.to(memory_format=torch.channels_last)
        optimizer = optimizer_class(model.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}))
        warm, decay = torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        return model, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [2])

    cpu = torch.device("cpu")
    model, optimizer, schedule = make()
    train_a_bit(model, optimizer, schedule, 3)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    save_state(tmp_path, {**parts, "random": random_state(cpu), "step": 3})
    wanted = train_a_bit(model, optimizer, schedule, 4)
    draws = random.random(), float(np.random.rand())

    torch.manual_seed(99)
    model, optimizer, schedule = make()
    state = read_state(tmp_path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    set_random_state(state["random"], cpu)
    assert state["step"] == 3
    assert optimizer.state[model[0].weight][next(iter(optimizer.state[model[0].weight]))] is not None
    assert torch.equal(train_a_bit(model, optimizer, schedule, 4), wanted)
    assert (random.random(), float(np.random.rand())) == draws


def test_one_tensor_in_several_places_is_stored_once_and_is_one_again(tmp_path: Path) -> None:
    shared = torch.arange(1000.0)
    save_state(tmp_path, {"model": {"a": shared, "b": shared}, "average": [shared.view(10, 100), shared[1:]]})
    state = read_state(tmp_path)
    assert state["model"]["a"] is state["model"]["b"]
    assert torch.equal(state["average"][0], shared.view(10, 100))
    assert torch.equal(state["average"][1], shared[1:])
    save_state(tmp_path, {"model": {"a": shared, "b": shared}})
    assert (tmp_path / STATE_FILE).stat().st_size < 1.5 * shared.nbytes


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


def test_channels_last_weights_are_written_for_any_reader_and_keep_their_format_in_a_state(tmp_path: Path) -> None:
    tensor = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    save_weights(tmp_path / "weights.safetensors", {"filters": tensor}, {})
    save_state(tmp_path, {"filters": tensor})
    for read in (load_file(tmp_path / "weights.safetensors"), read_weights(tmp_path / "weights.safetensors")[0]):
        assert torch.equal(read["filters"], tensor)
        assert read["filters"].is_contiguous()
    assert read_state(tmp_path)["filters"].is_contiguous(memory_format=torch.channels_last)


def test_a_part_of_a_larger_tensor_brings_only_itself(tmp_path: Path) -> None:
    save_weights(tmp_path / "part.safetensors", {"row": torch.randn(1000, 10)[3]}, {})
    assert (tmp_path / "part.safetensors").stat().st_size < 1000


def test_metadata_tells_what_was_trained(tmp_path: Path, trial_config: MakeTrialConfig) -> None:
    config = trial_config("optimizer.lr=0.25")
    metadata = weights_metadata(
        config,
        input_shape=(1, 8, 8),
        num_classes=10,
        evaluation=None,
        versions={"torch": "2", "ray": None},
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
    with pytest.raises(DataError, match=r"state\.safetensors: cannot be written: .*") as refused:
        save_state(tmp_path, {"step": 2, "large": torch.zeros(10_000)})
    assert "\n" not in str(refused.value)
    assert read_state(tmp_path) == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == [STATE_FILE]


KILLED_WHILE_WRITING = """
import resource, signal, sys, torch
from pathlib import Path
from autotune.training.checkpoint import save_state
folder = Path(sys.argv[1])
save_state(folder, {"step": 1, "large": torch.ones(10_000)})
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # a file that grows past its limit now ends the process
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))
save_state(folder, {"step": 2, "large": torch.zeros(10_000)})
"""


@pytest.mark.command
def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file_whole(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)], check=False, capture_output=True, text=True)
    assert killed.returncode < 0, killed.stderr
    assert len(list(tmp_path.iterdir())) == 2, "it was killed in the middle"
    state = read_state(tmp_path)
    assert state["step"] == 1
    assert torch.equal(state["large"], torch.ones(10_000))
    save_state(tmp_path, {"step": 3})
    assert [each.name for each in tmp_path.iterdir()] == [STATE_FILE]


def whole_file(folder: Path) -> bytes:
    save_weights(folder / "whole.safetensors", {"a": torch.ones(100), "b": torch.ones(2)}, {"note": "ü"})
    return (folder / "whole.safetensors").read_bytes()


def with_header(text: str) -> bytes:
    header = json.dumps({"__metadata__": {"autotune": text}}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read: "),
        (b"\x80\x04\x95 a pickle", "cannot be read: "),
        (b"x" * 10_000, "cannot be read: "),
        (None, "cannot be read: "),  # cut off in the middle
        (with_header("{"), "is damaged: "),
        (with_header("[]"), "is damaged: "),
        (with_header('{"kind": "weights", "format_version": 1}'), "is damaged: 'tied'"),
        (with_header('{"kind": "weights", "format_version": 1, "tied": {"a": "b"}, "metadata": {}}'), "is damaged: 'b'"),
        (with_header('{"kind": "weights", "format_version": 99}'), "has format 99, this autotune reads up to 1; update autotune"),
        (with_header('{"kind": "state", "format_version": 1, "state": 1}'), "holds state; accepted is weights"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_one_line(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    path.write_bytes(whole_file(tmp_path)[:300] if content is None else content)
    with pytest.raises(DataError) as refused:
        read_weights(path)
    assert str(refused.value).startswith(f"{path}: {said}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", [b"0.03125", None], ids=["in the header", "in a tensor"])
def test_a_bit_that_flipped_is_one_line(place: bytes | None, tmp_path: Path) -> None:
    save_state(tmp_path, {"lr": 0.03125, "weight": torch.ones(3, 4)})
    path = tmp_path / STATE_FILE
    content = bytearray(path.read_bytes())
    content[-5 if place is None else content.index(place) + 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"state\.safetensors: is damaged: its content does not have its checksum; accepted is "):
        read_state(tmp_path)


def test_files_that_are_not_there_or_another_tools_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        read_state(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="was not written by autotune"):
        read_weights(tmp_path / "other.safetensors")
    with pytest.raises(DataError, match="cannot be read"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    "packed",
    [
        "1",
        '["dict", 3]',
        '["tensor", "7", []]',
        '["tensor", "0", [0, 1]]',
        '["set", []]',
        "[]",
        "[" * 5000 + "]" * 5000,
        '["dict", [[["list", []], 1]]]',
    ],
)
def test_a_damaged_state_is_one_line(packed: str, tmp_path: Path) -> None:
    text = f'{{"kind": "state", "format_version": 1, "state": {packed}}}'
    save_file({"0": torch.ones(3)}, tmp_path / STATE_FILE, {"autotune": text})
    with pytest.raises(DataError, match="is damaged: ") as refused:
        read_state(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1, 2}, "found set"),
        (torch.ones(2).to_sparse(), "found a tensor of torch.float32, torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex128), "found a tensor of torch.complex128"),
        (np.array(["a"]), "found an array of <U1"),
        (np.array([object()]), "found an array of object"),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_said_with_its_place(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        save_state(tmp_path, {"optimizer": {"state": {0: [1, value]}}})
    assert str(refused.value).startswith(f"checkpoint: optimizer.state.0.1: {said}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_gpus_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    device = torch.device("cuda")
    save_state(tmp_path, random_state(device))
    wanted = torch.rand(3, device=device)
    torch.rand(7, device=device)
    set_random_state(read_state(tmp_path), device)
    assert torch.equal(torch.rand(3, device=device), wanted)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_the_random_state_of_a_gpu_of_apple_or_intel_is_kept(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, device = torch.get_device_module(kind), torch.device(kind)
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(module, "get_rng_state", lambda device: torch.tensor([3, 4], dtype=torch.uint8))
    monkeypatch.setattr(module, "set_rng_state", lambda state, device: restored.append(state))
    save_state(tmp_path, {"random": random_state(device)})
    set_random_state(read_state(tmp_path)["random"], device)
    assert [state.tolist() for state in restored] == [[3, 4]]
