"""Training as a generator that yields evaluations and knows nothing of tuning.

While the generator is suspended its clock stands still, so what a caller does with an evaluation costs the trial nothing.
Between two evaluations nothing is read back from the device.
"""

import contextlib
import json
import math
import random
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from autotune.config.schema import TrialConfig
from autotune.errors import DataError
from autotune.measurement import Evaluation, Outcome, Phase, PhaseClock, Target
from autotune.training.batches import Batch, host_batches, resident_batches, sample_order
from autotune.training.checkpoint import (
    STATE_FILE,
    random_state,
    read_state,
    save_state,
    save_weights,
    set_random_state,
    weights_metadata,
)
from autotune.training.components import Components, make_components
from autotune.training.data import LoadedData, Split, fits_on, load_data
from autotune.training.device import peak_memory_bytes, pick_device, reset_device, synchronizer
from autotune.training.precision import Precision
from autotune.training.runtime import apply_runtime
from autotune.training.step import TrainingStep
from autotune.training.techniques.technique import NoTechnique
from autotune.training.versions import versions

_EVALUATION_BATCH = {"cpu": 256, "cuda": 2048}
"""Samples evaluated at once: on the CPU what a cache holds, on a GPU what keeps it busy."""
_NUM_WARM_UP_PLACES = 16
"""Places of the schedule that are looked at for shapes of inputs to warm up."""
_NUM_BOUND_WARM_UPS = 3
"""Times that compiled code is run before it counts: it warms up, records and replays."""


def train(
    config: TrialConfig,
    *,
    cap_seconds: float = math.inf,
    num_threads: int = 1,
    score_test: bool = False,
    state_folder: Path | None = None,
    weights_path: Path | None = None,
    origin: Mapping[str, Any] = MappingProxyType({}),
) -> Generator[Evaluation, None, float | None]:
    """Train one configuration until it reaches its target or its time or schedule ends.

    Evaluations come at a fixed number of samples, the same for all batch sizes, and at the end. The first one at or past the
    target ends the training; its time, never an interpolation, is the time to target.

    Args:
        config: what to train.
        cap_seconds: warm seconds (prepare + train) after which the trial cannot win any more: it ends CAPPED.
        num_threads: CPU threads, where the configuration does not say a number.
        score_test: score the held-out test split at the end.
        state_folder: where the state is kept at every evaluation; a state found there is gone on from, its seconds counted.
        weights_path: the file that the weights are written to at the end.
        origin: what that file is to say of where they come from.

    Yields:
        Evaluations; only the last one has an outcome.

    Returns:
        The metric on the test split, None where it was not asked for or there is none.

    Raises:
        ConfigError, DataError: a component or the data set cannot be made.
        Exception: whatever the trained code raises; memory errors are not caught here.
    """
    device = pick_device(config.device)
    clock = PhaseClock(synchronizer(device))
    run, step = set_up(config, device, clock, num_threads)
    parts, place = step.parts, _Place()
    if state_folder is not None and (state_folder / STATE_FILE).is_file():
        clock.enter(None)
        place = run.resume(state_folder, parts, clock)
        if place.has_ended:
            yield place.evaluation

    clock.enter(Phase.TRAIN)
    with closing(run.batches(place.step)) as batches:
        while not place.has_ended:
            step.on_next(batches, place.step)
            place.step += 1
            train_seconds = clock.seconds(Phase.TRAIN)
            is_out_of_time = train_seconds > config.target.max_train_seconds or train_seconds + clock.seconds(Phase.PREPARE) > cap_seconds
            is_due = place.is_due(place.step * run.batch_size, run.evaluate_every_samples)
            if not is_due and place.step < run.total_steps and not is_out_of_time:
                continue
            place.last = run.evaluation(clock, place, parts, cap_seconds)
            if state_folder is not None:
                run.save_state(state_folder, place, parts)
            yield place.evaluation
            if not place.has_ended:
                clock.enter(Phase.TRAIN)
    parts.technique.finish(parts.evaluated_model)
    if weights_path is not None:
        run.save_weights(weights_path, parts, place.evaluation, origin)
    if score_test and run.data.test is not None:
        return run.evaluate(parts, run.data.test.to(device, **_form(config, run.precision)))[0]
    return None


