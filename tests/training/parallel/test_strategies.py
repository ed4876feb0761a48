"""What each way of sharing the work takes, and what it refuses in one line."""

import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autotune.config.compose import Composer
from autotune.errors import ConfigError
from autotune.measurement import PhaseClock
from autotune.training.parallel.ranks import joined, open_store
from autotune.training.parallel.strategy import SharedModel
from autotune.training.run import check_training
from autotune.training.set_up import set_up
from tests.support.ranks import Ranks, losses

SHORT = (
    "experiment=cnn",
    "device=cpu",
    "runtime.num_threads=1",
    "batch_size=32",
    "epochs=0.5",
    "evaluate_every_samples=192",
    "target.value=0.9999",
    "target.max_train_seconds=100",
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallelism=single", "parallelism.num_workers=2"],
            "parallelism.num_workers: found 2, use 1 with parallelism=single",
        ),
        (
            ["parallelism=ddp", "batch_size=33"],
            "batch_size: found 33, use a multiple of 2, the number of workers that share a batch",
        ),
        (
            ["parallelism=ddp", "parallelism.num_workers=4", "batch_size=8192"],
            (
                "batch_size: found 1197 (the whole training split), use a multiple of 4, the number"
                " of workers that share a batch"
            ),
        ),
        (
            ["parallelism=fsdp", "parallelism.tensor_size=3"],
            "parallelism.tensor_size: found 3, use a divisor of",
        ),
        (
            ["parallelism=ddp", "parallelism.compression=zip"],
            "parallelism.compression: found 'zip', use one of null, bf16, fp16, powersgd",
        ),
        (
            [
                "parallelism=ddp",
                "parallelism.static_graph=true",
                "parallelism.compression=powersgd",
            ],
            "parallelism: static_graph=true does not go with compression=powersgd",
        ),
        (
            ["parallelism=ddp", "runtime.cuda_graph=true"],
            "runtime.cuda_graph: found true, use false with several workers",
        ),
        (["parallelism=fsdp", "averaging=ema"], "averaging: "),
        (
            ["parallelism=fsdp", "technique=pruning"],
            "technique: FSDP divides weights, and this needs whole ones; use none",
        ),
        (
            ["parallelism=tensor"],
            (
                "parallelism: SimpleCNN has no tensor_plan, so ranks cannot share its layers;"
                " use single, ddp or fsdp"
            ),
        ),
        (
            ["experiment=transformer", "parallelism=tensor", "parallelism.num_workers=3"],
            "model.num_heads: found 4, use a multiple of 3",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_before_a_device_is_taken(
    overrides: list[str], message: str
) -> None:
    experiment = [] if overrides[0].startswith("experiment") else ["experiment=cnn"]
    with pytest.raises(ConfigError) as refused:
        check_training(Composer([*experiment, *overrides]).compose().trial)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("experiment", "parallelism"),
    [
        ("cnn", ["ddp"]),
        ("cnn", ["fsdp"]),
        ("mlp", ["tensor"]),
    ],
)
def test_one_rank_trains_by_each_strategy(
    device: str, experiment: str, parallelism: list[str]
) -> None:
    """Over NCCL on a GPU, which one GPU suffices for."""
    excepthook = sys.excepthook
    plain = ["model.norm=none", *(["model.dropout=0"] if experiment == "mlp" else [])]
    common = [f"experiment={experiment}", *SHORT[2:], *plain, f"device={device}"]
    shared = [
        *common,
        f"parallelism={parallelism[0]}",
        "parallelism.num_workers=1",
        *parallelism[1:],
    ]
    store = open_store()
    with joined(store, rank=0, size=1, device=torch.device(device)) as ranks:
        _, step = set_up(
            Composer(shared).compose().trial, torch.device(device), PhaseClock(), 1, ranks
        )
        assert type(step.parts.shared) is not SharedModel
        assert sys.excepthook is excepthook, (
            "else each group that a kept worker joins puts [rank0]: before its tracebacks once more"
        )
        found = losses(shared, ranks=ranks)
    assert found == pytest.approx(losses(common), rel=1e-5 if device == "cpu" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["backend=gloo"],
        ["compression=fp16"],
        ["compression=powersgd"],
        ["find_unused_parameters=true"],
    ],
)
def test_cheaper_exchanges_still_learn(ranks: Ranks, settings: list[str]) -> None:
    chosen = ["parallelism=ddp", *(f"parallelism.{each}" for each in settings)]
    found, _ = ranks.train(2, [*SHORT, *chosen, "evaluate_every_samples=320"])
    assert isinstance(found, list), found
    assert all(map(math.isfinite, found))
    assert found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "size", "parallelism"),
    [
        ("cnn", 2, ["ddp"]),
        ("cnn", 2, ["fsdp"]),
        ("mlp", 2, ["tensor"]),
        ("mlp", 4, ["fsdp", "parallelism.tensor_size=2"]),
    ],
)
def test_the_weights_that_are_kept_are_whole(
    ranks: Ranks, tmp_path: Path, experiment: str, size: int, parallelism: list[str]
) -> None:
    no_norm = ["model.norm=none", *(["model.dropout=0"] if experiment == "mlp" else [])]
    common = [f"experiment={experiment}", *SHORT[1:5], *no_norm, "target.max_train_seconds=100"]
    losses(common, weights_path=tmp_path / "alone.safetensors")
    chosen = [f"parallelism={parallelism[0]}", f"parallelism.num_workers={size}", *parallelism[1:]]
    found, *_ = ranks.train(size, [*common, *chosen], weights_path=tmp_path / "shared.safetensors")
    assert isinstance(found, list), found
    alone, shared = (load_file(tmp_path / f"{name}.safetensors") for name in ("alone", "shared"))
    assert list(shared) == list(alone)
    for name, weights in alone.items():
        torch.testing.assert_close(shared[name], weights, rtol=1e-4, atol=1e-6)
