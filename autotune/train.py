"""Train one configuration, without Ray and without MLflow: ``autotune train experiment=NAME``.

Prints every evaluation, and at the end the outcome, the times of the phases and the time to target. Exit code 0: the target was reached;
3: it was not reached; 2: bad input.
"""

import logging
import math
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autotune.config.command_line import EXIT_NOT_REACHED, composer_of, parse_command_line, print_config, run_main
from autotune.config.experiments import names_experiment, require_experiment
from autotune.config.schema import Config, TrialConfig
from autotune.errors import ConfigError
from autotune.hiding import LogFormatter
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import Objective, check_measured
from autotune.outcome import Outcome
from autotune.training.state_files import STATE_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from autotune.remote.mirror import Mirror  # after --help


def train_command(arguments: Sequence[str]) -> int:
    """Run ``autotune train`` with command-line arguments and return its exit code."""
    line = parse_command_line("autotune train", "Train one configuration to its target.", _EPILOG, arguments)
    require_experiment(names_experiment(line.overrides), line.config_dirs)
    composer = composer_of(line, line.overrides)
    composer.refuse_sweeps()
    if print_config(line, composer):
        return 0
    composed = composer.compose()
    config = composed.trial

    from autotune.config.build import build  # noqa: PLC0415  # after --cfg
    from autotune.training.capabilities import cpus_per_worker, describe_device  # noqa: PLC0415  # after --cfg
    from autotune.training.device import local_capabilities  # noqa: PLC0415  # imports torch
    from autotune.training.parallel.rendezvous import spawned  # noqa: PLC0415  # imports torch
    from autotune.training.run import check_training, start_training  # noqa: PLC0415  # torch takes more than a second to import
    from autotune.training.sources import train_missing_sources  # noqa: PLC0415  # after --cfg

    _print_log()
    capabilities = local_capabilities()
    settings: dict[str, Any] = {"num_threads": cpus_per_worker(config, composed.config.cluster, capabilities), "score_test": True}
    with _checkpoint(composed.config, config) as mirror:
        train_missing_sources(composer, lambda line: print(line, flush=True))
        check_training(config)
        objective = build(composed.config.objective, config.allowed_targets, "objective")
        check_measured(objective, [capabilities.device_of(config)])
        print(f"device: {describe_device(config, capabilities)}", flush=True)
        if mirror is not None:
            settings |= _checkpoint_settings(mirror, arguments)
        with spawned(config, **settings) as ranks:
            training = start_training(config, ranks=ranks, **settings)
            last, outcome, test_metric = _follow(training, config.target.metric, mirror)
    result = TrialResult(
        trial=0,
        values={},
        overrides=(),
        seed=config.seed,
        outcome=outcome,
        evaluations=(last,) if last else (),
        started_at=0.0,
        stopped_at=0.0,
        fingerprint={},
    )
    print(f"outcome {outcome}: {config.target}")
    if last is not None:
        reused = f" ({last.reused_build_seconds:.3f} s of it spent earlier, to compile)" if last.reused_build_seconds else ""
        print(
            f"phases: build {last.build_seconds:.3f} s{reused}, prepare {last.prepare_seconds:.3f} s, "
            f"train {last.train_seconds:.3f} s, evaluate {last.evaluate_seconds:.3f} s"
        )
    if mirror is not None:
        print(f"weights: {mirror.shown(settings['weights_path'].name)}")
    if test_metric is not None:
        print(f"test {config.target.metric} {test_metric:.4f}")
    if result.time_to_target_seconds is None or last is None:
        return EXIT_NOT_REACHED
    print(
        f"time to target: warm {last.warm_seconds:.3f} s, cold {last.build_seconds + last.warm_seconds:.3f} s, "
        f"objective {_described_score(objective, result)}"
    )
    return 0


def _described_score(objective: Objective, result: TrialResult) -> str:
    """A result's score as text with its unit, except for seconds, which need none here."""
    score, unit = f"{objective.score(result):.3f}", getattr(objective, "unit", "")
    return score if unit in ("", "s") else f"{objective.score(result):.4g} {unit}"


@contextmanager
def _checkpoint(config: Config, trial: TrialConfig) -> "Iterator[Mirror | None]":
    """Open the folder of ``checkpoint.folder``, where the training's state and weights are kept; None if it is not set.

    Raises:
        ConfigError: the training is of a kind that keeps no checkpoint here.
        DataError: nothing can be written at the folder's URL.
    """
    if config.checkpoint.folder is None:
        yield None
        return
    if trial.training is not None:
        raise ConfigError("checkpoint.folder: a training function of one's own keeps its own state; accepted beside it is null")
    if trial.num_workers > 1:
        raise ConfigError(f"checkpoint.folder: accepted with parallelism.num_workers={trial.num_workers} is null")
    from autotune.remote.mirror import mirrored  # noqa: PLC0415  # after --help

    with mirrored(config.checkpoint.folder, "checkpoint.folder") as mirror:
        yield mirror


def _checkpoint_settings(mirror: "Mirror", arguments: Sequence[str]) -> dict[str, Any]:
    """Settings of a training that keeps checkpoints; also fetches the state of an earlier, unfinished run, if there is one."""
    mirror.bring(STATE_FILE)
    return {"state_folder": mirror.folder, "weights_path": mirror.folder / WEIGHTS_FILE, "origin": {"command": list(arguments)}}


def _follow(
    training: Generator[Evaluation, None, float | None], metric: str, mirror: "Mirror | None"
) -> tuple[Evaluation | None, Outcome, float | None]:
    """Print every evaluation and send checkpoints to their URL; return last evaluation, outcome and metric on the test split."""
    from autotune.training.device import is_out_of_memory  # noqa: PLC0415  # imports torch

    last, outcome = None, Outcome.MISSED
    try:
        while True:
            last = next(training)
            print(_describe(last, metric), flush=True)
            outcome = last.outcome or outcome
            if mirror is not None:
                mirror.send(STATE_FILE)
    except StopIteration as ended:
        if mirror is not None:
            mirror.send(WEIGHTS_FILE)
        return last, outcome, ended.value
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(" ".join(str(error).split()) or type(error).__name__)
        return last, Outcome.OUT_OF_MEMORY, None


_EPILOG = "An exported experiment runs by name: autotune train experiment=NAME --config-dir DIR"


def _describe(evaluation: Evaluation, metric: str) -> str:
    speed = "" if math.isnan(evaluation.samples_per_second) else f"  {evaluation.samples_per_second:,.0f} samples/s"
    return (
        f"step {evaluation.step:6d}  epoch {evaluation.epoch:6.2f}  train {evaluation.train_seconds:8.3f} s  "
        f"{metric} {evaluation.metric:.4f}  loss {evaluation.loss:.4f}{speed}"
    )


def _print_log() -> None:
    """Print what is logged of how the training is run, and by techniques, such as which layers a checkpoint gave."""
    for name in ("autotune.training.run", "autotune.training.techniques"):
        log = logging.getLogger(name)
        log.setLevel(logging.INFO)
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(LogFormatter())
        log.handlers = [handler]


if __name__ == "__main__":
    run_main(train_command)
