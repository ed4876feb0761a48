"""The programs of docs/examples, run with fewer trials: each is tuned to a confirmed result, and those that can be are paused."""

import csv
import gzip
import importlib
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autotune.training.checkpoint import read_weights

EXAMPLES = Path(__file__).parent.parent.parent / "docs/examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "is_paused"),
    [
        ("with_lightning", True),
        ("with_hugging_face", True),
        ("with_accelerate", True),
        ("with_plain_pytorch", True),
        ("tune_a_script", False),
    ],
)
def test_a_program_is_tuned_to_a_confirmed_result(tmp_path: Path, example: str, is_paused: bool) -> None:
    if example == "with_hugging_face":
        pytest.importorskip("peft")
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(re.sub(r"trials=\d+", 'trials=8, confirm={"max_runs": 8}', text), encoding="utf-8")
    ran = subprocess.run([sys.executable, f"{example}.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (best,) = (tmp_path / "outputs").glob("*/best.json")
    with (best.parent / "trace.csv").open(encoding="utf-8") as file:
        assert (sum(row["outcome"] == "PAUSED" for row in csv.DictReader(file)) > 0) is is_paused
    if is_paused:
        weights, _ = read_weights(best.with_name("best.safetensors"))
        assert weights


def test_the_script_of_the_case_study_trains_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for name, header, content in (
        ("train-images-idx3-ubyte.gz", struct.pack(">IIII", 2051, 240, 28, 28), random.integers(0, 256, 240 * 784, np.uint8)),
        ("train-labels-idx1-ubyte.gz", struct.pack(">II", 2049, 240), random.integers(0, 10, 240, np.uint8)),
    ):
        (tmp_path / name).write_bytes(gzip.compress(header + content.tobytes()))
    monkeypatch.syspath_prepend(EXAMPLES)
    accuracy = importlib.import_module("fashion_mnist").train(tmp_path, num_epochs=1, width=4, batch_size=11)
    assert 0 <= accuracy <= 1
