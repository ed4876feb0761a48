"""The training step: updates the weights from one batch, without ever waiting for the device."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from autotune.config.schema import TrialConfig
from autotune.training.components import BoundParts, Components
from autotune.training.data import Batch
from autotune.training.runtime import GraphedGradients, Precision
from autotune.training.techniques.technique import Loss


class TrainingStep:
    """A callable that runs the steps of one training.

    A profiler shows the parts of a step by name: data, augmentation, forward, backward, optimizer;
    the part graph replaces forward and backward if both are one CUDA graph.

    Args:
        gradients: those of an earlier training, if ``parts`` were made for them; new ones if None.
    """

    def __init__(
        self,
        config: TrialConfig,
        parts: Components,
        precision: Precision,
        steps_per_epoch: int,
        total_steps: int,
        gradients: "BatchGradients | None" = None,
    ) -> None:
        self.parts = parts
        self.gradients = gradients or BatchGradients(config, parts, precision)
        self._max_grad_norm = config.max_grad_norm
        self._steps_per_epoch = steps_per_epoch
        self._total_steps = total_steps

    def on_next(self, batches: Iterator[Batch], step: int) -> None:
        """Take the next batch and train on it; ``step`` counts from 0."""
        with labelled("data"):
            batch = next(batches)
        self(batch, step)

    def __call__(self, batch: Batch, step: int) -> None:
        """Train on one batch; ``step`` counts from 0."""
        parts = self.parts
        parts.technique.before_step(parts.model, step, self._total_steps)
        parts.shared.before_step()
        self._compute_gradients(self.augmented(batch, step), batch.targets)
        with labelled("optimizer"):
            self._step_optimizer()
            if parts.schedule is not None:
                parts.schedule.step()
            if parts.average is not None:
                parts.average.update(step + 1)

    def augmented(self, batch: Batch, step: int) -> Tensor:
        """The augmented inputs of a batch, as the model sees them at a step."""
        with labelled("augmentation"):
            return self.parts.augment(
                batch.inputs,
                samples=batch.samples,
                epoch=step // self._steps_per_epoch,
                progress=step / self._total_steps,
            )

    def warm_up(self, batch: Batch, steps: Iterable[int]) -> None:
        """Compute the batch's gradients with the augmentation of each of the given steps, then
        update the weights once.
        """
        for step in steps:
            self._compute_gradients(self.augmented(batch, step), batch.targets)
        self._step_optimizer()

    def _compute_gradients(self, inputs: Tensor, targets: Tensor) -> None:
        """Compute the gradients of a batch into the parameters' ``.grad``, in place of those of
        the last batch.
        """
        if not self.gradients.is_graphed:  # a graph's gradients stay where it writes them
            self.parts.optimizer.zero_grad(set_to_none=True)
        self.gradients(inputs, targets, self.parts.scaler)

    def _step_optimizer(self) -> None:
        scaler, optimizer = self.parts.scaler, self.parts.optimizer
        if self._max_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            self.parts.shared.clip_gradients(self._max_grad_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


class BatchGradients:
    """Computes the gradients of a batch, by code that may be compiled and by CUDA graphs.

    Both are bound to the model, so a later training that uses them again takes the ``parts`` too.
    """

    def __init__(self, config: TrialConfig, parts: BoundParts, precision: Precision) -> None:
        self.parts = BoundParts(
            model=parts.model, shared=parts.shared, technique=parts.technique, loss=parts.loss
        )
        runtime = config.runtime
        self._micro_batch_size = runtime.micro_batch_size
        self._compute = _compute_loss(self.parts, precision)
        if runtime.compile is not None:
            self._compute = torch.compile(self._compute, mode=runtime.compile, dynamic=False)
        self.is_graphed = runtime.cuda_graph and precision.device.type == "cuda"
        """Whether forward and backward pass are CUDA graphs."""
        self._graphed = GraphedGradients(self._add, parts.model) if self.is_graphed else None
        self.is_bound = runtime.compile is not None or self.is_graphed
        """Whether compiled code or a CUDA graph is bound to the model, so that the next training
        must use the same model."""

    def __call__(
        self, inputs: Tensor, targets: Tensor, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Add the batch's gradients to the parameters' ``.grad``.

        A CUDA graph, which has no scaler, puts them there instead.
        """
        if self._graphed is None:
            self._add(inputs, targets, scaler)
        else:
            with labelled("graph"):
                self._graphed(inputs, targets)

    def _add(
        self,
        inputs: Tensor,
        targets: Tensor,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Add the gradients of the batch's mean loss, by micro-batches if configured, which is the
        same up to rounding.

        Batch normalisation sees one micro-batch at a time.
        """
        shared, size = self.parts.shared, self._micro_batch_size or len(inputs)
        *earlier, last = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        with shared.accumulating():
            for part in earlier:
                self._add_share(*part, len(part[0]) / len(inputs), scaler)
        self._add_share(*last, len(last[0]) / len(inputs), scaler)

    def _add_share(
        self,
        inputs: Tensor,
        targets: Tensor,
        share: float,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        with labelled("forward"):
            loss = self._compute(inputs, targets)
            if share < 1:
                loss = loss * share
        with labelled("backward"):
            scaled = loss if scaler is None else scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]  # missing in torch's stubs


def _compute_loss(parts: BoundParts, precision: Precision) -> Loss:
    """Function that computes a batch's loss from its inputs and targets.

    It uses only components that later trainings keep, because it may be compiled.
    """
    model, technique, loss = parts.shared, parts.technique, parts.loss

    def compute(inputs: Tensor, targets: Tensor) -> Tensor:
        with precision.autocast():
            return technique.loss(loss, precision.outputs(model(inputs)), targets, inputs)

    return compute


def labelled(name: str) -> contextlib.AbstractContextManager[object]:
    """Context that names a part of a step for the profiler.

    It does nothing if no profiler is active.
    """
    return (
        torch.profiler.record_function(name)
        if torch.autograd.profiler._is_profiler_enabled  # noqa: SLF001
        else contextlib.nullcontext()
    )
