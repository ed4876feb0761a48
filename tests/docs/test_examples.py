"""The programs of docs/examples, run with fewer trials: each is tuned to a confirmed result, and those that can be are paused."""

import csv
import gzip
import importlib
import os
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


@pytest.mark.slow
@pytest.mark.parametrize("example", ["with_lightning", "with_hugging_face", "with_accelerate", "with_plain_pytorch", "a_script"])
def test_a_program_runs_without_the_lines_that_the_pages_show_as_added(tmp_path: Path, example: str) -> None:
    if example == "with_hugging_face":
        pytest.importorskip("peft")
    page = (EXAMPLES.parent / "python.md").read_text(encoding="utf-8")
    (diff,) = re.findall(rf"\(examples/{example}\.py\).*?```diff\n(.*?)```", page, re.DOTALL)
    assert 0 < len(re.findall(r"^\+", diff, re.MULTILINE)) <= 5
    program = (EXAMPLES / f"{example}.py").read_text(encoding="utf-8").split("\n\n\nif __name__ ==")[0] + "\n"
    for hunk in diff.split("...\n"):
        before, after = ("".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +"))
        assert program.count(after) == 1, after
        program = program.replace(after, before)
    assert not re.search(r"import autotune|autotune\.\w", program)
    call = "fit()\n" if "def fit(" in program else ""
    ran = subprocess.run(
        [sys.executable, "-c", re.sub(r"epochs=\d+", "epochs=1", program) + call],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


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
