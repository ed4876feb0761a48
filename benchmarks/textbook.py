"""A training loop as the PyTorch tutorials write it: autotune's own loop is compared with it.

``DataLoader`` with worker processes that stay up, one sample at a time and collated; every batch
copied to the device as it comes; running loss and accuracy read with ``.item()`` at every step;
eager, float32 unless autocast is asked for. Source: "Training a Classifier" and "Optimizing Model
Parameters" of the PyTorch tutorials.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


class _Shuffled(Sampler[int]):
    """Samples in a new order each epoch, the order of autotune's loop.

    ``RandomSampler`` draws twice an epoch, so its order differs.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self._num_samples, generator=self._generator).tolist())


@dataclass(frozen=True, kw_only=True)
class TextbookTraining:
    """Model, optimizer and settings of one training."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None
    loss: Loss
    batch_size: int
    epochs: int
    num_workers: int
    seed: int
    device: torch.device
    autocast_dtype: torch.dtype | None

    def train(self, dataset: "Dataset[Pair]") -> float:
        """Train for all epochs, with samples in the order of autotune's loop.

        Returns:
            Seconds from making the loader to the end of the last step.
        """
        began = time.perf_counter()
        sampler = _Shuffled(len(dataset), self.seed)  # type: ignore[arg-type]  # map-style
        loader = DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.device.type == "cuda",
            drop_last=True,
        )
        for _ in range(self.epochs):
            running_loss, num_correct = 0.0, 0
            for inputs, targets in loader:
                loss, correct = self._step(inputs.to(self.device), targets.to(self.device))
                running_loss += loss
                num_correct += correct
        return time.perf_counter() - began

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
        """Take one step.

        Return the batch's loss and number of correct answers, which waits for the device.
        """
        self.optimizer.zero_grad()
        with torch.autocast(
            self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None
        ):
            outputs = self.model(inputs)
            loss = self.loss(outputs, targets)
        loss.backward()
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return loss.item(), int((outputs.argmax(dim=1) == targets).sum().item())

    def accuracy(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Fraction of samples that the model classifies correctly."""
        self.model.eval()
        with torch.no_grad():
            right = [
                (self.model(batch.to(self.device)).argmax(dim=1).cpu() == wanted).sum()
                for batch, wanted in zip(inputs.split(1000), targets.split(1000), strict=True)
            ]
        self.model.train()
        return float(sum(right)) / len(targets)
