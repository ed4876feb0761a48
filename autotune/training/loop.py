"""The training loop: a generator that yields evaluations and knows nothing of tuning.

Its progress can be saved and resumed.

The clock is stopped while the generator is suspended, so what the caller does with an evaluation
costs the trial no time. Nothing is read back from the device between two evaluations.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from autotune.config.schema import TrialConfig, first_difference
from autotune.errors import DataError
from autotune.files import STATE_FILE
from autotune.measurement import Evaluation, Phase, PhaseClock, outcome_of
from autotune.redaction import without_secrets_in
from autotune.remote import paused_while_waiting
from autotune.training.checkpoint import (
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
from autotune.training.set_up import Run, set_up


def train(
    config: TrialConfig,
    *,
    cap_seconds: float = math.inf,
    num_threads: int = 1,
    score_test: bool = False,
    state_folder: Path | None = None,
    paused_folder: Path | None = None,
    weights_path: Path | None = None,
    origin: Mapping[str, Any] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> Generator[Evaluation, Path | None, float | None]:
    """Train one configuration until it reaches its target, or its time or schedule ends.

    Evaluations happen every fixed number of samples, the same for all batch sizes, and at the end.
    The first one at or past the target ends the training; its time, never interpolated, is the time
    to target. Only the last one has an outcome.

    Of several ranks that train together only the first one yields: its clock and evaluations count
    for all, and all end when its caller asks for no more.

    A caller that sends a folder pauses the training: its state is saved there for another process
    to resume by ``paused_folder``, and the last evaluation is yielded again.

    Args:
        config: configuration to train.
        cap_seconds: warm seconds (prepare + train) after which the trial ends CAPPED.
        num_threads: number of CPU threads, unless the configuration sets one.
        score_test: score the held-out test split at the end.
        state_folder: where the state is saved at every evaluation; one found there is resumed.
        paused_folder: folder of a paused training's state, to resume without counting the time to
            set the training up again.
        weights_path: file that the weights are written to at the end, with their ``origin``.
        ranks: the ranks that train together, as many as the configuration has workers.

    Returns:
        The metric on the test split; None if it was not requested or there is no test split.
    """
    make_strategy(config)  # its imports are done before the clock starts, like those of torch
    clock = PhaseClock()
    # before anything asks for a GPU: CUDA's start and context are paid once per process
    clock.enter(Phase.BUILD)
    device = pick_device(config.device)
    clock.attach(synchronizer(device), energy_meter(device))
    with paused_while_waiting(clock.stopped):
        run, step = set_up(config, device, clock, num_threads, ranks)
    parts = step.parts
    saved = saved_progress(paused_folder, state_folder, config, clock)
    last = None if saved is None else _restored(*saved, run, parts)
    if last is not None and last.outcome is not None:
        yield last

    num_steps = 0 if last is None else last.step
    seconds = min(config.target.max_train_seconds, cap_seconds - clock.seconds(Phase.PREPARE))
    limit = TimeLimit(ranks, clock, seconds)
    every = run.evaluate_every_samples
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
                continue
            own = _evaluate(run, parts, num_steps, last, clock, cap_seconds)
            last = ranks.broadcast_from_first(own)
            if state_folder is not None:
                _keep(state_folder, run, parts, last)
            if not (yield from _reported(run, parts, last)):
                return None
            if last.outcome is None:
                clock.enter(Phase.TRAIN)
    _finish(parts)
    if weights_path is not None:
        _keep_weights(weights_path, run, parts, last, origin)
    test = run.data.test if score_test else None
    return None if test is None else run.evaluate(parts, test)[0]


def _reported(
    run: Run, parts: Components, evaluation: Evaluation
) -> Generator[Evaluation, Path | None, bool]:
    """Yield the evaluation on the first rank, and save the state where its caller asks.

    Return whether the training continues.
    """
    if not run.ranks.is_first:
        return run.ranks.goes_on()
    with run.ranks.leading():
        while (pause_folder := (yield evaluation)) is not None:
            _keep(pause_folder, run, parts, evaluation)
    return True


def _finish(parts: Components) -> None:
    """Bring the model to the weights that are scored and saved."""
    if (to_average := getattr(parts.optimizer, "eval", None)) is not None:
        to_average()  # a schedule-free optimizer trains with other weights than it scores
    parts.shared.synchronise(parts.evaluated_model)
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
    times = measured_times(clock, run.device)
    samples, train_seconds = num_steps * run.batch_size, times["train_seconds"]
    before, began = (previous.samples, previous.train_seconds) if previous else (0, 0.0)
    return Evaluation(
        **times,
        step=num_steps,
        epoch=samples / len(run.data.train),
        samples=samples,
        metric=metric,
        loss=loss,
        samples_per_second=(samples - before) / max(train_seconds - began, 1e-9),
        energy_joules=energy_joules,
        build_joules=build_joules,
        num_workers=run.ranks.size,
        reused_build_seconds=clock.reused_build_seconds,
        outcome=outcome_of(
            run.config.target,
            metric,
            loss,
            train_seconds,
            times["prepare_seconds"],
            cap_seconds,
            ended=num_steps >= run.total_steps,
            counts=parts.technique.counts(parts.evaluated_model, num_steps, run.total_steps)
            and not run.config.target.violations({"loss": loss}),
        ),
    )


def measured_times(clock: PhaseClock, device: torch.device) -> dict[str, Any]:
    """What every evaluation has of a clock and a device, by field of ``Evaluation``."""
    return {
        **{f"{phase}_seconds": clock.seconds(phase) for phase in Phase},
        "peak_memory_bytes": peak_memory_bytes(device),
        "device_kind": device_kind(device),
    }


def _keep(folder: Path, run: Run, parts: Components, evaluation: Evaluation) -> None:
    """Save the state that the training needs to be resumed, in place of the folder's earlier
    state.
    """
    save_state(
        folder,
        {
            "config": without_secrets_in(run.config.as_dict()),
            "evaluation": evaluation.as_dict(),
            "random": random_state(run.device),
            "parts": {name: part.state_dict() for name, part in _parts_with_state(parts).items()},
        },
    )


def _restored(
    folder: Path, state: Mapping[str, Any], evaluation: Evaluation, run: Run, parts: Components
) -> Evaluation:
    """Restore the parts' state that was saved in a folder, and return its evaluation.

    Raises:
        StateError: the state is damaged.
    """
    with told_damage(folder):
        for name, part in _parts_with_state(parts).items():
            part.load_state_dict(state["parts"][name])
        set_random_state(state["random"], run.device)
    return evaluation


def saved_progress(
    paused_folder: Path | None, state_folder: Path | None, config: TrialConfig, clock: PhaseClock
) -> tuple[Path, dict[str, Any], Evaluation] | None:
    """The folder, state and last evaluation that a training continues from; None if it begins.

    The clock is stopped and gets the seconds and joules spent so far. Those that setting up a
    paused training again took are not counted.

    Raises:
        DataError: the state is damaged or belongs to another configuration.
    """
    folder = paused_folder or state_folder
    if folder is None or (paused_folder is None and not (folder / STATE_FILE).is_file()):
        return None
    clock.enter(None)
    if paused_folder is not None:
        clock.reset()
    state, wanted = read_state(folder), without_secrets_in(config.as_dict())
    with told_damage(folder):
        saved = {key: value for key, value in state["config"].items() if key in wanted}
        if (difference := first_difference(saved, wanted)) is not None:
            raise DataError(
                f"checkpoint.folder: {folder} holds another training ({difference}); use an empty"
                " folder, or its own"
            )
        evaluation = Evaluation.from_dict(state["evaluation"])
        spent = (
            (Phase.BUILD, evaluation.build_seconds, evaluation.build_joules),
            (Phase.PREPARE, evaluation.prepare_seconds, 0.0),
            # includes the joules of prepare
            (Phase.TRAIN, evaluation.train_seconds, evaluation.energy_joules),
            (Phase.EVALUATE, evaluation.evaluate_seconds, 0.0),
        )
        if not all(math.isfinite(seconds) for _, seconds, _ in spent):
            raise ValueError(f"found {spent} as seconds and joules")
    for phase, seconds, joules in spent:
        clock.add(phase, seconds, joules)
    clock.reused_build_seconds += evaluation.reused_build_seconds
    return folder, state, evaluation


def _keep_weights(
    path: Path, run: Run, parts: Components, evaluation: Evaluation, origin: Mapping[str, Any]
) -> None:
    """Write the scored weights, and the metadata to make their model again.

    Every rank must call this, the first rank writes.
    """
    weights = parts.shared.state_dict(parts.evaluated_model)
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


def _parts_with_state(parts: Components) -> dict[str, Any]:
    """The components whose state training changes, by name."""
    named = {
        name: getattr(parts, name)
        for name in ("model", "optimizer", "schedule", "average", "technique", "scaler")
    }
    return {name: part for name, part in named.items() if hasattr(part, "state_dict")}
