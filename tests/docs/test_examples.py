"""The programs of docs/examples, run with fewer trials: each is tuned to a confirmed result, and
those that can be are paused.
"""

import csv
import gzip
import os
import re
import shlex
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from autotune.config.schema import TrialConfig
from autotune.measurement import Target
from autotune.session import is_pausable
from autotune.training.checkpoint import read_weights
from autotune.training.run import start_training
from autotune.training.states import TrainingStates

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
def test_a_program_is_tuned_to_a_confirmed_result(
    tmp_path: Path, example: str, is_paused: bool
) -> None:
    if example == "with_hugging_face":
        pytest.importorskip("peft")
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(
            re.sub(r"trials=\d+", 'trials=8, confirm={"max_runs": 8}', text), encoding="utf-8"
        )
    ran = subprocess.run(
        [sys.executable, f"{example}.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (best,) = (tmp_path / "outputs").glob("*/best.json")
    with (best.parent / "trace.csv").open(encoding="utf-8") as file:
        assert (sum(row["outcome"] == "PAUSED" for row in csv.DictReader(file)) > 0) is is_paused
    if is_paused:
        weights, _ = read_weights(best.with_name("best.safetensors"))
        assert weights


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "example",
    [
        "ddp_loop",
        "fsdp2",
        "lightning_ddp",
        "accelerate_loop",
        "tune_torchrun",
        "tune_a_hydra_app",
    ],
)
def test_a_program_of_several_devices_is_tuned_and_what_is_exported_trains_on_as_many(
    tmp_path: Path, example: str
) -> None:
    few = 'trials=6, confirm={"max_runs": 8}, cluster={"num_cpus": 4}'
    for path in (EXAMPLES / "several_devices").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(re.sub(r"trials=\d+", few, text), encoding="utf-8")

    def ran(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    ran(sys.executable, f"{example}.py")
    (best,) = (tmp_path / "outputs").glob("*/best.json")
    study, autotune = best.parent, (sys.executable, "-m", "autotune")
    call, arguments = (study / "best_arguments.yaml").read_text(encoding="utf-8").split("\n", 1)
    assert "devices: 2" in arguments
    if example.startswith("tune_"):  # a command, which runs as it stands
        launcher, *words = shlex.split(call.partition(": ")[2])
        assert (launcher, words[0]) == ("torchrun", "--nproc_per_node=2")
        ran(sys.executable, "-m", "torch.distributed.run", *words)
    with (study / "trials.csv").open(encoding="utf-8") as file:
        assert {row["num_workers"] for row in csv.DictReader(file)} - {""} == {"2"}
    exported = ("--config-dir", f"{study}/function")
    said = ran(*autotune, "export", f"study={study.name}", "as=best", *exported)
    allowed = re.findall(r"'?(allowed_targets=\[[\w.]+\])", said)[0]
    said = ran(*autotune, "train", "experiment=best", allowed, *exported)
    assert "outcome REACHED" in said or "outcome MISSED" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "metric"),
    [
        ("with_lightning", "val_accuracy"),
        ("with_hugging_face", "eval_accuracy"),
        ("with_accelerate", "accuracy"),
        ("with_plain_pytorch", "accuracy"),
    ],
)
def test_a_program_that_was_paused_goes_on_with_the_same_curve(
    trial_config: Callable[..., TrialConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    example: str,
    metric: str,
) -> None:
    if example == "with_hugging_face":
        pytest.importorskip("peft")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    target = Target(metric=metric, value=2.0, mode="max", max_train_seconds=1e9)
    config = trial_config(
        training={"_target_": f"{example}.fit"}, target=target, allowed_targets=(example,)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = [evaluation.metric for evaluation in start_training(config)]
        training = start_training(config, states=TrainingStates(tmp_path / "paused"))
        before = [next(training).metric for _ in range(3)]
        assert is_pausable()
        training.send(True)
        training.close()
        after = [
            evaluation.metric
            for evaluation in start_training(config, states=TrainingStates(tmp_path / "paused"))
        ]
    assert len(whole) > 10
    assert [*before, *after] == whole


def as_before(example: str, page: str) -> str:
    """The program of an example as it was before the changes that a page shows as a diff:
    without autotune, and without its tuning.
    """
    (diff,) = re.findall(
        rf"\(examples/{example}\.py\).*?```diff\n(.*?)```",
        (EXAMPLES.parent / page).read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert 0 < len(re.findall(r"^\+", diff, re.MULTILINE)) <= (9 if page == "case_study.md" else 6)
    program = (EXAMPLES / f"{example}.py").read_text(encoding="utf-8").split(
        "\n\n\nif __name__ =="
    )[0] + "\n"
    for hunk in diff.split("...\n"):
        before, after = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in kept)
            for kept in (" -", " +")
        )
        assert program.count(after) == 1, after
        program = program.replace(after, before)
    assert not re.search(r"import autotune|autotune\.\w", program)
    return program


def run(program: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": ""}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    ["with_lightning", "with_hugging_face", "with_accelerate", "with_plain_pytorch", "a_script"],
)
def test_a_program_runs_without_the_lines_that_the_page_shows_as_added(
    tmp_path: Path, example: str
) -> None:
    if example == "with_hugging_face":
        pytest.importorskip("peft")
    program = as_before(example, "python.md")
    run(
        re.sub(r"epochs=\d+", "epochs=1", program) + ("fit()\n" if "def fit(" in program else ""),
        tmp_path,
    )


def test_the_script_of_the_case_study_trains_by_hand_with_and_without_autotune(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    for name, header, content in (
        (
            "train-images-idx3-ubyte.gz",
            struct.pack(">IIII", 2051, 240, 28, 28),
            random.integers(0, 256, 240 * 784, np.uint8),
        ),
        (
            "train-labels-idx1-ubyte.gz",
            struct.pack(">II", 2049, 240),
            random.integers(0, 10, 240, np.uint8),
        ),
    ):
        (tmp_path / name).write_bytes(gzip.compress(header + content.tobytes()))
    after = (EXAMPLES / "fashion_mnist.py").read_text(encoding="utf-8")
    call = 'torch.manual_seed(0)\ntrain(".", num_epochs=1, width=4, batch_size=11)\n'
    without, by_hand = (
        run(program + call, tmp_path)
        for program in (as_before("fashion_mnist", "case_study.md"), after.split("if __name__")[0])
    )
    assert re.fullmatch(r"(epoch (0\.25|0\.50|0\.75|1\.00): 0\.\d{4}\n){4}", without)
    assert by_hand == without
