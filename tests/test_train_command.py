"""``python -m autotune train``, called as a function on toy data and as a command on the shipped
experiment.
"""

import re
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from autotune.config.command_line import EXIT_NOT_REACHED
from autotune.errors import ConfigError, DataError
from autotune.train import train_command
from tests.support.toy import TOY

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line that trains on toy data.

    Its search path of modules is given back after the test.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    return [*TOY]


def test_a_target_that_is_reached_exits_with_zero(
    toy: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_command([*toy, "target.value=0.5", "epochs=4"]) == 0
    device, *said = capsys.readouterr().out.splitlines()
    assert device.startswith("device: ")
    assert re.fullmatch(
        r"step +\d+  epoch +1\.00  train +\d+\.\d{3} s  accuracy [01]\.\d{4}  loss .* samples/s",
        said[0],
    )
    assert said[-4] == "outcome REACHED: accuracy >= 0.5"
    assert re.fullmatch(r"phases: build .* s, prepare .* s, train .* s, evaluate .* s", said[-3])
    assert re.fullmatch(r"test accuracy [01]\.\d{4}", said[-2])
    assert re.fullmatch(r"time to target: warm .* s, cold .* s, objective .* s", said[-1])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["target.value=2", "epochs=1"], ["outcome MISSED"]),
        (
            ["training={_target_: tests.support.toy.own_training}"],  # which ends early
            ["outcome MISSED", "own_training is a function of your own: no test split is scored"],
        ),
        (["loss._target_=tests.support.toy.hungry_loss"], ["MemoryError", "outcome OUT_OF_MEMORY"]),
    ],
)
def test_a_target_that_is_missed_exits_with_three(
    toy: list[str], overrides: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_command([*toy, *overrides]) == EXIT_NOT_REACHED
    said = capsys.readouterr().out
    assert [part for part in told if part not in said] == []
    assert "time to target" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch_size=32"], "no experiment: add experiment=NAME"),
        (["experiment=cnn", "optimizer.lr=0.1,0.2"], "optimizer.lr: is a sweep"),
        (["experiment=cnn", "--colour"], "--colour"),
    ],
)
def test_bad_input_is_refused(toy: list[str], arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_command(arguments)


def test_a_training_that_is_kept_goes_on_from_there_and_no_other_does(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*toy, "target.value=2", "epochs=2", f"checkpoint.folder={tmp_path}/run"]
    assert train_command(command) == EXIT_NOT_REACHED
    first = capsys.readouterr().out
    assert f"weights: {tmp_path}/run/weights.safetensors" in first
    assert train_command(command) == EXIT_NOT_REACHED
    again = capsys.readouterr().out
    assert again.splitlines()[1] == first.splitlines()[2], "it had ended, and says so again"
    with pytest.raises(DataError, match=r"holds another training \(seed: "):
        train_command([*command, "seed=5"])


@pytest.mark.slow
def test_a_training_starts_from_weights_at_a_url(
    toy: list[str], memory: str, cache: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "run"
    assert (
        train_command([*toy, "target.value=2", "epochs=1", f"checkpoint.folder={kept}"])
        == EXIT_NOT_REACHED
    )
    fsspec.filesystem("memory").put(str(kept), f"{memory}/run", recursive=True)
    weights = f"technique.checkpoint={memory}/run/weights.safetensors"
    for technique in ("technique=transfer", "technique=distillation"):
        assert train_command([*toy, "target.value=0.5", "epochs=4", technique, weights]) == 0
    with pytest.raises(
        DataError, match=rf"^technique\.checkpoint: {memory}/run/other: FileNotFoundError: "
    ):
        train_command([*toy, "technique=transfer", f"technique.checkpoint={memory}/run/other"])


@pytest.mark.parametrize("key", ["study.folder=", "checkpoint.folder=", "--config-dir="])
def test_what_takes_no_url_says_so(
    toy: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="found the URL s3://bucket, use a folder of this machin"):
        train_command([*toy, f"{key}s3://bucket"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_in_another_process(tmp_path: Path) -> None:
    command = [
        "experiment=mlp",
        "device=cpu",
        "target.value=-1",
        "epochs=5000",
        "evaluate_every_samples=10000",
        f"checkpoint.folder={tmp_path}/run",
    ]

    def begin() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "autotune", "train", *command],
            cwd=REPOSITORY,
            text=True,
            stdout=subprocess.PIPE,
        )

    with begin() as begun:
        assert begun.stdout is not None
        assert begun.stdout.readline().startswith("device: ")
        seen = [int(begun.stdout.readline().split()[1]) for _ in range(3)]
        begun.kill()
    with begin() as again:
        assert again.stdout is not None
        assert again.stdout.readline().startswith("device: ")
        first = int(again.stdout.readline().split()[1])
        again.kill()
    assert first >= seen[1] + (seen[1] - seen[0]), (
        "it goes on after the last state that was written"
    )
