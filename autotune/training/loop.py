"""The training loop: a generator that yields evaluations and knows nothing of tuning.

Its progress can be saved and resumed.

The clock is stopped while the generator is suspended, so what the caller does with an evaluation
costs the trial no time. Nothing is read back from the device between two evaluations.
"""

import logging
import math
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from autotune.config.schema import TrialConfig
from autotune.errors import DataError, FileError
from autotune.files import make_folder
from autotune.measurement import Evaluation, LearningCurve, Phase, PhaseClock, outcome_of
from autotune.remote import paused_while_waiting
from autotune.training.checkpoint import (
    load_part,
    num_bytes,
    random_state,
    read_state,
    save_state,
    save_weights,
    set_random_state,
    told_damage,
    weights_metadata,
)
from autotune.training.components import Components, make_strategy
from autotune.training.device import device_kind, peak_memory_bytes, pick_device, synchronizer
from autotune.training.energy import energy_meter, joules_of_all
from autotune.training.parallel.ranks import ALONE, Ranks, TimeLimit
from autotune.training.parallel.sharded import (
    load_sharded,
    save_sharded,
    sharded_names,
    whole_state,
)
from autotune.training.set_up import Run, set_up
from autotune.training.states import TrainingStates

_log = logging.getLogger(__name__)


