"""Pipeline parallelism: every rank holds a stage, that is some neighbouring layers, and
micro-batches pass from rank to rank.

A model names its layers in order: ``pipeline_layers()`` returns modules that, applied one after the
other, are its forward pass. They are divided into stages of about equally many parameters.
"""

import json
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, check_choice, check_counts
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import SharedModel, Strategy, Views
from autotune.training.runtime import Precision
from autotune.training.techniques.technique import Loss

_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline(Strategy):
    """Pipeline parallelism by ``torch.distributed.pipelining``, with one stage for each rank.

    Args:
        num_workers: number of ranks, and of stages.
        schedule: ``gpipe`` runs all forward passes and then all backward passes; ``1f1b``
            alternates, which keeps fewer activations.
        num_micro_batches: number of parts of a batch that are under way at once.
        backend: torch.distributed backend; None for nccl between GPUs and gloo between CPUs.

    Raises:
        ConfigError: an unknown schedule, or too few micro-batches for it.

    Source: Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019) for 1F1B.
    """

    divides_model = True

    def __init__(
        self, *, num_workers: int, schedule: str, num_micro_batches: int, backend: str | None = None
    ) -> None:
        check_choice("parallelism.schedule", schedule, _SCHEDULES)
        check_counts(
            "parallelism",
            num_workers if schedule == "1f1b" else 1,
            num_micro_batches=num_micro_batches,
        )
        super().__init__(num_workers=num_workers, backend=backend)
        self._schedule, self._num_micro_batches = schedule, num_micro_batches

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse a training that cannot be divided into stages.

        Raises:
            ConfigError: the model names no layers or too few, the batch cannot be divided, or a
                setting does not allow it.
        """
        super().check(config, model, batch_size=batch_size)
        num_layers = len(_layers_of(model))
        if num_layers < self.num_workers:
            raise ConfigError(
                f"parallelism.num_workers: found {self.num_workers}, use up to {num_layers}, the"
                " number of the model's layers"
            )
        if batch_size % self._num_micro_batches:
            raise ConfigError(
                f"parallelism.num_micro_batches: found {self._num_micro_batches}, use a divisor of"
                f" batch_size = {batch_size}"
            )
        for key, found, use in (
            ("views._target_", config.views["_target_"], "autotune.training.views.plain"),
            ("runtime.micro_batch_size", config.runtime.micro_batch_size, None),
            ("runtime.activation_checkpointing", config.runtime.activation_checkpointing, False),
        ):
            if found != use:
                raise ConfigError(
                    f"{key}: found {found}, use {json.dumps(use)} with parallelism=pipeline"
                )

    def share(
        self, model: nn.Module, ranks: Ranks, precision: Precision, loss: Loss
    ) -> SharedModel:
        """Make this rank's layers a stage of the pipeline.

        All other layers are moved to the meta device, where they take no memory.
        """
        stages = [nn.Sequential(*stage) for stage in _evenly(_layers_of(model), ranks.size)]
        for rank, stage in enumerate(stages):
            stage.to(precision.device if rank == ranks.rank else torch.device("meta"))
        make_stage = partial(
            PipelineStage, stages[ranks.rank], ranks.rank, ranks.size, precision.device
        )
        schedule = _SCHEDULES[self._schedule](make_stage(), self._num_micro_batches, loss_fn=loss)
        return PipelinedModel(model, ranks, make_stage, schedule)


class PipelinedModel(SharedModel):
    """A model of which this rank holds some layers, as one stage.

    Args:
        model: the model, whose other layers are on the meta device.
        ranks: the ranks that train together.
        make_stage: makes this rank's stage for a schedule.
        schedule: the schedule of training.
    """

    adds_gradients = True

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        make_stage: Callable[[], PipelineStage],
        schedule: PipelineScheduleSingle,
    ) -> None:
        super().__init__(model)
        self._ranks, self._make_stage, self._schedule = ranks, make_stage, schedule
        # stages exchange tensors of fixed shape: schedules that score, by batch size
        self._scoring: dict[int, ScheduleGPipe] = {}

    def add_gradients(self, inputs: Tensor, targets: Tensor) -> None:
        """Add the gradients of the batch's mean loss to this rank's parameters."""
        first_inputs = [inputs] if self._ranks.is_first else []
        self._schedule.step(*first_inputs, target=targets, return_outputs=False)

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """The parameters of this rank's layers."""
        return [parameter for parameter in self.model.parameters() if not parameter.is_meta]

    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of the gradients of all ranks' layers."""
        return self._ranks.summed(super().gradient_norm().square()).sqrt()

    def outputs(self, model: nn.Module, views: Views, inputs: Tensor) -> Tensor | None:
        """The model's outputs on the last rank, None on others."""
        size = len(inputs)
        if size not in self._scoring:
            self._scoring[size] = ScheduleGPipe(self._make_stage(), 1)
        first_inputs = [inputs] if self._ranks.is_first else []
        outputs: Tensor = self._scoring[size].step(*first_inputs)
        return outputs if self._ranks.rank == self._ranks.size - 1 else None

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The state of all stages, in host memory."""
        state = model.state_dict()
        held = {name: value.cpu() for name, value in state.items() if not value.is_meta}
        stages: list[Any] = [None] * self._ranks.size
        distributed.all_gather_object(stages, held)
        gathered = ChainMap(*stages)
        return {name: gathered[name] for name in state}


def _layers_of(model: nn.Module) -> Sequence[nn.Module]:
    layers = getattr(model, "pipeline_layers", None)
    if not callable(layers):
        raise ConfigError(
            f"parallelism: {type(model).__name__} has no pipeline_layers, so it has no stages;"
            " use single, ddp or fsdp"
        )
    return layers()  # type: ignore[no-any-return]  # the contract in the module docstring


def _evenly(layers: Sequence[nn.Module], num_stages: int) -> list[list[nn.Module]]:
    """Divide layers into stages of neighbours, none of them empty, with about equally many
    parameters.
    """
    counts = [sum(parameter.numel() for parameter in layer.parameters()) + 1 for layer in layers]
    totals, cuts = list(accumulate(counts)), [0]
    for stage in range(1, num_stages):
        wanted = totals[-1] * stage / num_stages
        cuts.append(
            min(
                range(cuts[-1] + 1, len(layers) - num_stages + stage + 1),
                key=lambda cut: abs(totals[cut - 1] - wanted),
            )
        )
    return [list(layers[first:last]) for first, last in pairwise([*cuts, len(layers)])]
