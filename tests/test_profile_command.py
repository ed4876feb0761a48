"""``python -m autotune profile``, called as a function on toy data and as a command on the
shipped experiment.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.config.command_line import EXIT_BAD_INPUT, run_command
from autotune.errors import ConfigError
from autotune.profile import profile_command
from tests.support.toy import TOY

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A command line that profiles toy data.

    Its search path of modules is given back after the test.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    return [*TOY, f"study.folder={tmp_path / 'profiles'}"]


def test_a_profile_is_printed_and_kept(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile_command([*toy, "num_steps=3", "progress=0.5", "runtime.micro_batch_size=8"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "cnn · 3 steps of 16 samples"
    rows = {line.split()[0]: line.split() for line in said[3:] if line.strip()}
    parts = ("data", "augmentation", "forward", "backward", "optimizer")
    # the number of calls: two micro-batches a step
    assert [rows[part][-1] for part in parts] == ["3", "3", "6", "6", "3"]
    (folder,) = (tmp_path / "profiles").iterdir()
    assert re.fullmatch(r"profile-cnn-\d{8}-\d{6}", folder.name)
    trace = folder / "trace.json"
    assert said[-1] == f"trace {trace} (open it at https://ui.perfetto.dev or chrome://tracing)"
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["num_steps=3"], "no experiment: add experiment=NAME"),
        (
            ["experiment=cnn", "num_steps=0"],
            "num_steps: found '0'; give a whole number from 1 to 10000",
        ),
        (["experiment=cnn", "num_step=3"], "num_step: no such key (did you mean num_steps?)"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        profile_command(arguments)


def test_a_training_function_of_ones_own_leaves_nothing_behind(
    toy: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="training: a function has no steps"):
        profile_command([*toy, "training={_target_: tests.support.toy.own_training}"])
    assert not (tmp_path / "profiles").exists()


def test_running_out_of_memory_is_one_line(
    toy: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command(profile_command, [*toy, "loss._target_=tests.support.toy.hungry_loss"])
        == EXIT_BAD_INPUT
    )
    assert capsys.readouterr().err.startswith(
        "autotune: out of memory; runtime.activation_checkpointing=true"
    )


def run_module(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "autotune", "profile", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True)


@pytest.mark.command
def test_help_and_typos_need_no_torch() -> None:
    assert "num_steps=20" in run_module("--help").stdout
    finished = run_module("experiment=cnnn")
    assert finished.returncode == EXIT_BAD_INPUT
    assert len(finished.stderr.splitlines()) == 1
    assert "did you mean cnn?" in finished.stderr
