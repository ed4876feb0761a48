"""A process that trainings are forked from: it has what they import, and nothing that a fork
would break.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.training.preload import one_blas_thread

ROOT = Path(__file__).resolve().parents[2]

_TRAIN = """
import json, os, sys
from autotune.config.compose import Composer
from autotune.training.preload import preload

short = ["device=cpu", "epochs=1", "runtime.num_threads=1"]
configs = [Composer([*line.split(), *short]).compose().trial for line in sys.argv[2:]]
preload()
threads, imported = os.listdir("/proc/self/task"), {}
from autotune.training.run import start_training
for line, config in zip(sys.argv[2:], configs):
    before = set(sys.modules)
    for evaluation in start_training(config, weights_path=None, score_test=True):
        pass
    imported[line] = sorted(set(sys.modules) - before)
print(json.dumps({"threads": threads, "imported": imported}))
"""
_LINES = (
    "experiment=cnn",
    "experiment=cnn optimizer=adamw lr_schedule=one_cycle model.norm=batch augmentation=flip_shift",
    "experiment=cnn optimizer=muon precision=bf16 averaging=ema",
    "experiment=mlp optimizer=schedule_free_adamw data=breast_cancer",
    "experiment=speed_digits",
)


def run(program: str, *arguments: str, **settings: str) -> Any:
    usual = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    environment = one_blas_thread({**usual, "OMP_NUM_THREADS": "2", **settings})
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_a_training_finds_all_that_it_imports_in_a_process_without_threads(tmp_path: Path) -> None:
    found = run(_TRAIN, str(tmp_path), *_LINES)
    assert len(found["threads"]) == 1  # which a fork would not have
    slow = ("torch", "numpy", "scipy", "sklearn", "autotune", "sympy")
    late = {
        line: [name for name in names if name.partition(".")[0] in slow]
        for line, names in found["imported"].items()
    }
    assert {
        line: names for line, names in late.items() if any("_cupti" not in name for name in names)
    } == {}
