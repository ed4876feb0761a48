"""Trainings of one graph compile once, in one process and in several, and each is charged what
compiling took.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation, Phase, PhaseClock
from autotune.training.compiled_code import CompiledCode, _root, graph_of
from autotune.training.loop import train
from tests.conftest import MakeTrialConfig

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
OF_TORCH = "ignore:.torch.jit.script:DeprecationWarning"
"""What torch itself says as it imports its compiler."""

IN_A_PROCESS = """
import json, sys
from pathlib import Path

from torch._dynamo.utils import counters

from autotune.config.compose import Composer
from autotune.training.loop import train

folder, *overrides = sys.argv[1:]
paused = Path(folder)
is_paused = any(paused.iterdir())
kept = {"paused_folder": paused} if is_paused else {}
training = train(Composer(overrides).compose().trial, **kept)
last = next(training)
if not is_paused:
    training.send(paused)
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


class Mean(torch.nn.Module):
    """A model of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(images.mean((2, 3)))
        return outputs


def counted(config: TrialConfig, **kept: Any) -> tuple[int, int, list[Evaluation]]:
    """Train in this process, and tell the numbers of graphs compiled and traced, and the
    evaluations.
    """
    from torch._dynamo.utils import counters

    counters.clear()
    evaluations = list(train(config, **kept))
    return (
        counters["inductor"]["fxgraph_cache_miss"],
        counters["stats"]["unique_graphs"],
        evaluations,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(OF_TORCH)
def test_trainings_of_one_graph_compile_once_in_a_process(
    trial_config: MakeTrialConfig, cache: Path, tmp_path: Path
) -> None:
    # a graph that no other test has compiled here
    own = ("model.widths=[5]", "runtime.compile=default", "target.value=2")
    first = trial_config(*own, "epochs=2")
    other = trial_config(
        *own,
        "epochs=3",
        "optimizer=adamw",
        "optimizer.lr=0.02",
        "lr_schedule=one_cycle",
        "averaging=ema",
        "max_grad_norm=1",
        "runtime.optimizer_kernels=foreach",
        "evaluate_every_samples=700",
        "seed=5",
    )
    begun = train(first)
    evaluation = next(begun)
    begun.send(tmp_path)
    begun.close()
    assert evaluation.reused_build_seconds == 0
    num_compiled, num_traced, evaluations = counted(other)
    assert (num_compiled, num_traced) == (0, 0)
    assert 0 < evaluations[-1].reused_build_seconds < evaluations[-1].build_seconds
    num_compiled, num_traced, resumed = counted(first, paused_folder=tmp_path)
    assert (num_compiled, num_traced) == (0, 0), "a resumed training, although another came between"
    assert resumed[-1].build_seconds == evaluation.build_seconds
    plain = [
        list(train(replace(config, runtime=replace(config.runtime, compile=None))))
        for config in (first, other)
    ]
    for expected, found in zip(plain, ([evaluation, *resumed], evaluations), strict=True):
        assert [each.step for each in found] == [each.step for each in expected]
        assert [each.loss for each in found] == pytest.approx(
            [each.loss for each in expected], rel=1e-3
        )
    assert counted(first)[0] == 0, "an uncompiled training came between: the files are there"


@pytest.mark.slow
@pytest.mark.filterwarnings(OF_TORCH)
def test_trainings_of_other_shapes_are_compiled_and_charged_by_themselves(
    trial_config: MakeTrialConfig, cache: Path
) -> None:
    whole = trial_config(
        "epochs=1",
        "runtime.compile=default",
        "augmentation=flip_shift",
        model={"_target_": f"{__name__}.Mean"},
        allowed_targets=(__name__,),
    )
    small = replace(
        whole, augmentation={**whole.augmentation, "resolutions": [[0.0, 6], [0.5, None]]}
    )
    num_compiled, _, first = counted(whole)
    assert num_compiled > 0
    num_compiled, _, _ = counted(small)
    assert num_compiled > 0
    num_compiled, num_traced, again = counted(replace(whole, seed=5))
    assert (num_compiled, num_traced > 0) == (0, True)
    costs = [
        json.loads(path.read_text())["seconds"] for path in (cache / "compiled").glob("*.json")
    ]
    assert len(costs) == 2
    assert first[-1].reused_build_seconds == 0
    assert any(
        again[-1].build_seconds >= cost > again[-1].reused_build_seconds > 0 for cost in costs
    )


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


@pytest.mark.slow
@pytest.mark.filterwarnings(OF_TORCH)
def test_as_many_processes_compile_as_a_trial_has_cpus_and_end_before_it_trains(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(config, "compile_threads", 32)
    with CompiledCode("a graph", num_threads=2).first_passes(PhaseClock()):
        assert config.compile_threads == 2
        pool = AsyncCompile.process_pool()  # only GPUs have their kernels compiled by processes
        assert pool.process.poll() is None
    assert pool.process.poll() is not None


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
    "override",
    [
        "optimizer=adamw",
        "seed=9",
        "runtime.optimizer_kernels=foreach",
        "augmentation=flip_shift",
    ],
)
def test_what_changes_no_graph_compiles_nothing_anew(
    trial_config: MakeTrialConfig, override: str
) -> None:
    assert graph_of(trial_config(override), CPU, 1) == graph_of(trial_config(), CPU, 1)


@pytest.mark.parametrize(
    "override",
    [
        "model.norm=batch",
        "batch_size=32",
        "precision=bf16",
        "runtime.channels_last=true",
        "parallelism=ddp",
    ],
)
def test_what_changes_a_graph_is_part_of_its_key(
    trial_config: MakeTrialConfig, override: str
) -> None:
    assert graph_of(trial_config(override), CPU, 1) != graph_of(trial_config(), CPU, 1)
    assert graph_of(trial_config(), CPU, 2) != graph_of(trial_config(), CPU, 1)


def test_compiled_code_is_not_read_where_others_may_write(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _root()
    assert folder == cache / "compiled"
    folder.chmod(0o770)
    assert _root() is None
    assert "others may write it" in caplog.text


def test_a_folder_that_the_user_chose_holds_the_compiled_code(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    assert _root() == tmp_path / "chosen"
    # which torch's compiler sets by itself
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    assert _root() == cache / "compiled"


def test_a_training_is_charged_what_was_spent_earlier_and_tells_both() -> None:
    clock = PhaseClock()
    clock.add(Phase.BUILD, 2.0)
    clock.charge(30.0, None)
    assert (clock.seconds(Phase.BUILD), clock.reused_build_seconds) == (32.0, 30.0)
    clock.reset()
    assert (clock.seconds(Phase.BUILD), clock.reused_build_seconds) == (0.0, 0.0)
