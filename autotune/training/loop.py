"""Training as a generator that yields evaluations and knows nothing of tuning.

While the generator is suspended its clock stands still, so what a caller does with an evaluation costs the trial nothing.
Between two evaluations nothing is read back from the device.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation, Phase, PhaseClock
from autotune.remote.clock_pause import paused_while_waiting
from autotune.training.components import Components, make_strategy
from autotune.training.device import device_kind, peak_memory_bytes, pick_device, synchronizer
from autotune.training.energy import energy_meter, joules_of_all
from autotune.training.outcome import outcome_of
from autotune.training.parallel.ranks import ALONE, Ranks, TimeLimit
from autotune.training.progress import Progress, is_kept, keep, keep_weights, resume
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
    """Train one configuration until it reaches its target or its time or schedule ends.

    Evaluations come at a fixed number of samples, the same for all batch sizes, and at the end. The first one at or past the
    target ends the training; its time, never an interpolation, is the time to target.

    Where several ranks train together each runs this. Only the first yields: its clock and evaluations count for all, and all end
    when its caller does not ask for the next one.

    A caller that sends a folder instead of asking for the next evaluation has the state kept there, for ``paused_folder`` of another
    process, and is given the last evaluation once more.

    Args:
        config: what to train.
        cap_seconds: warm seconds (prepare + train) after which the trial cannot win any more: it ends CAPPED.
        num_threads: CPU threads, where the configuration does not say a number.
        score_test: score the held-out test split at the end.
        state_folder: where the state is kept at every evaluation; a state found there is gone on from, its seconds counted.
        paused_folder: of a state that was kept as above, to go on from as if there had been no pause: its clock goes on where it
            stood, and what making the training anew takes is not counted.
        weights_path: the file that the weights are written to at the end.
        origin: what that file is to say of where they come from.
        ranks: those that train together, as many as the configuration has workers.

    Yields:
        Evaluations; only the last one has an outcome.

    Returns:
        The metric on the test split, None where it was not asked for or there is none.

    Raises:
        ConfigError, DataError: a component or the data set cannot be made.
        Exception: whatever the trained code raises; memory errors are not caught here.
    """
    device = pick_device(config.device)
    make_strategy(config)  # what it imports is there before the clock starts, as torch is
    clock = PhaseClock(synchronizer(device), energy_meter(device))
    with paused_while_waiting(clock.stopped):
        run, step = set_up(config, device, clock, num_threads, ranks)
    parts, progress = step.parts, Progress()
    if paused_folder is not None:
        clock.enter(None)
        clock.reset()
        progress = resume(paused_folder, run, parts, clock)
    elif state_folder is not None and is_kept(state_folder):
        clock.enter(None)
        progress = resume(state_folder, run, parts, clock)
        if progress.has_ended:
            yield progress.evaluation

    limit = TimeLimit(ranks, clock, min(config.target.max_train_seconds, cap_seconds - clock.seconds(Phase.PREPARE)), progress.step)
    clock.enter(Phase.TRAIN)
    with closing(run.batches(progress.step)) as batches:
        while not progress.has_ended:
            step.on_next(batches, progress.step)
            progress.step += 1
            is_out_of_time = limit.is_past(progress.step)
            is_due = progress.is_due(progress.step * run.batch_size, run.evaluate_every_samples)
            if not is_due and progress.step < run.total_steps and not is_out_of_time:
                continue
            progress.last = ranks.broadcast_from_first(_evaluate(run, parts, progress, clock, cap_seconds))
            if state_folder is not None:
                keep(state_folder, run, parts, progress)
            if ranks.is_first:
                with ranks.leading():
                    while (kept_in := (yield progress.evaluation)) is not None:
                        keep(kept_in, run, parts, progress)
            elif not ranks.goes_on():
                return None
            if not progress.has_ended:
                clock.enter(Phase.TRAIN)
    _finish(parts)
    if weights_path is not None:
        keep_weights(weights_path, run, parts, progress.evaluation, origin)
    if score_test and run.data.test is not None:
        return run.evaluate(parts, run.data.test)[0]
    return None


def _finish(parts: Components) -> None:
    """Make the weights those that are scored and kept."""
    if (to_average := getattr(parts.optimizer, "eval", None)) is not None:
        to_average()  # a schedule-free optimizer trains with other weights than it scores
    parts.shared.synchronise(parts.evaluated_model)
    parts.technique.finish(parts.evaluated_model)


def _evaluate(run: Run, parts: Components, progress: Progress, clock: PhaseClock, cap_seconds: float) -> Evaluation:
    """Score the validation split, and say where the training stands."""
    clock.enter(Phase.EVALUATE)
    metric, loss = run.evaluate(parts, run.validation)
    clock.enter(None)
    own_joules = clock.joules(Phase.PREPARE, Phase.TRAIN), clock.joules(Phase.BUILD)
    energy_joules, build_joules = joules_of_all(own_joules, run.device, run.ranks)
    samples, train_seconds = progress.step * run.batch_size, clock.seconds(Phase.TRAIN)
    since_seconds = progress.last.train_seconds if progress.last else 0.0
    return Evaluation(
        step=progress.step,
        epoch=samples / len(run.data.train),
        samples=samples,
        build_seconds=clock.seconds(Phase.BUILD),
        prepare_seconds=clock.seconds(Phase.PREPARE),
        train_seconds=train_seconds,
        evaluate_seconds=clock.seconds(Phase.EVALUATE),
        metric=metric,
        loss=loss,
        samples_per_second=(samples - progress.evaluated_samples) / max(train_seconds - since_seconds, 1e-9),
        peak_memory_bytes=peak_memory_bytes(run.device),
        energy_joules=energy_joules,
        build_joules=build_joules,
        num_workers=run.ranks.size,
        device_kind=device_kind(run.device),
        outcome=outcome_of(
            run.config.target,
            metric,
            loss,
            train_seconds,
            clock.seconds(Phase.PREPARE),
            cap_seconds,
            ended=progress.step >= run.total_steps,
            counts=parts.technique.counts(parts.evaluated_model, progress.step, run.total_steps),
        ),
    )
