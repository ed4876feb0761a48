"""No broken or hostile file makes a reader of data, checkpoints or recordings do more than say
one line.
"""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import broken_files as files
from tests.support.broken_files import (
    FORMATS,
    broken,
    parquet,
    read_broken,
    safetensors,
)
from tests.support.fuzz import changed_bytes, examples

WEIGHTS = {"kind": "weights", "format_version": 1, "tied": {}, "metadata": {}}
STATE = {"kind": "state", "format_version": 1}


def _st(
    header: dict[str, Any], tensors: dict[str, Any] | None = None, content: bytes = b""
) -> bytes:
    return safetensors(
        json.dumps(
            {"__metadata__": {"format": "pt", "autotune": json.dumps(header)}, **(tensors or {})}
        ),
        content,
    )


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


HOSTILE: dict[str, tuple[str, Any]] = {
    "header that claims 2^60": ("weights", lambda: safetensors("{}", size=1 << 60)),
    "header of nested lists": ("weights", lambda: safetensors(_nested(100_000))),
    "tensor past the end": (
        "weights",
        lambda: _st(
            WEIGHTS, {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
        ),
    ),
    "tensor of an unknown kind": (
        "weights",
        lambda: _st(
            WEIGHTS, {"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)
        ),
    ),
    "tensors that overlap": (
        "weights",
        lambda: _st(
            WEIGHTS,
            {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"},
            bytes(4),
        ),
    ),
    "not autotune's": ("weights", lambda: safetensors("{}")),
    "another format": ("weights", lambda: _st({**WEIGHTS, "format_version": 99})),
    "another kind": ("weights", lambda: _st(STATE)),
    "weights tied to none": ("weights", lambda: _st({**WEIGHTS, "tied": {"a": "b"}})),
    "weights tied to lists": ("weights", lambda: _st({**WEIGHTS, "tied": [1]})),
    "metadata that is no mapping": ("weights", lambda: _st({**WEIGHTS, "metadata": 3})),
    "header of a list": (
        "weights",
        lambda: safetensors(json.dumps({"__metadata__": {"autotune": "[]"}})),
    ),
    "header of deep lists": (
        "weights",
        lambda: safetensors(json.dumps({"__metadata__": {"autotune": _nested(50_000)}})),
    ),
    "no state": ("state", lambda: _st(STATE)),
    "state of deep lists": (
        "state",
        lambda: safetensors(
            json.dumps(
                {
                    "__metadata__": {
                        "autotune": (
                            json.dumps(STATE)[:-1]
                            + ', "state": '
                            + '["list", [' * 3000
                            + "1"
                            + "]]" * 3000
                            + "}"
                        )
                    }
                }
            )
        ),
    ),
    "state of an unknown kind": ("state", lambda: _st({**STATE, "state": ["call", "os.system"]})),
    "state with a list as a key": (
        "state",
        lambda: _st({**STATE, "state": ["dict", [[["list", []], 1]]]}),
    ),
    "state with a tensor that is not there": (
        "state",
        lambda: _st({**STATE, "state": ["tensor", "9", [0]]}),
    ),
    "state that is no mapping": ("state", lambda: _st({**STATE, "state": 3})),
    "study that is a list": ("study.yaml", lambda: b"[1, 2]"),
    "study that calls": ("study.yaml", lambda: b"!!python/object/apply:os.system ['true']"),
    "study without a metric": ("study.yaml", lambda: b"mode: max\n"),
    "target that is a list": (
        "study.yaml",
        lambda: files.STUDY.replace(b"target: 0.9", b"target: [1]"),
    ),
    "outcomes that are a list": (
        "study.yaml",
        lambda: files.STUDY.replace(b"{0: REACHED, 1: MISSED}", b"[1]"),
    ),
    "an outcome that is none": ("study.yaml", lambda: files.STUDY.replace(b"MISSED", b"WON")),
    "an outcome that is a list": (
        "study.yaml",
        lambda: files.STUDY.replace(b"1: MISSED", b"1: [1]"),
    ),
    "space that is a text": ("space.yaml", lambda: b"hello"),
    "space of lists": ("space.yaml", lambda: b"lr: [1, 2]"),
    "range that is empty": ("space.yaml", lambda: b"lr: {type: float, low: 1, high: 0}"),
    "range without an end": ("space.yaml", lambda: b"lr: {type: float, low: 0, high: .inf}"),
    "trials that are lists": (
        "trials.parquet",
        lambda: parquet({"trial": [[0], [1]], "lr": [0.1, 0.2], "size": ["a", "b"]}),
    ),
    "values that are texts": (
        "trials.parquet",
        lambda: parquet({"trial": [0, 1], "lr": ["x", "y"], "size": ["a", "b"]}),
    ),
    "values that are not finite": (
        "trials.parquet",
        lambda: parquet({"trial": [0, 1], "lr": [float("nan")] * 2, "size": ["a", "b"]}),
    ),
    "no trial's number": ("trials.parquet", lambda: parquet({"lr": [0.1]})),
    "120 million values": (
        "trials.parquet",
        lambda: parquet({"trial": pa.chunked_array([np.zeros(1_000_000, np.int64)] * 120)}),
    ),
    "curves of texts": (
        "curves.parquet",
        lambda: parquet({"trial": [0], "step": ["x"], "train_seconds": ["y"], "metric": ["z"]}),
    ),
    "curves of lists": (
        "curves.parquet",
        lambda: parquet({"trial": [0], "step": [[1]], "train_seconds": [[1]], "metric": [[1]]}),
    ),
    "an evaluation's outcome that is none": (
        "curves.parquet",
        lambda: parquet(
            {"trial": [0], "step": [1], "train_seconds": [1.0], "metric": [0.5], "outcome": ["WON"]}
        ),
    ),
}
"""Files that are made to do harm, or that say what cannot be: each is refused. By name: the
format, and what makes the file."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(name: str) -> None:
    kind, make = HOSTILE[name]
    assert read_broken(FORMATS[kind], make(), is_refused=True)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_good_file_is_read(kind: str) -> None:
    assert read_broken(FORMATS[kind], FORMATS[kind].good()) is None


@pytest.mark.parametrize("kind", FORMATS)
def test_a_broken_file_is_told_in_one_line_or_read(kind: str) -> None:
    contents = broken(FORMATS[kind].good())
    lines = [read_broken(FORMATS[kind], content) for content in contents.values()]
    assert sum(line is not None for line in lines) >= 3


@pytest.mark.parametrize("kind", FORMATS)
@examples(15)
@given(st.data())
def test_no_edit_of_a_file_is_more_than_a_line(kind: str, data: st.DataObject) -> None:
    read_broken(FORMATS[kind], data.draw(changed_bytes(FORMATS[kind].good())))
