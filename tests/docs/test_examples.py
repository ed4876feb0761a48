"""The programs of docs/examples, run with fewer trials: each is tuned to a confirmed result, and
those that can be are paused.
"""

import csv
import gzip
import os
import re
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.config.schema import TrialConfig
from autotune.measurement import Target
from autotune.session import is_pausable
from autotune.training.checkpoint import read_weights
from autotune.training.run import start_training

EXAMPLES = Path(__file__).parent.parent.parent / "docs/examples"


_STOPS_EARLY = [
    ("    start = autotune", "    kept = autotune"),
    (
        '.get("epoch", 0)\n',
        (
            '\n    start, best, waited = (kept.get(name, 0) for name in ("epoch", "best",'
            ' "waited"))\n    folder = tempfile.mkdtemp()\n'
        ),
    ),
    (
        "        autotune.checkpoint().save({",
        (
            "        best, waited = (accuracy, 0) if accuracy > best else (best, waited + 1)\n"
            "        if waited == 0:\n"
            '            torch.save(model.state_dict(), f"{folder}/best.pt")\n'
            '        autotune.checkpoint().save({"best": best, "waited": waited, '
        ),
    ),
    (
        "        autotune.report(accuracy, epoch=epoch + 1)\n",
        (
            "        autotune.report(accuracy, epoch=epoch + 1)\n        if waited == 8:\n         "
            "   break\n"
        ),
    ),
    ("import torch\n", "import tempfile\n\nimport torch\n"),
]
WITH_EARLY_STOPPING = {
    "with_lightning": [
        (
            "import lightning\n",
            (
                "import tempfile\n\nimport lightning\nfrom lightning.pytorch.callbacks import"
                " EarlyStopping, ModelCheckpoint\n"
            ),
        ),
        ("        enable_checkpointing=False,\n", ""),
        (
            "        callbacks=[",
            (
                '        callbacks=[EarlyStopping("val_accuracy", mode="max", patience=8), '
                'ModelCheckpoint(tempfile.mkdtemp(), monitor="val_accuracy", mode="max"), '
            ),
        ),
    ],
    "with_hugging_face": [
        ("import torch\n", "import tempfile\n\nimport torch\n"),
        ("Trainer, TrainingArguments\n", "EarlyStoppingCallback, Trainer, TrainingArguments\n"),
        ('        "output",\n', "        tempfile.mkdtemp(),\n"),
        (
            '        save_strategy="no",\n',
            (
                '        save_strategy="epoch", save_total_limit=1, load_best_model_at_end=True,'
                ' metric_for_best_model="eval_accuracy",\n'
            ),
        ),
        (
            "        callbacks=[",
            "        callbacks=[EarlyStoppingCallback(early_stopping_patience=8), ",
        ),
    ],
    "with_accelerate": _STOPS_EARLY,
    "with_plain_pytorch": _STOPS_EARLY,
    "a_script": [
        ("import json\n", "import json\nimport tempfile\n"),
        (
            "for epoch in range(1, 61):\n",
            "best, waited, folder = 0.0, 0, tempfile.mkdtemp()\nfor epoch in range(1, 61):\n",
        ),
        (
            '    print(json.dumps({"accuracy": accuracy, "epoch": epoch}))\n',
            (
                '    print(json.dumps({"accuracy": accuracy, "epoch": epoch}))\n'
                "    best, waited = (accuracy, 0) if accuracy > best else (best, waited + 1)\n"
                "    if waited == 0:\n"
                '        torch.save(model.state_dict(), f"{folder}/best.pt")\n'
                "    if waited == 8:\n"
                "        break\n"
            ),
        ),
    ],
}
"""What a user adds to the programs who stops early and keeps the best state, as text and its
replacement."""


@pytest.mark.slow
@pytest.mark.parametrize("stops_early", [False, True])
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
    tmp_path: Path, example: str, is_paused: bool, stops_early: bool
) -> None:
    if example == "with_hugging_face":
        pytest.importorskip("peft")
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for before, after in WITH_EARLY_STOPPING.get(path.stem, []) if stops_early else []:
            assert text.count(before) == 1, before
            text = text.replace(before, after)
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


_AUTOCAST = r'with torch.autocast("cpu", torch.bfloat16, enabled={name}): \g<0>'
PRECISION = {
    "with_lightning": (
        (r"batch_size=32\)", 'batch_size=32, bf16="32-true")'),
        ("max_epochs=30", "max_epochs=30, precision=bf16"),
    ),
    "with_hugging_face": (
        (r"batch_size=16\)", "batch_size=16, bf16=False)"),
        ('"output",', '"output", bf16=bf16, use_cpu=True,'),
    ),
    "with_accelerate": (
        (r"batch_size=32\)", 'batch_size=32, bf16="no")'),
        (r"Accelerator\(\)", "Accelerator(mixed_precision=bf16)"),
    ),
    "with_plain_pytorch": (
        (r"max_norm=1.0\)", "max_norm=1.0, bf16=False)"),
        (r"loss = nn.*", _AUTOCAST.format(name="bf16")),
    ),
    "tune_a_script": (
        ("{batch_size}", "{batch_size} --bf16 {bf16}"),
        ('"batch_size": 32', '"batch_size": 32, "bf16": 0'),
    ),
    "a_script": (
        (r"\narguments =", '\nparser.add_argument("--bf16", type=int)\\g<0>'),
        (r"loss = nn.*", _AUTOCAST.format(name="bool(arguments.bf16)")),
    ),
}
"""What makes bfloat16 an argument of each program: patterns, and what stands in their place."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("with_lightning", ["32-true", "bf16-mixed"]),
        ("with_hugging_face", [False, True]),
        ("with_accelerate", ["no", "bf16"]),
        ("with_plain_pytorch", [False, True]),
        ("tune_a_script", [0, 1]),
    ],
)
def test_a_program_searches_its_precision(tmp_path: Path, example: str, options: list[Any]) -> None:
    if example == "with_hugging_face":
        pytest.importorskip("peft")
    for name in {example, "a_script"}:
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        for pattern, replacement in PRECISION[name]:
            text, num_places = re.subn(pattern, replacement, text)
            assert num_places == 1, pattern
        text = text.replace("space={", f'space={{"bf16": {options}, ')
        text = re.sub(r"trials=\d+", 'trials=12, seed=3, confirm="none", tracking="none"', text)
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, f"{example}.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (trials,) = (tmp_path / "outputs").glob("*/trials.csv")
    with trials.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert "ERRORED" not in {row["outcome"] for row in rows}, ran.stdout
    assert len({row["training.bf16"] for row in rows}) == 2


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
        training = start_training(config)
        before = [next(training).metric for _ in range(3)]
        assert is_pausable()
        training.send(tmp_path / "paused")
        training.close()
        after = [
            evaluation.metric
            for evaluation in start_training(config, paused_folder=tmp_path / "paused")
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
