"""Training as a generator that yields evaluations and knows nothing of tuning.

While the generator is suspended its clock stands still, so what a caller does with an evaluation costs the trial nothing.
Between two evaluations nothing is read back from the device.
"""

import contextlib
import math
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation, Outcome, Phase, PhaseClock, Target
from autotune.training.components import Components, make_components
from autotune.training.data import LoadedData, Split, fits_on, load_data
from autotune.training.device import peak_memory_bytes, pick_device, reset_device, synchronizer

_EVALUATION_BATCH = {"cpu": 256, "cuda": 2048}
"""Samples evaluated at once: on the CPU what a cache holds, on a GPU what keeps it busy."""


def train(
    config: TrialConfig, *, cap_seconds: float = math.inf, num_threads: int = 1, score_test: bool = False
) -> Generator[Evaluation, None, float | None]:
    """Train one configuration until it reaches its target or its time or schedule ends.

    Evaluations come at a fixed number of samples, the same for all batch sizes, and at the end. The first one at or past the
    target ends the training; its time, never an interpolation, is the time to target.

    Args:
        config: what to train.
        cap_seconds: warm seconds (prepare + train) after which the trial cannot win any more: it ends CAPPED.
        num_threads: CPU threads, where the configuration does not say a number.
        score_test: score the held-out test split at the end.

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
    clock.enter(Phase.BUILD)
    torch.set_num_threads(config.runtime["num_threads"] or num_threads)
    reset_device(device)
    data = load_data(config)
    run = _Run.start(config, data, device)
    run.warm_up()

    clock.enter(Phase.PREPARE)
    seed_everything(config.seed)
    parts = make_components(config, data, device, run.total_steps)
    shuffle = torch.Generator().manual_seed(config.seed)

    clock.enter(Phase.TRAIN)
    step, next_evaluation, evaluated_samples, evaluated_seconds = 0, run.evaluate_every_samples, 0, 0.0
    for inputs, targets in run.batches(shuffle):
        run.step(parts, inputs, targets)
        step += 1
        samples = step * run.batch_size
        train_seconds = clock.seconds(Phase.TRAIN)
        out_of_time = train_seconds > config.target.max_train_seconds or train_seconds + clock.seconds(Phase.PREPARE) > cap_seconds
        if samples < next_evaluation and step < run.total_steps and not out_of_time:
            continue
        clock.enter(Phase.EVALUATE)
        metric, loss = run.evaluate(parts, run.validation)
        clock.enter(None)
        while next_evaluation <= samples:
            next_evaluation += run.evaluate_every_samples
        train_seconds = clock.seconds(Phase.TRAIN)
        outcome = outcome_of(
            config.target, metric, loss, train_seconds, clock.seconds(Phase.PREPARE), cap_seconds, ended=step >= run.total_steps
        )
        yield Evaluation(
            step=step,
            epoch=samples / len(data.train),
            samples=samples,
            build_seconds=clock.seconds(Phase.BUILD),
            prepare_seconds=clock.seconds(Phase.PREPARE),
            train_seconds=train_seconds,
            evaluate_seconds=clock.seconds(Phase.EVALUATE),
            metric=metric,
            loss=loss,
            samples_per_second=(samples - evaluated_samples) / max(train_seconds - evaluated_seconds, 1e-9),
            peak_memory_bytes=peak_memory_bytes(device),
            energy_joules=None,
            outcome=outcome,
        )
        if outcome is not None:
            break
        evaluated_samples, evaluated_seconds = samples, train_seconds
        clock.enter(Phase.TRAIN)
    if score_test and data.test is not None:
        return run.evaluate(parts, data.test.to(device, channels_last=config.runtime["channels_last"]))[0]
    return None


def outcome_of(
    target: Target, metric: float, loss: float, train_seconds: float, prepare_seconds: float, cap_seconds: float, *, ended: bool
) -> Outcome | None:
    """What an evaluation ends a training with, None where it goes on.

    ``loss`` is the mean validation loss: NaN counts as divergence, so give 0 where there is none. ``ended`` says that the
    schedule has no step left.
    """
    if not (math.isfinite(metric) and math.isfinite(loss)):
        return Outcome.DIVERGED
    if train_seconds > target.max_train_seconds:
        return Outcome.TIMED_OUT
    if target.reached_by(metric):
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


@dataclass(frozen=True, eq=False)
class _Run:
    """What stays the same through one training: data where it is trained on, sizes, precision."""

    config: TrialConfig
    data: LoadedData
    device: torch.device
    train: Split
    validation: Split
    batch_size: int
    """Samples a step: the configured size, or the whole training split where that is smaller."""
    total_steps: int
    evaluate_every_samples: int

    @classmethod
    def start(cls, config: TrialConfig, data: LoadedData, device: torch.device) -> "_Run":
        on_device = config.runtime["data_on_device"]
        resident = fits_on(device, data) if on_device is None else on_device
        channels_last = config.runtime["channels_last"]
        batch_size = min(config.batch_size, len(data.train))
        return cls(
            config,
            data,
            device,
            data.train.to(device if resident else torch.device("cpu"), channels_last=channels_last),
            data.validation.to(device, channels_last=channels_last),
            batch_size,
            config.epochs * (len(data.train) // batch_size),
            config.evaluate_every_samples or len(data.train),
        )

    def warm_up(self) -> None:
        """Train and evaluate one batch with parts that are thrown away, so that lazy set-up does not count as training."""
        seed_everything(self.config.seed)
        parts = make_components(self.config, self.data, self.device, self.total_steps)
        inputs, targets = self.train.inputs[: self.batch_size], self.train.targets[: self.batch_size]
        self.step(parts, inputs.to(self.device), targets.to(self.device))
        size = _EVALUATION_BATCH[self.device.type]
        self.evaluate(parts, Split(self.validation.inputs[:size], self.validation.targets[:size]))

    def batches(self, shuffle: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of ``total_steps`` steps, each epoch in a new order; an epoch's incomplete last batch is left out.

        The order is drawn on the CPU, so that it is the same wherever the data lives.
        """
        inputs, targets, size = self.train.inputs, self.train.targets, self.batch_size
        moves = inputs.device != self.device
        for _ in range(self.config.epochs):
            order = torch.randperm(len(inputs), generator=shuffle).to(inputs.device)
            for start in range(0, len(inputs) - size + 1, size):
                chosen = order[start : start + size]
                if moves:
                    yield inputs[chosen].to(self.device), targets[chosen].to(self.device)
                else:
                    yield inputs[chosen], targets[chosen]

    def step(self, parts: Components, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One optimizer step."""
        with self._autocast():
            loss = parts.loss(parts.model(inputs), targets)
        parts.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # missing in torch's stubs
        parts.optimizer.step()
        if parts.schedule is not None:
            parts.schedule.step()

    @torch.inference_mode()
    def evaluate(self, parts: Components, split: Split) -> tuple[float, float]:
        """Metric and loss, each the mean over a split."""
        parts.model.eval()
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        size = _EVALUATION_BATCH[self.device.type]
        for start in range(0, len(split), size):
            inputs, targets = split.inputs[start : start + size], split.targets[start : start + size]
            with self._autocast():
                outputs = parts.model(inputs)
                scores = torch.stack([parts.metric(outputs, targets).double(), parts.loss(outputs, targets).double()])
            sums += scores * len(inputs)
        parts.model.train()
        metric, loss = (sums / len(split)).tolist()
        return as_measured(metric), loss

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        dtype = self.config.precision["autocast_dtype"]
        return torch.autocast(self.device.type, getattr(torch, dtype)) if dtype else contextlib.nullcontext()
