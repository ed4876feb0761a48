"""Files as the readers of data, checkpoints and recordings take them, ways to break any of them,
and reading one safely.
"""

import gzip
import io
import resource
import struct
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
from autotune.files import STATE_FILE
from autotune.recording import read_recording
from autotune.search.warm_start import earlier_study, first_points
from autotune.training.checkpoint import read_state, read_weights, save_state, save_weights

MAX_SECONDS, MAX_BYTES = 10.0, 1 << 30
"""CPU seconds and memory that reading a broken file may take."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of file: what a good one holds, the other files beside it, and what reads the
    folder.
    """

    name: str
    """Name of the file that is broken."""
    good: Callable[[], bytes]
    read: Callable[[Path], Any]
    others: Callable[[], Mapping[str, bytes]] = dict


def read_broken(kind: Format, content: bytes, *, is_refused: bool = False) -> str | None:
    """Read a file in a folder of its own; return the error's line, None if there is none.

    Anything but one line of an ``AutotuneError`` fails the test, and so does reading that takes too
    long, or too much memory.
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
    """Fail if the context takes too much CPU time, or raises the process's highest use of memory
    too far.
    """
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < MAX_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_BYTES


def broken(content: bytes) -> dict[str, bytes]:
    """A file's content, broken in the ways that disks, transfers and mistakes break any file, by
    name.
    """
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
        "zeros in the middle": (
            content[:half] + bytes(min(64, half)) + content[half + min(64, half) :]
        ),
        "its first byte changed": bytes([content[0] ^ 0xFF]) + content[1:],
        "lines of Windows": content.replace(b"\n", b"\r\n") + b"\r\n",
        "twice": content * 2,
        "a page": b"<!DOCTYPE html><html><head><title>404</title></head></html>\n",
        "gzipped": gzip.compress(content),
        "UTF-16": content.decode("latin-1").encode("utf-16"),
    }


def _saved(save: Callable[[Path], None], name: str) -> bytes:
    with TemporaryDirectory() as folder:
        save(Path(folder))
        return (Path(folder) / name).read_bytes()


@cache
def _weights() -> bytes:
    weights = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.zeros(3)}
    return _saved(
        lambda folder: save_weights(folder / "w.safetensors", weights, {"config": {"a": [1, 2]}}),
        "w.safetensors",
    )


@cache
def _state() -> bytes:
    state = {
        "step": 3,
        "parts": {"model": {"w": torch.ones(2, 3)}},
        "random": (1, "a", None),
        "array": np.arange(3),
    }
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


STUDY = (
    b"metric: accuracy\nmode: max\ntarget: 0.9\nmax_train_seconds: 60\nbaseline: 0\noutcomes: {0:"
    b" REACHED, 1: MISSED}\n"
)
SPACE = (
    b"lr: {type: float, low: 0.001, high: 1.0, log: true}\nsize: {type: choice, choices: [a, b]}\n"
)


@cache
def recording_files() -> Mapping[str, bytes]:
    """The four files of a good recording."""
    trials = parquet({"trial": [0, 1], "lr": [0.1, 0.2], "size": ["a", "b"]})
    curves = parquet(
        {
            "trial": [0, 0, 1],
            "step": [1, 2, 1],
            "train_seconds": [1.0, 2.0, 1.0],
            "metric": [0.5, 0.95, 0.4],
        }
    )
    return {
        "study.yaml": STUDY,
        "space.yaml": SPACE,
        "trials.parquet": trials,
        "curves.parquet": curves,
    }


def warm_start(folder: Path) -> None:
    """Read a recording as a warm start does; the points that it gives lie in the space."""
    recording = read_recording(folder)
    study = earlier_study("other", recording, recording.space)
    for point in first_points([study], recording.space, seed=0):
        for key, parameter in recording.space.parameters.items():
            assert parameter.as_param(point.values[key]) is not None


def _recording_format(name: str) -> Format:
    return Format(
        name=name, good=lambda: recording_files()[name], others=recording_files, read=warm_start
    )


FORMATS: Mapping[str, Format] = {
    "weights": Format(
        name="w.safetensors",
        good=_weights,
        read=lambda folder: read_weights(folder / "w.safetensors"),
    ),
    "state": Format(name=STATE_FILE, good=_state, read=read_state),
    "study.yaml": _recording_format("study.yaml"),
    "space.yaml": _recording_format("space.yaml"),
    "trials.parquet": _recording_format("trials.parquet"),
    "curves.parquet": _recording_format("curves.parquet"),
}
