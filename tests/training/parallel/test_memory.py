"""What ranks hold of a model that they divide: each its part, also while the model is made."""

import math
import multiprocessing
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autotune.config.compose import Composer
from autotune.training.data import load_data
from autotune.training.device import seed_everything
from autotune.training.parallel.ranks import joined, open_store
from autotune.training.set_up import Run
from tests.patience import PATIENCE_SECONDS

WIDTH = 1024
BLOCK_BYTES = 4 * WIDTH * WIDTH
TRAINING = (
    "experiment=mlp", "device=cpu", "runtime.num_threads=1", "batch_size=20", "parallelism=fsdp", "optimizer.momentum=0",
    "optimizer.nesterov=false", "optimizer.lr=1e-5",
)  # fmt: skip


class Blocks(nn.Module):
    """Equal blocks, of ``BLOCK_BYTES`` each, and two small layers."""

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, num_blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(input_shape[0], WIDTH), nn.Linear(WIDTH, num_classes)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_blocks))

    def blocks(self) -> list[nn.Module]:
        return list(self.middle)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.flatten(1))
        for block in self.middle:
            hidden = hidden + block(hidden.relu())
        outputs: Tensor = self.last(hidden)
        return outputs


def _resident_bytes(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def _train(rank: int, size: int, port: int, num_blocks: int, told: Connection) -> None:
    """Tell the growth of this process's peak resident memory, when the model is made, and at the end of a step and a scoring."""
    torch.set_num_threads(1)
    with joined(torch.distributed.TCPStore("127.0.0.1", port, is_master=False), rank=rank, size=size, device=torch.device("cpu")) as ranks:
        for blocks in (1, num_blocks):  # the first one takes what is taken once, such as libraries' pages
            composed = Composer([*TRAINING, f"parallelism.num_workers={size}"]).compose().trial
            model = {"_target_": f"{__name__}.Blocks", "num_blocks": blocks}
            config = replace(composed, model=model, allowed_targets=(__name__,))
            run = Run.start(config, load_data(config), torch.device("cpu"), ranks)
            seed_everything(config.seed)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = _resident_bytes("VmHWM")
            step = run.training_step()
            built = _resident_bytes("VmHWM") - before
            with closing(run.batches(0)) as batches:
                step.on_next(batches, 0)
            _, loss = run.evaluate(step.parts, run.validation)
            peak = _resident_bytes("VmHWM") - before
    told.send((built, peak, loss))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_blocks", "made_share", "trained_share"), [(2, 32, 2 / 3, math.inf), (10, 96, 1 / 3, 1 / 3)])
def test_a_rank_holds_its_part_of_a_model(
    size: int, num_blocks: int, made_share: float, trained_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks of resident memory, as shares of what the whole model's parameters take.

    Two ranks hold half of the parameters each, and half of the gradients once they train, so that only making the model tells whether one
    held the whole. Ten hold a tenth of both, and a few gathered blocks: in all less than a third of the parameters, from start to end.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is no longer resident
    store, context = open_store(), multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_train, args=(rank, size, store.port, num_blocks, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    found = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join(PATIENCE_SECONDS)
    made, trained, losses = zip(*found, strict=True)
    assert all(map(math.isfinite, losses))
    assert max(made) / (num_blocks * BLOCK_BYTES) < made_share
    assert max(trained) / (num_blocks * BLOCK_BYTES) < trained_share
