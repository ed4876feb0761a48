"""Every way of sharing the work gives the losses of one process, up to the order of its sums."""

from functools import cache

import pytest

from tests.support.ranks import Ranks, losses

pytestmark = pytest.mark.slow

NUM_STEPS = 10
CNN = (
    "experiment=cnn",
    "model.norm=group",
    "batch_size=32",
    "evaluate_every_samples=32",
    "epochs=0.29",
    "target.value=0.9999",
)
MLP = (
    "experiment=mlp",
    "model.norm=none",
    "model.dropout=0",
    "batch_size=8",
    "evaluate_every_samples=8",
    "epochs=1",
    "target.value=0",
)
TRANSFORMER = (
    "experiment=transformer",
    "model.dropout=0",
    "model.num_layers=2",
    "model.width=32",
    "model.num_heads=4",
    "batch_size=8",
    "evaluate_every_samples=8",
    "epochs=0.03",
    "target.value=1e-9",
)
CLIPPED_MLP, CLIPPED_TRANSFORMER = (*MLP, "max_grad_norm=0.1"), (*TRANSFORMER, "max_grad_norm=0.1")
COMMON = ("device=cpu", "runtime.num_threads=1", "target.max_train_seconds=100")


@cache
def alone(model: tuple[str, ...]) -> list[float]:
    return losses([*model, *COMMON])


@pytest.mark.parametrize(
    ("model", "size", "parallelism"),
    [
        (CNN, 2, ("ddp",)),
        (
            CNN,
            2,
            ("ddp", "gradient_as_bucket_view=true", "static_graph=true", "bucket_megabytes=1"),
        ),
        (CNN, 4, ("ddp",)),
        (CNN, 2, ("fsdp",)),
        (MLP, 2, ("tensor",)),
        (TRANSFORMER, 2, ("ddp",)),
        (TRANSFORMER, 2, ("fsdp", "reshard_after_forward=false")),
        (TRANSFORMER, 2, ("tensor",)),
        (TRANSFORMER, 4, ("fsdp", "tensor_size=2")),
        (CLIPPED_MLP, 2, ("tensor",)),
        (CLIPPED_MLP, 4, ("fsdp", "tensor_size=2")),
        (CLIPPED_TRANSFORMER, 2, ("ddp",)),
        (CLIPPED_TRANSFORMER, 4, ("fsdp", "tensor_size=2")),
    ],
)
def test_losses_are_those_of_one_process(
    ranks: Ranks, model: tuple[str, ...], size: int, parallelism: tuple[str, ...]
) -> None:
    strategy, *settings = parallelism
    chosen = [
        f"parallelism={strategy}",
        f"parallelism.num_workers={size}",
        *(f"parallelism.{each}" for each in settings),
    ]
    first, *others = ranks.train(size, [*model, *COMMON, *chosen])
    assert others == [[]] * (size - 1), "only the first rank makes evaluations"
    assert len(alone(model)) >= NUM_STEPS
    assert first[:NUM_STEPS] == pytest.approx(alone(model)[:NUM_STEPS], rel=1e-5)


BFLOAT16 = "precision=bf16"


@pytest.mark.parametrize("model", [(*CNN[:1], "model.norm=batch", *CNN[2:]), CNN, TRANSFORMER])
def test_weights_gathered_in_16_bit_give_the_losses_of_autocast(
    ranks: Ranks, model: tuple[str, ...]
) -> None:
    batch_norm = "model.norm=batch" in model  # sees the part of the batch that a rank takes
    first, _ = ranks.train(2, [*model, *COMMON, BFLOAT16, "parallelism=fsdp"])
    assert isinstance(first, list), first
    assert first[:NUM_STEPS] == pytest.approx(
        losses([*model, *COMMON, BFLOAT16])[:NUM_STEPS], rel=0.3 if batch_norm else 2e-3
    )
