"""Sets up a training: places its data on the device or in host memory, and makes a step that is
warmed up, compiled or captured.
"""

import bisect
import contextlib
import gc
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Phase, PhaseClock, as_measured
from autotune.training.compiled_code import CompiledCode, graph_of
from autotune.training.components import Augmentation, Components, make_components, make_strategy
from autotune.training.data import (
    Batch,
    LoadedData,
    Split,
    fits_on,
    gather,
    host_batches,
    load_data,
    sample_order,
)
from autotune.training.device import (
    free_unused_memory,
    is_out_of_memory,
    reset_device,
    reset_peak_memory,
    seed_everything,
)
from autotune.training.parallel.ranks import ALONE, Ranks
from autotune.training.runtime import Precision, apply_runtime
from autotune.training.step import BatchGradients, TrainingStep
from autotune.training.techniques.technique import NoTechnique

_EVALUATION_BATCH = {"cpu": 256, "cuda": 2048}
"""Batch size of evaluations where it fits, by device type: small enough for a CPU's cache, large
enough to keep a GPU busy."""


@dataclass(frozen=True, eq=False)
class Run:
    """What stays constant during one training: its data (on the device or in host memory),
    sizes, precision and ranks.
    """

    config: TrialConfig
    data: LoadedData
    device: torch.device
    precision: Precision
    train: Split
    validation: Split
    batch_size: int
    """Samples per step, over all ranks: the configured batch size, or the size of the training
    split if that is smaller."""
    ranks: Ranks
    part: tuple[int, int]
    """Index of the part of each batch that this rank takes, and the number of parts."""
    is_counted: bool
    """Whether this rank's scores are summed: of the ranks that take the same part, the first
    one's are."""
    evaluation_batch_size: int = 1
    """Samples of an evaluation that this rank scores at once, as many as fit once it has warmed
    up."""

    @classmethod
    def start(
        cls, config: TrialConfig, data: LoadedData, device: torch.device, ranks: Ranks
    ) -> "Run":
        """Make the run of one training: move the training split to where it stays, and set the
        precision of this process.
        """
        on_device = config.data_path.on_device
        is_resident = fits_on(device, data) if on_device is None else on_device
        precision = Precision(config.precision, device)
        precision.apply()
        strategy = make_strategy(config)
        run = cls(
            config,
            data,
            device,
            precision,
            data.train,
            data.validation,
            min(config.batch_size, len(data.train)),
            ranks,
            strategy.part_of_batch(ranks.rank),
            ranks.rank % strategy.tensor_size == 0,
        )
        return replace(run, train=run._moved(data.train)) if is_resident else run

    def _moved(self, split: Split) -> Split:
        """A split on the device, in the model's memory format and dtype."""
        inputs = split.inputs.to(self.device).contiguous()
        return Split(self._formatted(inputs), split.targets.to(self.device))

    @cached_property
    def total_steps(self) -> int:
        """Number of steps of the schedule."""
        return num_steps(self.config, self.data)

    @cached_property
    def evaluate_every_samples(self) -> int:
        """Number of training samples from one evaluation to the next."""
        return self.config.evaluate_every_samples or len(self.data.train)

    def training_step(self, gradients: BatchGradients | None = None) -> TrainingStep:
        """Make a training step with new components, except those that ``gradients`` are bound
        to, which are set anew.
        """
        reuse = None if gradients is None else gradients.parts
        if reuse is not None:
            reuse.model.zero_grad(set_to_none=True)  # frees memory before more is taken
        parts = make_components(
            self.config, self.data, self.device, self.total_steps, reuse=reuse, ranks=self.ranks
        )
        steps_per_epoch = len(self.train) // self.batch_size
        return TrainingStep(
            self.config, parts, self.precision, steps_per_epoch, self.total_steps, gradients
        )

    def warmed_up(
        self, clock: PhaseClock, num_threads: int, built: "_Built | None"
    ) -> "tuple[Run, _Built | None]":
        """Warm up a step on one training batch of every shape to come and one evaluation batch.

        Lazy set-up, compiling and capturing are over afterwards.

        Args:
            clock: its build phase is charged with what making code took that is used again.
            num_threads: number of threads that may compile.
            built: what an earlier training of the same graph left; it is used again if its batches
                had the same shapes.

        Returns:
            The run with an evaluation batch that fits, and with the validation split on the device
            if it fits beside the training. What compiled code and CUDA graphs need, whose model
            must be set anew, because the warm-up trained it; None if there are none: the training
            makes another model, and needs the memory of this one.
        """
        seed_everything(self.config.seed)
        step = self.training_step(None if built is None else built.gradients)
        with closing(self.batches(0)) as batches:
            batch = next(batches)
            shapes: dict[torch.Size, int] = {}
            for first_step in _steps_of_new_shapes(step.parts.augment, self.total_steps):
                shapes.setdefault(step.augmented(batch, first_step).shape, first_step)
            if built is not None and built.shapes != shapes.keys():
                torch.compiler.reset()
                built, step = None, self.training_step()
            is_bound = step.gradients.is_bound
            graph = graph_of(self.config, self.device, num_threads)
            key = f"{graph} {list(shapes)}" if self.config.runtime.compile is not None else None
            code = CompiledCode(key, num_threads) if built is None else built.code
            with code.first_passes(clock) if is_bound else contextlib.nullcontext():
                # compiled code warms up, records CUDA graphs and replays them
                for _ in range(3 if is_bound else 1):
                    step.warm_up(batch, shapes.values())
            run = replace(
                self, evaluation_batch_size=self._fitting_evaluation_batch_size(step.parts)
            )
        if run.validation is self.data.validation and fits_on(self.device, self.data.validation):
            run = replace(run, validation=self._moved(self.data.validation))
        return run, (
            _Built(graph=graph, run=run, shapes={*shapes}, gradients=step.gradients, code=code)
            if is_bound
            else None
        )

    def batches(self, first_step: int) -> Generator[Batch]:
        """Yield this rank's part of every batch from ``first_step`` on, transformed and on the
        device.
        """
        config = self.config
        order = sample_order(
            len(self.train),
            self.batch_size,
            self.total_steps,
            config.seed,
            first_step=first_step,
            device=self.train.inputs.device,
        )
        index, parts = self.part
        if parts > 1:
            order = (samples.tensor_split(parts)[index] for samples in order)
        if self.train is not self.data.train:  # it is on the device
            gathered = (gather(self.train, samples) for samples in order)
        else:
            gathered = host_batches(
                self.train,
                order,
                num_workers=config.data_path.num_workers,
                prefetch_batches=config.data_path.prefetch_batches,
                device=self.device,
            )
        with closing(gathered):
            for batch in gathered:
                inputs, targets, samples = (tensor.to(self.device) for tensor in batch)
                yield Batch(self._formatted(self.data.transform(inputs)), targets, samples)

    def _formatted(self, inputs: Tensor) -> Tensor:
        """Inputs in the model's memory format, floating-point ones in its dtype."""
        if inputs.is_floating_point():
            inputs = inputs.to(self.precision.weights_dtype)
        if self.config.runtime.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def evaluate(self, parts: Components, split: Split) -> tuple[float, float]:
        """Mean metric and mean loss over a split, which may be in host memory.

        Every rank must call this and scores a part.
        """
        with self._scoring(parts):
            sums = self._sums(parts, split, self.evaluation_batch_size)
        metric, loss = (self.ranks.summed(sums) / len(split)).tolist()
        return as_measured(metric), loss

    @contextlib.contextmanager
    def _scoring(self, parts: Components) -> Iterator[None]:
        """Context in which all ranks score the same model, in evaluation mode and without
        gradients.

        Afterwards every submodule is back in the mode that it had.
        """
        model = parts.evaluated_model
        in_training = [module for module in model.modules() if module.training]
        model.eval()
        # a schedule-free optimizer has both modes
        getattr(parts.optimizer, "eval", lambda: None)()
        # Sharded weights gathered in inference mode could not take part in a later backward pass.
        without_gradients = torch.no_grad if self.ranks.is_joined else torch.inference_mode
        try:
            with without_gradients():
                self.ranks.share_buffers(model)
                yield
        finally:
            for module in in_training:
                module.training = True
            getattr(parts.optimizer, "train", lambda: None)()

    def _sums(self, parts: Components, split: Split, size: int) -> Tensor:
        """Sums of metric and loss over the samples of a split that this rank scores, ``size`` at
        once.
        """
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        index, num_parts = self.part
        for first in range(0, len(split), size * num_parts):
            start = first + index * size
            counted = max(0, min(size, len(split) - start))
            if not counted:
                start = 0  # every rank must call the model equally often
            end = start + max(counted, 1)
            scores = self._scores(parts, split.inputs[start:end], split.targets[start:end])
            if self.is_counted:
                sums += scores * counted
        return sums

    def _scores(self, parts: Components, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean metric and loss of a batch, whose outputs are freed afterwards."""
        targets = targets.to(self.device)
        model_inputs = self._formatted(self.data.transform(inputs.to(self.device)))
        with self.precision.autocast():
            outputs = self.precision.outputs(parts.views(parts.evaluated_model, model_inputs))
            return torch.stack(
                [score(outputs, targets).double() for score in (parts.metric, parts.loss)]
            )

    def _fitting_evaluation_batch_size(self, parts: Components) -> int:
        """The configured evaluation batch size, or the usual one, halved until every rank's memory
        holds such a batch.

        A rank that fails within the model leaves others waiting there, if they exchange tensors in
        it. Such ranks evaluate as many samples as they train at once, which has just fitted.

        Raises:
            torch.OutOfMemoryError: a rank's memory does not hold one sample.
        """
        config, num_parts, is_halved = self.config, self.part[1], False
        if (size := config.evaluation_batch_size) is None:
            size = min(_EVALUATION_BATCH[self.device.type], len(self.validation))
            is_halved = self.ranks.size == 1 or parts.shared.scores_alone
            if not is_halved:
                trained = self.batch_size // num_parts
                size = min(size, trained, config.runtime.micro_batch_size or trained)
        with self._scoring(parts):
            while True:
                count, fault = size * num_parts, ""
                try:
                    self._sums(
                        parts,
                        Split(self.validation.inputs[:count], self.validation.targets[:count]),
                        size,
                    )
                except Exception as error:
                    if not is_halved or not is_out_of_memory(error):
                        raise
                    fault = str(error) or type(error).__name__
                faults = [*filter(None, self.ranks.gathered(fault))]
                if not faults:
                    return size
                if size == 1:
                    raise torch.OutOfMemoryError(faults[0])
                free_unused_memory(self.device)
                size //= 2


def set_up(
    config: TrialConfig,
    device: torch.device,
    clock: PhaseClock,
    num_threads: int,
    ranks: Ranks = ALONE,
) -> tuple[Run, TrainingStep]:
    """Do everything before the first step of a training, and return run and step.

    The clock goes from its build to its prepare phase.

    Compiled code and captured graphs are kept for the next training of the process, if that has the
    same graph: it may differ in all that they do not depend on (``compiled_code.py``). Its build
    phase is then charged with what making them took.

    Raises:
        ConfigError: the number of ranks differs from ``parallelism.num_workers``.
    """
    global _built  # noqa: PLW0603  # a process keeps what one graph needs
    if ranks.size != (num_workers := config.num_workers):
        raise ConfigError(
            f"parallelism.num_workers: found {num_workers}, and this training has {ranks.size};"
            " use as many"
        )
    built, _built = _built, None
    if (
        built is not None
        and built.graph == graph_of(config, device, num_threads)
        and built.run.config.data_path == config.data_path
    ):
        gc.collect()
        run = replace(built.run, config=config)
    else:
        built = None  # frees its memory before more is taken
        reset_device(device)
        apply_runtime(config, device, num_threads)
        run = Run.start(config, load_data(config), device, ranks)
    run, built = run.warmed_up(clock, num_threads, built)
    gc.collect()  # optimizers with schedules, and checkpointed blocks, are in reference cycles

    clock.enter(Phase.PREPARE)
    reset_peak_memory(device)  # building takes more: it tries algorithms, and sizes that do not fit
    seed_everything(config.seed)
    step = run.training_step(None if built is None else built.gradients)
    if run.part[1] > 1:
        seed_everything(config.seed + run.part[0])  # each part of a batch is augmented differently
    # A step bound to the process group of several ranks ends with it; other techniques change the
    # model permanently.
    if not ranks.is_joined and isinstance(step.parts.technique, NoTechnique):
        _built = built
    return run, step


@dataclass(frozen=True, kw_only=True)
class _Built:
    """What compiled code and CUDA graphs of one graph need, kept for the next training of the
    same graph in this process.
    """

    graph: str
    run: Run
    shapes: set[torch.Size]
    """Shapes of the batches' inputs."""
    gradients: BatchGradients
    code: CompiledCode


_built: _Built | None = None


def num_steps(config: TrialConfig, data: LoadedData) -> int:
    """Number of steps of a configuration's schedule."""
    return max(
        1, round(config.epochs * (len(data.train) // min(config.batch_size, len(data.train))))
    )


def _steps_of_new_shapes(augment: Augmentation, total_steps: int) -> list[int]:
    """Steps at which the shape of batches may change, including the first step."""
    starts = getattr(augment, "new_shapes_at", ())
    steps = range(total_steps)
    first_steps = (
        bisect.bisect_left(steps, start, key=lambda step: step / total_steps) for start in starts
    )
    return [0, *(step for step in first_steps if step < total_steps)]