def set_up(config: TrialConfig, device: torch.device, clock: PhaseClock, num_threads: int) -> tuple["Run", TrainingStep]:
    """All that comes before the first step of a training, each in its phase: what stays the same, and a step with fresh parts.

    What was compiled or captured is kept for the next training of the process, which takes it where only seed or target differ;
    its build phase then has the seconds that building took, since that is what a process pays once.
    """
    global _built  # noqa: PLW0603  # what one process has built is the point
    clock.enter(Phase.BUILD)
    key = json.dumps([{**config.as_dict(), "seed": None, "target": None}, str(device), num_threads], sort_keys=True, default=str)
    if _built is None or _built.key != key:
        _built = None  # its memory must go before more is taken
        reset_device(device)
        apply_runtime(config, device, num_threads)
        run = Run.start(config, load_data(config), device)
        step = run.warmed_up()
    else:
        run, step = replace(_built.run, config=config), _built.step
        clock.add(Phase.BUILD, _built.seconds)

    clock.enter(Phase.PREPARE)
    seed_everything(config.seed)
    if not step.is_bound:
        return run, run.training_step()
    step.parts = make_components(config, run.data, device, run.total_steps, reuse=step.parts)
    if _built is None and isinstance(step.parts.technique, NoTechnique):  # others change the model for good
        _built = _Built(key=key, run=run, step=step, seconds=clock.seconds(Phase.BUILD))
    return run, step


def outcome_of(
    target: Target,
    metric: float,
    loss: float,
    train_seconds: float,
    prepare_seconds: float,
    cap_seconds: float,
    *,
    ended: bool,
    counts: bool = True,
) -> Outcome | None:
    """What an evaluation ends a training with, None where it goes on.

    ``loss`` is the mean validation loss: NaN counts as divergence, so give 0 where there is none. ``ended`` says that the
    schedule has no step left, ``counts`` that an evaluation at or past the target is one.
    """
    if not (math.isfinite(metric) and math.isfinite(loss)):
        return Outcome.DIVERGED
    if train_seconds > target.max_train_seconds:
        return Outcome.TIMED_OUT
    if counts and target.reached_by(metric):
        return Outcome.REACHED
    if prepare_seconds + train_seconds > cap_seconds:
        return Outcome.CAPPED
    return Outcome.MISSED if ended else None


def as_measured(metric: float) -> float:
    """A metric to the seven digits that float32 holds: 0.9 computed in float32 lies below 0.9 and would miss that target."""
    return float(f"{metric:.7g}")


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, all devices included."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(frozen=True, kw_only=True)
class _Built:
    """What is bound to one model, for the next training of the same configuration."""

    key: str
    run: "Run"
    step: TrainingStep
    seconds: float
    """That building took."""


_built: _Built | None = None


@dataclass(kw_only=True)
class _Place:
    """How far a training has come."""

    step: int = 0
    last: Evaluation | None = None

    @property
    def evaluation(self) -> Evaluation:
        """The last one."""
        assert self.last is not None, "not yet evaluated"
        return self.last

    @property
    def has_ended(self) -> bool:
        """Whether the last evaluation ended the training."""
        return self.last is not None and self.last.outcome is not None

    @property
    def evaluated_samples(self) -> int:
        return self.last.samples if self.last else 0

    def is_due(self, samples: int, every: int) -> bool:
        """Whether an evaluation every so many samples is due: at the first step at or past each multiple."""
        return samples // every > self.evaluated_samples // every


