"""Trainings of one graph compile once, in one process and in several, and each is charged what
compiling took.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.measurement import Evaluation
from autotune.training.compiled_code import graph_of
from autotune.training.loop import train
from tests.conftest import MakeTrialConfig

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]

IN_A_PROCESS = """
import json, sys
from pathlib import Path

from torch._dynamo.utils import counters

from autotune.config.compose import Composer
from autotune.training.loop import train
from autotune.training.states import TrainingStates

folder, *overrides = sys.argv[1:]
paused = Path(folder)
is_paused = any(paused.iterdir())
training = train(Composer(overrides).compose().trial, states=TrainingStates(paused))
last = next(training)
if not is_paused:
    training.send(True)
counts = counters["inductor"]
cache = [counts["fxgraph_cache_miss"], counts["fxgraph_cache_hit"]]
print(json.dumps([*cache, last.as_dict()], default=str))
"""


def in_a_process(folder: Path, *overrides: str) -> tuple[int, int, Evaluation]:
    """Train to an evaluation in a new process: what is paused in the folder, or else anew, to pause
    it there.

    Returns the numbers of graphs that were compiled and found compiled, and the evaluation.
    """
    folder.mkdir(exist_ok=True)
    own = (
        "experiment=cnn",
        "device=cpu",
        "runtime.num_threads=1",
        "epochs=3",
        "runtime.compile=default",
        "target.value=2",
    )
    command = [sys.executable, "-W", "ignore", "-c", IN_A_PROCESS, str(folder), *own, *overrides]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    num_compiled, num_found, evaluation = json.loads(ran.stdout.splitlines()[-1])
    return num_compiled, num_found, Evaluation.from_dict(evaluation)


@pytest.mark.slow
def test_trainings_of_one_graph_compile_once_on_a_machine(cache: Path, tmp_path: Path) -> None:
    num_compiled, num_found, first = in_a_process(tmp_path / "first", "optimizer.lr=0.1", "seed=1")
    assert num_compiled > 0
    assert (num_found, first.reused_build_seconds) == (0, 0)
    folder = cache / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    (record,) = folder.glob("*.json")
    cost = json.loads(record.read_text())["seconds"]
    assert first.build_seconds >= cost
    num_compiled, num_found, second = in_a_process(
        tmp_path / "second", "optimizer.lr=0.2", "seed=2"
    )
    assert num_compiled == 0
    assert num_found > 0
    assert second.build_seconds >= cost > second.reused_build_seconds > 0, (
        "it is charged as if it had compiled"
    )
    num_compiled, num_found, resumed = in_a_process(
        tmp_path / "second", "optimizer.lr=0.2", "seed=2"
    )
    assert num_compiled == 0
    assert num_found > 0
    assert resumed.step > second.step
    assert (resumed.build_seconds, resumed.reused_build_seconds) == (
        second.build_seconds,
        second.reused_build_seconds,
    )
    assert {path.name for path in folder.iterdir()} == {
        record.name,
        json.loads(record.read_text())["folder"],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("runtime", ["runtime.cuda_graph=true", "runtime.compile=reduce-overhead"])
def test_graphs_serve_trainings_of_other_optimizers_and_lengths(
    trial_config: MakeTrialConfig, cache: Path, runtime: str
) -> None:
    for index, overrides in enumerate(
        [("epochs=2",), ("epochs=3", "optimizer=adamw", "optimizer.lr=0.02", "averaging=ema")]
    ):
        config = trial_config(*overrides, runtime, "target.value=2", device="cuda")
        captured = list(train(config))
        assert (captured[-1].reused_build_seconds > 0) is (index > 0)
        plain = in_a_process(
            cache.parent / str(index), *overrides, "runtime.compile=null", "device=cuda"
        )[2]
        assert captured[0].loss == pytest.approx(plain.loss, rel=1e-3)


@pytest.mark.parametrize(
    ("override", "is_same"),
    [
        ("optimizer=adamw", True),
        ("seed=9", True),
        ("runtime.optimizer_kernels=foreach", True),
        ("augmentation=flip_shift", True),
        ("model.norm=batch", False),
        ("batch_size=32", False),
        ("precision=bf16", False),
        ("runtime.channels_last=true", False),
        ("parallelism=ddp", False),
    ],
)
def test_only_what_changes_a_graph_is_part_of_its_key(
    trial_config: MakeTrialConfig, override: str, is_same: bool
) -> None:
    graph = graph_of(trial_config(), CPU, 1)
    assert (graph_of(trial_config(override), CPU, 1) == graph) is is_same
    assert graph_of(trial_config(), CPU, 2) != graph
