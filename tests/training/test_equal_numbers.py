"""Every option of precision, runtime, data path and memory trains the same function as a plain loop.

Twenty steps of the digits, by autotune's loop with one option and by a loop as the PyTorch tutorials write it: the validation
loss after them must agree, to rounding where the same numbers are added in another order, and to the number format's own
precision where that is coarser.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.training.loop import train
from autotune.workloads.digits import digits
from autotune.workloads.simple_cnn import SimpleCNN

MakeConfig = Callable[..., TrialConfig]

NUM_STEPS, BATCH_SIZE, LR, SEED = 20, 48, 0.05, 3
EXACT, ROUNDING, BFLOAT16, FLOAT16, FLOAT8 = 1e-7, 2e-5, 3e-2, 5e-3, 6e-2
"""Relative tolerances of the loss."""

OPTIONS = {
    "": EXACT,
    "data_path.on_device=true": EXACT,
    "data_path.on_device=false": EXACT,
    "data_path.on_device=false data_path.prefetch_batches=7": EXACT,
    "runtime.channels_last=true": ROUNDING,
    "runtime.channels_last=true data_path.on_device=false": ROUNDING,
    "runtime.num_threads=2": ROUNDING,
    "runtime.optimizer_kernels=fused": ROUNDING,
    "runtime.optimizer_kernels=foreach": ROUNDING,
    "runtime.optimizer_kernels=for_loop": ROUNDING,
    "runtime.micro_batch_size=16": ROUNDING,
    "runtime.micro_batch_size=20": ROUNDING,
    "runtime.micro_batch_size=100": EXACT,
    "runtime.activation_checkpointing=true": ROUNDING,
    "runtime.activation_checkpointing=true runtime.micro_batch_size=16": ROUNDING,
    "precision=tf32": ROUNDING,
    "precision=bf16": BFLOAT16,
    "precision=fp16": FLOAT16,
    "precision=pure_bf16": BFLOAT16,
    "precision=pure_fp16": FLOAT16,
}
SLOW_OPTIONS = {
    "data_path.on_device=false data_path.num_workers=2": EXACT,
    "runtime.compile=default": ROUNDING,
    "runtime.compile=default runtime.activation_checkpointing=true runtime.micro_batch_size=24": ROUNDING,
    "runtime.compile=default precision=bf16": BFLOAT16,
    "runtime.compile=max-autotune": ROUNDING,
}
GPU_OPTIONS = {
    **{option: max(tolerance, ROUNDING) for option, tolerance in (OPTIONS | SLOW_OPTIONS).items()},
    "precision=tf32": FLOAT16,
    "runtime.cuda_graph=true": ROUNDING,
    "runtime.cuda_graph=true runtime.micro_batch_size=16": ROUNDING,
    "runtime.cuda_graph=true runtime.compile=default precision=bf16": BFLOAT16,
    "runtime.compile=reduce-overhead": ROUNDING,
    "runtime.cudnn_benchmark=true": ROUNDING,
    "runtime.expandable_segments=true": ROUNDING,
}


@cache
def plain_loss(norm: str, device: str = "cpu") -> float:
    """Validation loss after the steps, by a plain loop."""
    splits = digits(classes=None, num_train=None)
    inputs, targets = (each.to(device) for each in splits["train"])
    torch.manual_seed(SEED)
    model = SimpleCNN(input_shape=(1, 8, 8), num_classes=10, widths=[8, 16], norm=norm).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SEED)).to(device)
    for chosen in order.split(BATCH_SIZE)[:NUM_STEPS]:
        loss = torch.nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        validation = tuple(each.to(device) for each in splits["validation"])
        return torch.nn.functional.cross_entropy(model(validation[0]), validation[1]).item()


def own_loss(make: MakeConfig, option: str, norm: str, device: str = "cpu") -> float:
    """The same by autotune's loop, with an option."""
    config = make(*option.split())
    config = replace(
        config,
        model={"_target_": "autotune.workloads.simple_cnn.SimpleCNN", "widths": [8, 16], "norm": norm},
        optimizer={**config.optimizer, "lr": LR},
        batch_size=BATCH_SIZE,
        epochs=NUM_STEPS / 24,
        seed=SEED,
        device=device,
        target=replace(config.target, value=2.0),
    )
    (last,) = train(config)
    assert last.step == NUM_STEPS
    return last.loss


@pytest.mark.parametrize(("option", "tolerance"), OPTIONS.items())
def test_an_option_trains_what_the_plain_loop_trains(trial_config: MakeConfig, option: str, tolerance: float) -> None:
    assert own_loss(trial_config, option, "none") == pytest.approx(plain_loss("none"), rel=tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch's own, as it imports its compiler
@pytest.mark.parametrize(("option", "tolerance"), SLOW_OPTIONS.items())
def test_a_slow_option_trains_what_the_plain_loop_trains(trial_config: MakeConfig, option: str, tolerance: float) -> None:
    assert own_loss(trial_config, option, "none") == pytest.approx(plain_loss("none"), rel=tolerance)


@pytest.mark.parametrize("option", ["", "runtime.activation_checkpointing=true", "data_path.on_device=false"])
def test_batch_norm_too_moves_its_statistics_as_in_the_plain_loop(trial_config: MakeConfig, option: str) -> None:
    assert own_loss(trial_config, option, "batch") == pytest.approx(plain_loss("batch"), rel=ROUNDING)


def test_the_comparison_can_fail(trial_config: MakeConfig) -> None:
    other = abs(own_loss(trial_config, "", "none") - plain_loss("batch")) / plain_loss("batch")
    assert other > BFLOAT16
    assert plain_loss("none") < 2.0, "twenty steps learn something, or agreeing means little"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(("option", "tolerance"), GPU_OPTIONS.items())
def test_an_option_trains_on_a_gpu_what_the_plain_loop_trains(trial_config: MakeConfig, option: str, tolerance: float) -> None:
    assert own_loss(trial_config, option, "none", "cuda") == pytest.approx(plain_loss("none", "cuda"), rel=tolerance)