@dataclass(frozen=True, eq=False)
class Run:
    """What stays the same through one training: data where it is trained on, sizes, precision."""

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

    @classmethod
    def start(cls, config: TrialConfig, data: LoadedData, device: torch.device) -> "Run":
        """A training's data and sizes, with the data where it is trained on."""
        on_device = config.data_path["on_device"]
        resident = fits_on(device, data) if on_device is None else on_device
        precision = Precision(config.precision, device)
        precision.apply()
        form = _form(config, precision)
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
        parts = make_components(self.config, self.data, self.device, self.total_steps)
        return TrainingStep(self.config, parts, self.precision, self.steps_per_epoch, self.total_steps)

    def warmed_up(self) -> TrainingStep:
        """A step that has trained on one batch of every shape to come, and evaluated one: lazy set-up, compiling and capturing are over.

        Its parts are not fit for training: they have been trained.
        """
        seed_everything(self.config.seed)
        step = self.training_step()
        samples = torch.arange(self.batch_size)
        batch = self._on_device(Batch(self.train.inputs[: self.batch_size], self.train.targets[: self.batch_size], samples))
        shapes: dict[torch.Size, int] = {}
        for tenth in range(_NUM_WARM_UP_PLACES):
            place = tenth * self.total_steps // _NUM_WARM_UP_PLACES
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
        if self.is_resident:
            gathered = resident_batches(self.train, order)
        else:
            path = config.data_path
            gathered = host_batches(
                self.train, order, num_workers=path["num_workers"], prefetch_batches=path["prefetch_batches"], device=self.device
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
        if self.config.runtime["channels_last"] and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    @torch.inference_mode()
    def evaluate(self, parts: Components, split: Split) -> tuple[float, float]:
        """Metric and loss, each the mean over a split."""
        model = parts.evaluated_model
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        size = _EVALUATION_BATCH[self.device.type]
        with _evaluating(model, parts.optimizer):
            for start in range(0, len(split), size):
                inputs, targets = self._as_taken(split.inputs[start : start + size]), split.targets[start : start + size]
                with self.precision.autocast():
                    outputs = self.precision.outputs(parts.views(model, inputs))
                    scores = torch.stack([parts.metric(outputs, targets).double(), parts.loss(outputs, targets).double()])
                sums += scores * len(inputs)
        metric, loss = (sums / len(split)).tolist()
        return as_measured(metric), loss

    def evaluation(self, clock: PhaseClock, place: _Place, parts: Components, cap_seconds: float) -> Evaluation:
        """Score the validation split, and say where the training stands."""
        clock.enter(Phase.EVALUATE)
        metric, loss = self.evaluate(parts, self.validation)
        clock.enter(None)
        samples, train_seconds = place.step * self.batch_size, clock.seconds(Phase.TRAIN)
        since_seconds = place.last.train_seconds if place.last else 0.0
        return Evaluation(
            step=place.step,
            epoch=samples / len(self.data.train),
            samples=samples,
            build_seconds=clock.seconds(Phase.BUILD),
            prepare_seconds=clock.seconds(Phase.PREPARE),
            train_seconds=train_seconds,
            evaluate_seconds=clock.seconds(Phase.EVALUATE),
            metric=metric,
            loss=loss,
            samples_per_second=(samples - place.evaluated_samples) / max(train_seconds - since_seconds, 1e-9),
            peak_memory_bytes=peak_memory_bytes(self.device),
            energy_joules=None,
            outcome=outcome_of(
                self.config.target,
                metric,
                loss,
                train_seconds,
                clock.seconds(Phase.PREPARE),
                cap_seconds,
                ended=place.step >= self.total_steps,
                counts=parts.technique.counts(place.step, self.total_steps),
            ),
        )

    def save_state(self, folder: Path, place: _Place, parts: Components) -> None:
        """Keep all that the training needs to go on from here."""
        state = {name: part.state_dict() for name, part in _with_state(parts).items()}
        save_state(
            folder,
            {
                "config": self.config.as_dict(),
                "step": place.step,
                "evaluation": place.evaluation.as_dict(),
                "random": random_state(self.device),
                "parts": state,
            },
        )

    def resume(self, folder: Path, parts: Components, clock: PhaseClock) -> _Place:
        """Go on from a kept state: give the parts theirs, and the clock the seconds that were spent.

        Raises:
            DataError: the state is damaged, or of another configuration.
        """
        state = read_state(folder)
        if state["config"] != self.config.as_dict():
            different = ", ".join(key for key, value in self.config.as_dict().items() if state["config"].get(key) != value)
            raise DataError(
                f"checkpoint.folder: {folder} holds a training with another {different}; accepted is an empty folder, or its own"
            )
        for name, part in _with_state(parts).items():
            part.load_state_dict(state["parts"][name])
        set_random_state(state["random"], self.device)
        evaluation = Evaluation.from_dict(state["evaluation"])
        for phase, seconds in (
            (Phase.BUILD, evaluation.build_seconds),
            (Phase.PREPARE, evaluation.prepare_seconds),
            (Phase.TRAIN, evaluation.train_seconds),
            (Phase.EVALUATE, evaluation.evaluate_seconds),
        ):
            clock.add(phase, seconds)
        return _Place(step=state["step"], last=evaluation)

    def save_weights(self, path: Path, parts: Components, evaluation: Evaluation, origin: Mapping[str, Any]) -> None:
        """Write the weights that were scored, and what makes their model again."""
        metadata = weights_metadata(
            self.config,
            input_shape=self.data.input_shape,
            num_classes=self.data.num_classes,
            evaluation=evaluation,
            versions=versions(),
            origin=origin,
        )
        save_weights(path, parts.evaluated_model.state_dict(), metadata)


def _form(config: TrialConfig, precision: Precision) -> dict[str, Any]:
    """How a split lies on the device."""
    return {"channels_last": config.runtime["channels_last"], "dtype": precision.weights_dtype}


def num_steps(config: TrialConfig, data: LoadedData) -> int:
    """Steps of a configuration's schedule."""
    return max(1, round(config.epochs * (len(data.train) // min(config.batch_size, len(data.train)))))


def _with_state(parts: Components) -> dict[str, Any]:
    """The parts that a training changes, by name."""
    named = {name: getattr(parts, name) for name in ("model", "optimizer", "schedule", "average", "technique", "scaler")}
    return {name: part for name, part in named.items() if hasattr(part, "state_dict")}


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
