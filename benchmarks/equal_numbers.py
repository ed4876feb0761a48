"""Does every option of precision, runtime, data path and memory train what a plain loop trains?
``python -m benchmarks.equal_numbers``.

Twenty steps of the digits, by autotune's loop with one option and by a loop as the PyTorch
tutorials write it: the validation loss after them must agree, to rounding where the same numbers
are added in another order, and to the number format's own precision where that is coarser. The
tests ask the same of the CPU; this command asks a GPU too, and needs no test runner.

Exit code 0: all agree; 1: one does not.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from functools import cache

import torch
import yaml

from autotune.config.compose import Composer
from autotune.space import Suggestion
from autotune.training.loop import train
from autotune.workloads.cnn import SimpleCNN
from autotune.workloads.images import digits

NUM_STEPS, BATCH_SIZE, LR, SEED = 20, 48, 0.05, 3
EXACT, ROUNDING, BFLOAT16, FLOAT16 = 1e-7, 2e-5, 3e-2, 5e-3
"""Relative tolerances of the validation loss."""

OPTIONS = {
    "": EXACT,
    "data_path.on_device=true": EXACT,
    "data_path.on_device=false": EXACT,
    "data_path.on_device=false data_path.prefetch_batches=7": EXACT,
    "runtime.channels_last=true": ROUNDING,
    "runtime.channels_last=true data_path.on_device=false": ROUNDING,
    "runtime.optimizer_kernels=fused": ROUNDING,
    "runtime.optimizer_kernels=foreach": ROUNDING,
    "runtime.optimizer_kernels=for_loop": ROUNDING,
    "runtime.micro_batch_size=16": ROUNDING,
    "runtime.micro_batch_size=20": ROUNDING,
    "runtime.micro_batch_size=100": EXACT,
    "runtime.activation_checkpointing=true": ROUNDING,
    "runtime.activation_checkpointing=true runtime.micro_batch_size=16": ROUNDING,
    "precision=default": EXACT,
    "precision=tf32": ROUNDING,
    "precision=bf16": BFLOAT16,
    "precision=fp16": FLOAT16,
    "precision=pure_bf16": BFLOAT16,
    "precision=pure_fp16": FLOAT16,
}
SLOW_OPTIONS = {
    "runtime.num_threads=2": ROUNDING,
    "data_path.on_device=false data_path.num_workers=2": EXACT,
    "runtime.compile=default": ROUNDING,
    "runtime.compile=default runtime.activation_checkpointing=true runtime.micro_batch_size=24": (
        ROUNDING
    ),
    "runtime.compile=default precision=bf16": BFLOAT16,
    "runtime.compile=max-autotune": ROUNDING,
}
"""Options whose trainings take seconds: worker processes, threads on a busy machine, compiling."""
GPU_OPTIONS = {
    **{option: max(tolerance, ROUNDING) for option, tolerance in (OPTIONS | SLOW_OPTIONS).items()},
    "precision=default": FLOAT16,
    "precision=tf32": FLOAT16,
    "runtime.cuda_graph=true": ROUNDING,
    "runtime.cuda_graph=true runtime.micro_batch_size=16": ROUNDING,
    "runtime.cuda_graph=true runtime.compile=default precision=bf16": BFLOAT16,
    "runtime.compile=reduce-overhead": ROUNDING,
    "runtime.cudnn_benchmark=true": ROUNDING,
    "runtime.expandable_segments=true": ROUNDING,
}


@cache
def plain_loss(norm: str, device: str) -> float:
    """Validation loss after ``NUM_STEPS`` steps of a plain PyTorch loop."""
    splits = digits()
    inputs, targets = (tensor.to(device) for tensor in splits["train"])
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(SEED)
    model = SimpleCNN(input_shape=(1, 8, 8), num_classes=10, widths=[8, 16], norm=norm).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SEED)).to(device)
    for chosen in order.split(BATCH_SIZE)[:NUM_STEPS]:
        loss = torch.nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        validation = tuple(tensor.to(device) for tensor in splits["validation"])
        return torch.nn.functional.cross_entropy(model(validation[0]), validation[1]).item()


def own_loss(option: str, norm: str, device: str) -> float:
    """Validation loss after ``NUM_STEPS`` steps of autotune's loop with an option, a text of
    ``key=value`` pairs.

    Raises:
        RuntimeError: the training did not take ``NUM_STEPS`` steps.
    """
    settings = dict(setting.split("=") for setting in option.split())
    values = {
        "model.norm": norm,
        "device": device,
        **{key: yaml.safe_load(value) for key, value in settings.items()},
    }
    (last,) = train(_composer().compose_suggestion(Suggestion(values), seed=SEED).trial)
    if last.step != NUM_STEPS:
        raise RuntimeError(f"{option}: {last.step} steps, not {NUM_STEPS}")
    return last.loss


@cache
def _composer() -> Composer:
    same = [
        "model.widths=[8,16]",
        f"optimizer.lr={LR}",
        f"batch_size={BATCH_SIZE}",
        f"epochs={NUM_STEPS / 24}",
    ]
    return Composer(
        [
            "experiment=cnn",
            "precision=fp32",
            "runtime.num_threads=1",
            *same,
            "target.value=2",
            "target.max_train_seconds=3600",
        ]
    )


def main() -> int:
    """Compare every option with the plain loop, print a line for each, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.equal_numbers", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    arguments = parser.parse_args()
    options: Mapping[str, float] = (
        GPU_OPTIONS if arguments.device == "cuda" else OPTIONS | SLOW_OPTIONS
    )
    wanted, num_different = plain_loss("none", arguments.device), 0
    for option, tolerance in options.items():
        try:
            found, said = own_loss(option, "none", arguments.device), ""
        except Exception as error:  # noqa: BLE001  # every option has its line
            found, said = (
                math.nan,
                f"  {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            )
        difference = abs(found - wanted) / wanted
        num_different += not difference <= tolerance
        verdict = "agrees" if difference <= tolerance else "DIFFERS"
        print(
            f"{verdict:8s} {difference:9.1e} of {tolerance:7.0e}  {option or 'as it is'}{said}",
            flush=True,
        )
    print(
        f"{len(options) - num_different} of {len(options)} options agree with the plain loop on"
        f" {arguments.device}"
    )
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