def train(
    config: TrialConfig,
    *,
    cap_seconds: float = math.inf,
    num_threads: int = 1,
    score_test: bool = False,
    states: TrainingStates | None = None,
    weights_path: Path | None = None,
    origin: Mapping[str, Any] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> Generator[Evaluation | None, bool | None, float | None]:
    """Train one configuration until it reaches its target, or its time or schedule ends.

    Evaluations happen every fixed number of samples, the same for all batch sizes, and at the end.
    The first one at or past the target ends the training; its time, never interpolated, is the time
    to target. Only the last one has an outcome.

    Of several ranks that train together only the first one yields: its clock and evaluations count
    for all, and all end when its caller asks for no more.

    A caller that sends True has the training saved for another process to continue, and the last
    evaluation is yielded again. None is yielded where the training was saved between two
    evaluations, because of a notice.

    Args:
        config: configuration to train.
        cap_seconds: warm seconds (prepare + train) after which the trial ends CAPPED.
        num_threads: number of CPU threads, unless the configuration sets one.
        score_test: score the held-out test split at the end.
        states: where the training is saved; it continues from the newest state there.
        weights_path: file that the weights are written to at the end, with their ``origin``.
        ranks: the ranks that train together, as many as the configuration has workers.

    Returns:
        The metric on the test split; None if it was not requested or there is no test split.
    """
    # its imports are done before the clock starts, like those of torch
    divides_model = make_strategy(config).divides_model
    clock, states = PhaseClock(), states or TrainingStates()
    # before anything asks for a GPU: CUDA's start and context are paid once per process
    clock.enter(Phase.BUILD)
    device = pick_device(config.device)
    clock.attach(synchronizer(device), energy_meter(device))
    with paused_while_waiting(partial(clock.within, None)):
        run, step = set_up(config, device, clock, num_threads, ranks)
    parts = step.parts
    saver = _Saver(states, run, parts, clock, divides_model=divides_model)
    num_steps = saver.restored_step()
    last = states.curve.last
    if last is not None and last.outcome is not None:
        yield last

    seconds = min(config.target.max_train_seconds, cap_seconds - clock.seconds(Phase.PREPARE))
    limit = TimeLimit(ranks, clock, seconds, lambda: states.has_notice)
    every = run.evaluate_every_samples
    is_saved_on_notice = False
    clock.enter(Phase.TRAIN)
    with closing(run.batches(num_steps)) as batches:
        while last is None or last.outcome is None:
            step.on_next(batches, num_steps)
            num_steps += 1
            is_out_of_time = limit.is_past(num_steps)
            # at the first step at or past each multiple of ``every`` samples
            evaluated = 0 if last is None else last.samples
            is_due = num_steps * run.batch_size // every > evaluated // every
            if not is_due and num_steps < run.total_steps and not is_out_of_time:
                if limit.has_notice and not is_saved_on_notice:
                    is_saved_on_notice = True
                    clock.enter(None)
                    saver.save(num_steps)
                    if not (yield from _reported(saver, num_steps, None)):
                        return None
                    clock.enter(Phase.TRAIN)
                continue
            own = _evaluate(run, parts, num_steps, last, clock, cap_seconds)
            last = ranks.broadcast_from_first(own)
            states.evaluated(last)
            if ranks.broadcast_from_first(states.is_due(saver.num_bytes)):
                saver.save(num_steps)
            if not (yield from _reported(saver, num_steps, last)):
                return None
            if last.outcome is None:
                clock.enter(Phase.TRAIN)
    _finish(run, parts)
    if weights_path is not None:
        _keep_weights(weights_path, run, parts, last, origin)
    test = run.data.test if score_test else None
    return None if test is None else run.evaluate(parts, test)[0]


def _reported(
    saver: "_Saver", num_steps: int, evaluation: Evaluation | None
) -> Generator[Evaluation | None, bool | None, bool]:
    """Yield the evaluation on the first rank, and save the training where its caller asks.

    Return whether the training continues.
    """
    ranks = saver.run.ranks
    if not ranks.is_first:
        while (asked := ranks.broadcast_from_first(None)) == _SAVE:
            saver.save(num_steps)
        return bool(asked)
    with ranks.leading():
        while (yield evaluation):
            ranks.broadcast_from_first(_SAVE)
            saver.save(num_steps)
    return True


def _finish(run: Run, parts: Components) -> None:
    """Bring the model to the weights that are scored and saved."""
    if (to_average := getattr(parts.optimizer, "eval", None)) is not None:
        to_average()  # a schedule-free optimizer trains with other weights than it scores
    run.ranks.share_buffers(parts.evaluated_model)
    parts.technique.finish(parts.evaluated_model)


def _evaluate(
    run: Run,
    parts: Components,
    num_steps: int,
    previous: Evaluation | None,
    clock: PhaseClock,
    cap_seconds: float,
) -> Evaluation:
    """Score the validation split and make the evaluation, with clock, energy and outcome."""
    clock.enter(Phase.EVALUATE)
    metric, loss = run.evaluate(parts, run.validation)
    clock.enter(None)
    own_joules = clock.joules(Phase.PREPARE, Phase.TRAIN), clock.joules(Phase.BUILD)
    energy_joules, build_joules = joules_of_all(own_joules, run.device, run.ranks)
    samples = num_steps * run.batch_size
    counts = parts.technique.counts(parts.evaluated_model, num_steps, run.total_steps)
    return evaluation_of(
        run.config,
        clock,
        run.device,
        previous,
        cap_seconds,
        step=num_steps,
        epoch=samples / len(run.data.train),
        samples=samples,
        metric=metric,
        loss=loss,
        energy_joules=energy_joules,
        build_joules=build_joules,
        ended=num_steps >= run.total_steps,
        counts=counts and not run.config.target.violations({"loss": loss}),
    )


def evaluation_of(
    config: TrialConfig,
    clock: PhaseClock,
    device: torch.device,
    previous: Evaluation | None,
    cap_seconds: float,
    *,
    samples: int | None,
    metric: float,
    loss: float | None,
    ended: bool,
    counts: bool,
    **measured: Any,
) -> Evaluation:
    """An evaluation with what a clock and a device say of it, and its outcome, see ``outcome_of``.

    Args:
        samples: training samples seen so far; None if that is not known.
        loss: mean validation loss; None if it was not computed.
        measured: further fields of the evaluation.
    """
    seconds: dict[str, Any] = {f"{phase}_seconds": clock.seconds(phase) for phase in Phase}
    train_seconds, speed = seconds["train_seconds"], math.nan
    if samples is not None:
        before, began = (previous.samples, previous.train_seconds) if previous else (0, 0.0)
        speed = (samples - before) / max(train_seconds - began, 1e-9)
    return Evaluation(
        **seconds,
        **measured,
        samples=samples or 0,
        metric=metric,
        loss=math.nan if loss is None else loss,
        samples_per_second=speed,
        peak_memory_bytes=peak_memory_bytes(device),
        device_kind=device_kind(device),
        num_workers=config.num_workers,
        reused_build_seconds=clock.reused_build_seconds,
        outcome=outcome_of(
            config.target,
            metric,
            loss or 0.0,
            train_seconds,
            seconds["prepare_seconds"],
            cap_seconds,
            ended=ended,
            counts=counts,
        ),
    )


def _keep_weights(
    path: Path, run: Run, parts: Components, evaluation: Evaluation, origin: Mapping[str, Any]
) -> None:
    """Write the scored weights, and the metadata to make their model again.

    Every rank must call this, the first rank writes.
    """
    weights = whole_state(parts.evaluated_model)
    if not run.ranks.is_first:
        return
    example = run.data.example
    metadata = weights_metadata(
        run.config,
        input_shape=tuple(example.shape),
        input_dtype=example.dtype,
        num_classes=run.data.num_classes,
        evaluation=evaluation,
        origin=origin,
    )
    save_weights(path, weights, metadata)


class _Saver:
    """Saves a training, and restores it: the first rank writes what all have in common, and each
    of the others, if it holds a part of the model only, its own.
    """

    def __init__(
        self,
        states: TrainingStates,
        run: Run,
        parts: Components,
        clock: PhaseClock,
        *,
        divides_model: bool,
    ) -> None:
        self.run, self._states, self._clock = run, states, clock
        self._divides_model = divides_model
        named = {name: getattr(parts, name) for name in _WITH_STATE}
        stateful = {name: part for name, part in named.items() if hasattr(part, "state_dict")}
        self._sharded = {name: stateful.pop(name) for name in sharded_names(stateful)}
        """Parts whose tensors are divided among the ranks."""
        self._own = stateful
        """Parts whose state this rank writes alone."""

    def save(self, num_steps: int) -> None:
        """Save the training after a number of steps, on all ranks; one that cannot be saved
        continues.
        """
        write = partial(self._write, num_steps)
        try:
            if self.run.ranks.is_first:
                self._states.save(write)
            else:
                write()
        except DataError as error:
            self._states.fault = str(error)
            _log.warning("%s; the training continues", error)
        self._states.is_saved = True

    def _write(self, num_steps: int, first_folder: Path | None = None) -> None:
        """Write this rank's part of a state into the first rank's folder.

        Raises:
            DataError: a rank could not.
        """
        ranks = self.run.ranks
        if first_folder is not None:  # for which the others look once they are told
            with suppress(FileError):  # raised again below
                make_folder(first_folder)
        folder, fault = Path(ranks.broadcast_from_first(str(first_folder))), ""
        try:
            if ranks.is_first:
                make_folder(folder)
            elif not folder.is_dir():
                raise DataError(f"{folder}: is not on the machine of rank {ranks.rank}")
            if self._sharded:
                save_sharded(folder / "sharded", self._sharded)
            if not ranks.is_first:
                save_state(folder / f"rank-{ranks.rank}", self._part())
        except DataError as error:
            fault = str(error)
        if ranks.summed(torch.tensor([bool(fault)]).int()).item():
            raise DataError(fault or f"{folder}: another rank cannot write its part")
        if ranks.is_first:
            content = {**self._states.contents(self.run.config, self._clock), "step": num_steps}
            save_state(folder, content | self._part())

    def _part(self) -> dict[str, Any]:
        is_written = self.run.ranks.is_first or self._divides_model
        own = self._own if is_written else {}
        return {
            "random": random_state(self.run.device),
            "parts": {name: part.state_dict() for name, part in own.items()},
        }

    def num_bytes(self) -> int:
        """Size of the training's state, about."""
        return num_bytes([part.state_dict() for part in {**self._own, **self._sharded}.values()])

    def restored_step(self) -> int:
        """Restore the training from its newest state; the number of steps that it has done, 0 if
        there is no state, or not on the machines of all ranks.

        Raises:
            DataError: the state belongs to another configuration.
            StateError: a rank's part of the state is damaged.
        """
        ranks, found = self.run.ranks, None
        if ranks.is_first:
            found = self._states.restore(self.run.config, self._clock)
        told: tuple[str, LearningCurve, int] | None = ranks.broadcast_from_first(
            found and (str(found[0]), self._states.curve, found[1]["step"])
        )
        if told is None:
            return 0
        folder, self._states.curve, num_steps = Path(told[0]), told[1], told[2]
        if ranks.summed(torch.tensor([not folder.is_dir()]).int()).item():
            self._states.curve = LearningCurve()
            self._clock.reset()
            return 0
        state = found[1] if found else read_state(folder / f"rank-{ranks.rank}")
        with told_damage(folder):
            if self._sharded:
                load_sharded(folder / "sharded", self._sharded)
            replicated = {} if found or self._divides_model else read_state(folder)["parts"]
            for name, part in self._own.items():
                load_part(part, (replicated or state["parts"])[name], self.run.device)
            set_random_state(state["random"], self.run.device)
        return num_steps


_SAVE = "save"
"""What the first rank tells the others where its caller asks for the training to be saved."""
_WITH_STATE = ("model", "optimizer", "schedule", "average", "technique", "scaler")
"""The components whose state training changes."""
