"""``python -m autotune diagnose``, called as a function and as a command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.diagnose import diagnose_command
from autotune.errors import ConfigError

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _own_module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command adds to the search path of modules; that is given back after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_the_machine_and_what_is_left_out_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose_command(["experiment=mlp", "device=cpu", "precision=fp32,tf32"]) == 0
    said = capsys.readouterr().out
    reason = (
        "precision=tf32: precision.float32_precision=tf32 is for CUDA GPUs, and this training runs"
        " on the CPU"
    )
    assert said.startswith(f"left out of the search space of mlp by a study here:\n  {reason}\n")
    assert f"torch: {torch.__version__}" in said.replace('"', "")
    assert "PyTorch version" in said
    assert "product on cpu: " in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch_size=32"], "no experiment: add experiment=NAME"),
        (["experiment=cnn", "batch_sise=32"], "batch_sise: no such key"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        diagnose_command(arguments)


@pytest.mark.command
def test_the_command_needs_no_experiment() -> None:
    command = [sys.executable, "-m", "autotune", "diagnose"]
    finished = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert finished.stdout.startswith("host: ")
