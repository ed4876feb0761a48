"""Files as the readers of data, checkpoints and recordings take them, ways to break any of them, and reading one safely."""

import gzip
import io
import pickle
import resource
import struct
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from autotune.errors import AutotuneError
from autotune.recording import read_recording
from autotune.search.earlier_trials import earlier_study, first_points
from autotune.training.checkpoint import read_state, read_weights, save_state, save_weights
from autotune.training.state_files import STATE_FILE
from autotune.workloads.cifar10 import cifar10
from autotune.workloads.csv_table import csv_table
from autotune.workloads.fashion_mnist import NAMES, fashion_mnist
from autotune.workloads.memory_mapped import memory_mapped
from autotune.workloads.text import text

MAX_SECONDS, MAX_BYTES = 10.0, 1 << 30
"""CPU seconds and memory that reading a broken file may take."""
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of file: what a good one holds, the other files beside it, and what reads the folder."""

    name: str
    """Name of the file that is broken."""
    good: Callable[[], bytes]
    read: Callable[[Path], Any]
    others: Callable[[], Mapping[str, bytes]] = dict


def read_broken(kind: Format, content: bytes, *, is_refused: bool = False) -> str | None:
    """Read a file in a folder of its own; return the error's line, None if there is none.

    Anything but one line of an ``AutotuneError`` fails the test, and so does reading that takes too long, or too much memory.
    """
    with TemporaryDirectory() as folder, bounded():
        for name, other in {**kind.others(), kind.name: content}.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(other)
        if is_refused:
            with pytest.raises(AutotuneError) as refused:
                kind.read(Path(folder))
            line = str(refused.value)
        else:
            try:
                kind.read(Path(folder))
            except AutotuneError as error:
                line = str(error)
            else:
                return None
    assert line
    assert len(line.splitlines()) == 1, line
    assert len(line) < 2000, line
    return line


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the context takes too much CPU time, or raises the process's highest use of memory too far."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < MAX_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_BYTES


def broken(content: bytes) -> dict[str, bytes]:
    """A file's content, broken in the ways that disks, transfers and mistakes break any file, by name."""
    half = len(content) // 2
    return {
        "empty": b"",
        "one byte": content[:1],
        "half": content[:half],
        "without its last byte": content[:-1],
        "with a byte more": content + b"\0",
        "without its first byte": content[1:],
        "zeros": bytes(len(content)),
        "all bits set": b"\xff" * len(content),
        "zeros in the middle": content[:half] + bytes(min(64, half)) + content[half + min(64, half) :],
        "its first byte changed": bytes([content[0] ^ 0xFF]) + content[1:],
        "lines of Windows": content.replace(b"\n", b"\r\n") + b"\r\n",
        "twice": content * 2,
        "a page": b"<!DOCTYPE html><html><head><title>404</title></head></html>\n",
        "gzipped": gzip.compress(content),
        "UTF-16": content.decode("latin-1").encode("utf-16"),
    }


def gzipped_zeros(head: bytes, num_bytes: int) -> bytes:
    """A gzip file, a thousandth of its content's size, of a head and zeros."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as file:
        file.write(head)
        piece = bytes(1 << 22)
        for _ in range(num_bytes >> 22):
            file.write(piece)
    return buffer.getvalue()


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    """An idx file whose header claims a shape."""
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + content


@cache
def _idx_files() -> Mapping[str, bytes]:
    images, labels = idx((40, 28, 28), bytes(range(256)) * 122 + bytes(128)), idx((40,), bytes(range(10)) * 4)
    return dict(zip(NAMES, (images, labels, images, labels), strict=True))


def batch(**values: Any) -> bytes:
    """A batch of CIFAR-10 in the Python format."""
    images = np.arange(20 * 3072, dtype=np.uint32).astype(np.uint8).reshape(20, 3072)
    return pickle.dumps({b"data": images, b"labels": [number % 10 for number in range(20)], **values}, protocol=3)


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """An archive of the given members, gzipped."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        for member, content in members:
            file.addfile(member, io.BytesIO(content) if content else None)
    return buffer.getvalue()


def member(name: str, size: int = 0, **fields: Any) -> tarfile.TarInfo:
    """The header of an archive's member."""
    info = tarfile.TarInfo(name)
    info.size = size
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def binary_batches() -> list[tuple[tarfile.TarInfo, bytes]]:
    """The members of a good archive in the binary format."""
    content = b"".join(bytes([number % 10]) + bytes(3072) for number in range(20))
    return [(member(f"cifar-10-batches-bin/{name}.bin", len(content)), content) for name in BATCHES]


