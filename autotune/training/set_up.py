"""Setting a training up: its data where it is trained on, and a step that is warm, compiled or captured."""

import bisect
import contextlib
import json
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Phase, PhaseClock
from autotune.training.batches import Batch, host_batches, resident_batches, sample_order
from autotune.training.components import Augmentation, Components, make_components, make_strategy
from autotune.training.data import LoadedData, Split, fits_on, load_data
from autotune.training.device import reset_device
from autotune.training.outcome import as_measured
from autotune.training.parallel.ranks import ALONE, Ranks
from autotune.training.precision import Precision
from autotune.training.runtime import apply_runtime
from autotune.training.seeding import seed_everything
from autotune.training.step import TrainingStep
from autotune.training.techniques.technique import NoTechnique

_EVALUATION_BATCH = {"cpu": 256, "cuda": 2048}
"""Samples evaluated at once: on the CPU what a cache holds, on a GPU what keeps it busy."""
_NUM_WARM_UP_PLACES = 16
"""Places of the schedule that are looked at for shapes to warm up, of an augmentation that does not say where they change."""
_NUM_BOUND_WARM_UPS = 3
"""Times that compiled code is run before it counts: it warms up, records and replays."""


@dataclass(frozen=True, eq=False)
class Run:
    """What stays the same through one training: its data where it is trained on, sizes, precision."""

    config: TrialConfig
    data: LoadedData
    device: torch.device
    precision: Precision
    train: Split
    validation: Split
    batch_size: int
    """Samples a step: the configured size, or the whole training split where that is smaller."""
    total_steps: int
    evaluate_every_samples: int
    ranks: Ranks
    part: tuple[int, int]
    """Which part of each batch this rank takes, of how many."""

    @classmethod
    def start(cls, config: TrialConfig, data: LoadedData, device: torch.device, ranks: Ranks) -> "Run":
        """A training's data and sizes, with the data where it is trained on."""
        on_device = config.data_path.on_device
        resident = fits_on(device, data) if on_device is None else on_device
        precision = Precision(config.precision, device)
        precision.apply()
        form: dict[str, Any] = {"channels_last": config.runtime.channels_last, "dtype": precision.weights_dtype}
        return cls(
            config,
            data,
            device,
            precision,
            data.train.to(device, **form) if resident else data.train,
            data.validation.to(device, **form),
            min(config.batch_size, len(data.train)),
            num_steps(config, data),
            config.evaluate_every_samples or len(data.train),
            ranks,
            make_strategy(config).part_of_batch(ranks.rank),
        )

    @property
    def is_resident(self) -> bool:
        """Whether the training split lies where it is trained on, so that nothing need be gathered ahead."""
        return self.train is not self.data.train

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of the training split."""
        return len(self.data.train) // self.batch_size

    def training_step(self) -> TrainingStep:
        """A step with fresh parts."""
        parts = make_components(self.config, self.data, self.device, self.total_steps, ranks=self.ranks)
        return TrainingStep(self.config, parts, self.precision, self.steps_per_epoch, self.total_steps)

    def warmed_up(self) -> TrainingStep:
        """A step that has trained on one batch of every shape to come, and evaluated one: lazy set-up, compiling and capturing are over.

        Its parts are not fit for training: they have been trained.
        """
        seed_everything(self.config.seed)
        step = self.training_step()
        size = self.batch_size // self.part[1]
        batch = self._on_device(Batch(self.train.inputs[:size], self.train.targets[:size], torch.arange(size)))
        shapes: dict[torch.Size, int] = {}
        for place in _places_of_new_shapes(step.parts.augment, self.total_steps):
            shapes.setdefault(step.augmented(batch, place).shape, place)
        for _ in range(_NUM_BOUND_WARM_UPS if step.is_bound else 1):
            step.warm_up(batch, list(shapes.values()))
        size = _EVALUATION_BATCH[self.device.type]
        self.evaluate(step.parts, Split(self.validation.inputs[:size], self.validation.targets[:size]))
        return step

    def batches(self, first_step: int) -> Generator[Batch]:
        """Batches from a step to the last one, as the model takes them."""
        config, size = self.config, self.batch_size
        where = self.train.inputs.device
        order = sample_order(len(self.train), size, self.total_steps, config.seed, first_step=first_step, device=where)
        index, parts = self.part
        if parts > 1:
            order = (samples.tensor_split(parts)[index] for samples in order)
        if self.is_resident:
            gathered = resident_batches(self.train, order)
        else:
            path = config.data_path
            gathered = host_batches(
                self.train, order, num_workers=path.num_workers, prefetch_batches=path.prefetch_batches, device=self.device
            )
        with closing(gathered):
            for batch in gathered:
                yield self._on_device(batch)

    def _on_device(self, batch: Batch) -> Batch:
        return Batch(self._as_taken(batch.inputs.to(self.device)), batch.targets.to(self.device), batch.samples.to(self.device))

    def _as_taken(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs on the device as the model takes them: transformed, in its number format and memory format."""
        inputs = self.data.transform(inputs)
        if inputs.is_floating_point():
            inputs = inputs.to(self.precision.weights_dtype)
        if self.config.runtime.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def evaluate(self, parts: Components, split: Split) -> tuple[float, float]:
        """Metric and loss, each the mean over a split, which may lie in host memory; every rank takes a part of it."""
        model = parts.evaluated_model
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        size, (index, num_parts) = _EVALUATION_BATCH[self.device.type], self.part
        # What is made in inference mode is no part of a later backward pass, and sharded weights would be.
        without_gradients = torch.inference_mode if self.ranks.size == 1 else torch.no_grad
        with _evaluating(model, parts.optimizer), parts.shared.scoring(model), without_gradients():
            for first in range(0, len(split), size * num_parts):
                start = first + index * size
                counted = max(0, min(size, len(split) - start))
                if not counted:
                    start = 0  # ranks call the model equally often
                inputs, targets = (each[start : start + max(counted, 1)].to(self.device) for each in (split.inputs, split.targets))
                inputs = self._as_taken(inputs)
                with self.precision.autocast():
                    outputs = parts.shared.outputs(model, parts.views, inputs)
                    if outputs is None:
                        continue  # another rank has them
                    outputs = self.precision.outputs(outputs)
                    scores = torch.stack([parts.metric(outputs, targets).double(), parts.loss(outputs, targets).double()])
                if parts.shared.counts:
                    sums += scores * counted
        metric, loss = (self.ranks.summed(sums) / len(split)).tolist()
        return as_measured(metric), loss


