"""A plain PyTorch training loop, which does the same training as autotune's: benchmarks compare
with it.

Its loop uses nothing of autotune. The model and the data set are autotune's own, so that both sides
do the same arithmetic: a plain training and ``autotune.training.loop.train`` with the same settings
and seed end with the same weights.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from autotune.workloads.cnn import SimpleCNN
from autotune.workloads.images import digits
from autotune.workloads.splits import Splits

_EVALUATION_BATCH = 1024


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one training of SimpleCNN by SGD."""

    lr: float
    momentum: float
    weight_decay: float
    lr_schedule: str
    """``constant`` or ``cosine``."""
    norm: str
    """Normalisation of SimpleCNN: ``batch``, ``group`` or ``none``."""
    widths: tuple[int, ...]
    batch_size: int
    epochs: int
    evaluate_every_samples: int
    seed: int


def fit(
    report: Callable[..., None],
    seed: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    lr_schedule: str,
    norm: str,
    batch_size: int,
    epochs: int,
) -> None:
    """The training of ``benchmarks.stock_tune`` as a training function of autotune's."""
    splits = digits()
    settings = Settings(
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        lr_schedule=lr_schedule,
        norm=norm,
        widths=(16, 32),
        batch_size=batch_size,
        epochs=epochs,
        evaluate_every_samples=len(splits["train"][0]),
        seed=seed,
    )
    train_plain(settings, splits, lambda metric, loss: report(metric, loss=loss))


def train_plain(
    settings: Settings, splits: Splits, report: Callable[[float, float], None]
) -> float:
    """Train for all epochs and call ``report`` with accuracy and loss at every evaluation.

    Returns:
        Seconds of the training steps, without evaluating and reporting.
    """
    torch.manual_seed(settings.seed)
    inputs, targets = splits["train"]
    total_steps = settings.epochs * (len(inputs) // settings.batch_size)
    input_shape, num_classes = tuple(inputs.shape[1:]), int(targets.max()) + 1
    model = SimpleCNN(
        input_shape=input_shape, num_classes=num_classes, widths=settings.widths, norm=settings.norm
    )
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=True,
        weight_decay=settings.weight_decay,
    )
    schedule: LRScheduler | None = (
        CosineAnnealingLR(optimizer, T_max=total_steps)
        if settings.lr_schedule == "cosine"
        else None
    )
    loss_function = torch.nn.CrossEntropyLoss()
    shuffle = torch.Generator().manual_seed(settings.seed)

    step, next_evaluation, train_seconds = 0, settings.evaluate_every_samples, 0.0
    began = time.perf_counter()
    for _ in range(settings.epochs):
        order = torch.randperm(len(inputs), generator=shuffle)
        for start in range(0, len(inputs) - settings.batch_size + 1, settings.batch_size):
            chosen = order[start : start + settings.batch_size]
            loss = loss_function(model(inputs[chosen]), targets[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            step += 1
            if step * settings.batch_size >= next_evaluation or step == total_steps:
                train_seconds += time.perf_counter() - began
                report(*_evaluate(model, loss_function, *splits["validation"]))
                next_evaluation += settings.evaluate_every_samples
                began = time.perf_counter()
    return train_seconds


@torch.inference_mode()
def _evaluate(
    model: torch.nn.Module,
    loss_function: torch.nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[float, float]:
    """Accuracy and mean loss over a split."""
    model.eval()
    num_correct, loss = 0, 0.0
    for start in range(0, len(inputs), _EVALUATION_BATCH):
        outputs, wanted = (
            model(inputs[start : start + _EVALUATION_BATCH]),
            targets[start : start + _EVALUATION_BATCH],
        )
        num_correct += int((outputs.argmax(dim=-1) == wanted).sum())
        loss += float(loss_function(outputs, wanted)) * len(wanted)
    model.train()
    return num_correct / len(inputs), loss / len(inputs)
