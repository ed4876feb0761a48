"""Pipeline parallelism: every rank holds some of the layers, and micro-batches pass from rank to rank.

A model names its layers in order: ``pipeline_layers()`` returns modules that, applied one after the other, are its forward pass. They
are shared out evenly by their number of parameters.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import Loss, SharedModel, Strategy, Views, needs_whole_weights

_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline(Strategy):
    """Every rank is a stage of torch's pipelining.

    Args:
        num_workers: ranks, one stage each.
        schedule: ``gpipe``, all forward passes and then all backward passes, or ``1f1b``, in turns, which keeps fewer activations.
        num_micro_batches: parts of a batch that are under way at once.

    Raises:
        ConfigError: values that do not go together.

    Source: Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019) for 1F1B.
    """

    def __init__(self, *, num_workers: int, schedule: str, num_micro_batches: int, backend: str | None = None) -> None:
        if schedule not in _SCHEDULES:
            raise ConfigError(f"parallelism.schedule: found {schedule!r}, accepted are {', '.join(_SCHEDULES)}")
        least = num_workers if schedule == "1f1b" else 1
        if num_micro_batches < least:
            raise ConfigError(f"parallelism.num_micro_batches: found {num_micro_batches}, accepted is a whole number from {least}")
        super().__init__(num_workers=num_workers, backend=backend)
        self._schedule, self._num_micro_batches = schedule, num_micro_batches

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse what cannot be trained in stages.

        Raises:
            ConfigError: the model does not name its layers or has too few, a batch cannot be divided, or something needs whole weights.
        """
        super().check(config, model, batch_size=batch_size)
        layers = _layers_of(model)
        if len(layers) < self.num_workers:
            raise ConfigError(f"parallelism.num_workers: found {self.num_workers}, accepted are up to {len(layers)}, the model's layers")
        if batch_size % self._num_micro_batches:
            raise ConfigError(
                f"parallelism.num_micro_batches: found {self._num_micro_batches}, accepted is a divisor of batch_size = {batch_size}"
            )
        needs_whole_weights(config, "pipeline")
        for key, found, accepted in (
            ("views._target_", config.views["_target_"], "autotune.training.views.plain"),
            ("runtime.micro_batch_size", config.runtime["micro_batch_size"], None),
            ("runtime.activation_checkpointing", config.runtime["activation_checkpointing"], False),
        ):
            if found != accepted:
                raise ConfigError(f"{key}: found {found}, accepted with parallelism=pipeline is {json.dumps(accepted)}")

    def share(self, model: nn.Module, ranks: Ranks, device: torch.device, loss: Loss) -> SharedModel:
        """This rank's layers; those of the others are moved to the meta device."""
        layers = _layers_of(model)
        stages = _evenly(layers, ranks.size)
        for number, stage in enumerate(stages):
            if number != ranks.rank:
                for layer in stage:
                    layer.to("meta")
        own = nn.Sequential(*stages[ranks.rank])
        made = _SCHEDULES[self._schedule](PipelineStage(own, ranks.rank, ranks.size, device), self._num_micro_batches, loss_fn=loss)
        return PipelinedModel(model, own, made, ranks, device)


class PipelinedModel(SharedModel):
    """A model of which this rank holds a stage."""

    adds_gradients = True

    def __init__(self, model: nn.Module, own: nn.Module, schedule: PipelineScheduleSingle, ranks: Ranks, device: torch.device) -> None:
        super().__init__(model)
        self._own, self._schedule, self._ranks, self._device = own, schedule, ranks, device
        self._scoring: tuple[int, ScheduleGPipe] | None = None

    @property
    def _is_last(self) -> bool:
        return self._ranks.rank == self._ranks.size - 1

    def add_gradients(self, inputs: Tensor, targets: Tensor) -> None:
        """Add the gradients of the batch's mean loss to this rank's parameters."""
        if self._ranks.is_first:
            self._schedule.step(inputs, target=targets, return_outputs=False)
        else:
            self._schedule.step(target=targets, return_outputs=False)

    def gradient_norm(self) -> Tensor:
        """The norm over the layers of all ranks."""
        return self._ranks.summed(super().gradient_norm().square()).sqrt()

    def outputs(self, model: nn.Module, views: Views, inputs: Tensor) -> Tensor | None:
        """The outputs on the last rank. What passes between stages has one form: a smaller batch is filled up."""
        size, own = len(inputs), self._scoring
        if own is None or own[0] < size:
            stage = PipelineStage(self._own, self._ranks.rank, self._ranks.size, self._device)
            own = self._scoring = (size, ScheduleGPipe(stage, 1))
        filled = torch.cat([inputs, inputs[:1].expand(own[0] - size, *inputs.shape[1:])])
        outputs = own[1].step(filled) if self._ranks.is_first else own[1].step()
        return outputs[:size] if self._is_last else None

    @property
    def counts(self) -> bool:
        """Only the last rank has outputs."""
        return self._is_last

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Every stage's, gathered."""
        own = {name: value.cpu() for name, value in model.state_dict().items() if not value.is_meta}
        gathered: list[Any] | None = [None] * self._ranks.size if self._ranks.is_first else None
        distributed.gather_object(own, gathered)
        whole = {name: value for each in gathered or [own] for name, value in each.items()}
        return {name: whole[name] for name in model.state_dict() if name in whole}


def _layers_of(model: nn.Module) -> Sequence[nn.Module]:
    make = getattr(model, "pipeline_layers", None)
    if not callable(make):
        raise ConfigError(
            f"parallelism: {type(model).__name__} has no pipeline_layers, so it has no stages; accepted are single, ddp, fsdp"
        )
    return make()  # type: ignore[no-any-return]  # the contract above


def _evenly(layers: Sequence[nn.Module], number: int) -> list[list[nn.Module]]:
    """Layers in so many groups of neighbours, none empty, of about as many parameters each."""
    sizes = [sum(each.numel() for each in layer.parameters()) + 1 for layer in layers]
    stages: list[list[nn.Module]] = []
    start = 0
    for stage in range(number):
        left = number - stage
        share, taken, end = sum(sizes[start:]) / left, 0.0, start
        while end < len(layers) - (left - 1) and (end == start or taken + sizes[end] / 2 <= share or left == 1):
            taken += sizes[end]
            end += 1
        stages.append(list(layers[start:end]))
        start = end
    return stages