def set_up(
    config: TrialConfig, device: torch.device, clock: PhaseClock, num_threads: int, ranks: Ranks = ALONE
) -> tuple[Run, TrainingStep]:
    """All that comes before the first step of a training, each in its phase: what stays the same, and a step with fresh parts.

    What was compiled or captured is kept for the next training of the process, which takes it where only seed or target differ;
    its build phase then has the seconds that building took, since that is what a process pays once.

    Raises:
        ConfigError: there are more or fewer ranks than workers.
    """
    global _built  # noqa: PLW0603  # what one process has built is the point
    if ranks.size != (wanted := config.num_workers):
        raise ConfigError(f"parallelism.num_workers: found {wanted}, and this training has {ranks.size}; accepted is as many")
    clock.enter(Phase.BUILD)
    key = json.dumps([{**config.as_dict(), "seed": None, "target": None}, str(device), num_threads], sort_keys=True, default=str)
    if _built is None or _built.key != key:
        _built = None  # its memory must go before more is taken
        reset_device(device)
        apply_runtime(config, device, num_threads)
        run = Run.start(config, load_data(config), device, ranks)
        step = run.warmed_up()
    else:
        run, step = replace(_built.run, config=config), _built.step
        clock.add(Phase.BUILD, _built.seconds, _built.joules)

    clock.enter(Phase.PREPARE)
    seed_everything(config.seed)
    if not step.is_bound:
        step = run.training_step()
    else:
        step.parts = make_components(config, run.data, device, run.total_steps, reuse=step.parts, ranks=ranks)
    if run.part[1] > 1:
        seed_everything(config.seed + run.part[0])  # each part of a batch has augmentations of its own
    if not step.is_bound or ranks.size > 1:  # ranks part at the end, and what is bound to their meeting with them
        return run, step
    if _built is None and isinstance(step.parts.technique, NoTechnique):  # others change the model for good
        _built = _Built(key=key, run=run, step=step, seconds=clock.seconds(Phase.BUILD), joules=clock.joules(Phase.BUILD))
    return run, step


@dataclass(frozen=True, kw_only=True)
class _Built:
    """What is bound to one model, for the next training of the same configuration."""

    key: str
    run: Run
    step: TrainingStep
    seconds: float
    """That building took."""
    joules: float | None
    """Likewise; None where they were not measured."""


_built: _Built | None = None


def num_steps(config: TrialConfig, data: LoadedData) -> int:
    """Steps of a configuration's schedule."""
    return max(1, round(config.epochs * (len(data.train) // min(config.batch_size, len(data.train)))))


def _places_of_new_shapes(augment: Augmentation, total_steps: int) -> list[int]:
    """Steps at which batches may have a shape that none before had, the first step among them."""
    starts = getattr(augment, "new_shapes_at", None)
    if starts is None:
        return [place * total_steps // _NUM_WARM_UP_PLACES for place in range(_NUM_WARM_UP_PLACES)]
    steps = range(total_steps)
    firsts = (bisect.bisect_left(steps, start, key=lambda step: step / total_steps) for start in starts)
    return [0, *(step for step in firsts if step < total_steps)]


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Model and optimizer as they score, and after that as they were: parts of a model may not be in training mode."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    set_mode = getattr(optimizer, "eval", None), getattr(optimizer, "train", None)  # a schedule-free one has both
    if set_mode[0] is not None:
        set_mode[0]()
    yield
    for module in in_training:
        module.training = True
    if set_mode[1] is not None:
        set_mode[1]()
