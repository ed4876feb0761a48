"""``python -m autotune diagnose``, called as a function and as a command, with measurements as
short as they can be.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.diagnose import diagnose_command
from autotune.errors import ConfigError

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _own_module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command adds to the search path of modules; that is given back after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_without_measuring_devices_and_what_is_left_out_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "machine.json"
    assert (
        diagnose_command(
            ["experiment=mlp", "device=cpu", "seconds=0", f"output={output}", "precision=fp32,tf32"]
        )
        == 0
    )
    said = capsys.readouterr().out
    reason = (
        "precision=tf32: precision.float32_precision=tf32 is for CUDA GPUs, and this training runs"
        " on the CPU"
    )
    assert f"left out of the search space of mlp by a study here:\n  {reason}\n" in said
    assert "matrix product" not in said
    kept = json.loads(output.read_text())
    assert kept["capability_filter"] == {"space": "the search space of mlp", "left_out": [reason]}
    assert kept["rates"] == []
    assert "os" in kept["environment"]
    assert kept["machine"]["versions"]["torch"] in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["second=1"], "second: no such key (did you mean seconds=...?)"),
        (["output=s3://x/machine.json"], "output: found the URL s3://x/machine.json"),
        (["experiment=cnn", "batch_sise=32"], "batch_sise: no such key"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        diagnose_command(arguments)


def run_module(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "autotune.diagnose", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True)


@pytest.mark.command
def test_the_command_measures_this_machine(tmp_path: Path) -> None:
    finished = run_module("seconds=0.01", f"output={tmp_path / 'machine.json'}")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    kept = json.loads((tmp_path / "machine.json").read_text())
    measured = [rate for rate in kept["rates"] if rate["per_second"]]
    assert {rate["kind"] for rate in measured} == {"matrix product", "copy"}, kept["rates"]
    assert all(
        f"{rate['kind']}  " in finished.stdout and rate["what"] in finished.stdout
        for rate in measured
    )