def npy(array: Any) -> bytes:
    """A .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npy_header(header: str, content: bytes = b"") -> bytes:
    """A .npy file with a header of any text."""
    text_bytes = header.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", min(len(text_bytes), 65535)) + text_bytes[:65535] + content


def _saved(save: Callable[[Path], None], name: str) -> bytes:
    with TemporaryDirectory() as folder:
        save(Path(folder))
        return (Path(folder) / name).read_bytes()


@cache
def _weights() -> bytes:
    weights = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.zeros(3)}
    return _saved(lambda folder: save_weights(folder / "w.safetensors", weights, {"config": {"a": [1, 2]}}), "w.safetensors")


@cache
def _state() -> bytes:
    state = {"step": 3, "parts": {"model": {"w": torch.ones(2, 3)}}, "random": (1, "a", None), "array": np.arange(3)}
    return _saved(lambda folder: save_state(folder, state), STATE_FILE)


def safetensors(header: str | bytes, content: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file with a header of any text, which claims any size."""
    encoded = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(encoded) if size is None else size) + encoded + content


def parquet(columns: Mapping[str, Any]) -> bytes:
    """A parquet file."""
    buffer = io.BytesIO()
    pq.write_table(pa.table(dict(columns)), buffer)
    return buffer.getvalue()


STUDY = b"metric: accuracy\nmode: max\ntarget: 0.9\nmax_train_seconds: 60\nbaseline: 0\noutcomes: {0: REACHED, 1: MISSED}\n"
SPACE = b"lr: {type: float, low: 0.001, high: 1.0, log: true}\nsize: {type: choice, choices: [a, b]}\n"


@cache
def recording_files() -> Mapping[str, bytes]:
    """The four files of a good recording."""
    trials = parquet({"trial": [0, 1], "lr": [0.1, 0.2], "size": ["a", "b"]})
    curves = parquet({"trial": [0, 0, 1], "step": [1, 2, 1], "train_seconds": [1.0, 2.0, 1.0], "metric": [0.5, 0.95, 0.4]})
    return {"study.yaml": STUDY, "space.yaml": SPACE, "trials.parquet": trials, "curves.parquet": curves}


def warm_start(folder: Path) -> None:
    """Read a recording as a warm start does; the points that it gives lie in the space."""
    recording = read_recording(folder)
    study = earlier_study("other", recording, recording.space)
    for point in first_points([study], recording.space, seed=0):
        for key, parameter in recording.space.parameters.items():
            assert parameter.as_param(point.values[key]) is not None


def _csv(folder: Path) -> Any:
    return csv_table(
        path=str(next(folder.glob("table*"))),
        target_column="kind",
        ignored_columns=[],
        delimiter=",",
        max_categories=32,
        validation_fraction=0.2,
        test_fraction=0.2,
    )


def _text(folder: Path) -> Any:
    return text(root=str(folder / "a.txt"), length=8, max_characters=None, validation_fraction=0.2, test_fraction=0.2, min_count=1)


TABLE = b"size,colour,kind\n" + b"".join(b"%d.5,%s,%s\n" % (n, b"red" if n % 3 else b"blue", b"ab"[n % 2 :][:1]) for n in range(40))


def _recording_format(name: str) -> Format:
    return Format(name=name, good=lambda: recording_files()[name], others=recording_files, read=warm_start)


def _npy_files() -> Mapping[str, bytes]:
    inputs, targets = npy(np.arange(60, dtype=np.uint8).reshape(20, 3)), npy(np.arange(20) % 2)
    return {f"{split}_{part}.npy": array for split in ("train", "validation") for part, array in (("inputs", inputs), ("targets", targets))}


def _mapped(folder: Path) -> None:
    splits = memory_mapped(root=str(folder), scale=255, mean=None, std=None)
    for split in ("train", "validation"):
        for array in splits[split]:
            array[:2].sum()  # reads


FORMATS: Mapping[str, Format] = {
    "idx": Format(
        name=NAMES[0], good=lambda: _idx_files()[NAMES[0]], others=_idx_files, read=lambda folder: fashion_mnist(str(folder), False)
    ),
    "idx labels": Format(
        name=NAMES[1], good=lambda: _idx_files()[NAMES[1]], others=_idx_files, read=lambda folder: fashion_mnist(str(folder), False)
    ),
    "pickled batch": Format(
        name="data_batch_1",
        good=batch,
        others=lambda: dict.fromkeys(BATCHES, batch()),
        read=lambda folder: cifar10(str(folder), False),
    ),
    "archive": Format(
        name="cifar-10-binary.tar.gz", good=lambda: archive(*binary_batches()), read=lambda folder: cifar10(str(folder), False)
    ),
    "csv": Format(name="table.csv", good=lambda: TABLE, read=_csv),
    "gzipped csv": Format(name="table.csv.gz", good=lambda: gzip.compress(TABLE), read=_csv),
    "text": Format(name="a.txt", good=("the quick brown fox jumps over the lazy dog\n" * 20).encode, read=_text),
    "npy": Format(name="train_inputs.npy", good=lambda: _npy_files()["train_inputs.npy"], others=_npy_files, read=_mapped),
    "weights": Format(name="w.safetensors", good=_weights, read=lambda folder: read_weights(folder / "w.safetensors")),
    "state": Format(name=STATE_FILE, good=_state, read=read_state),
    "study.yaml": _recording_format("study.yaml"),
    "space.yaml": _recording_format("space.yaml"),
    "trials.parquet": _recording_format("trials.parquet"),
    "curves.parquet": _recording_format("curves.parquet"),
}
