"""Train one configuration, without Ray and without MLflow: ``autotune train experiment=NAME``.

Prints every evaluation, and at the end the outcome, the times of the phases and the time to target.
Exit code 0: the target was reached; 3: it was not reached; 2: bad input.
"""

import logging
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.config.build import build
from autotune.config.command_line import (
    EXIT_NOT_REACHED,
    composer_of,
    parse_command_line,
    print_config,
)
from autotune.config.experiments import names_experiment, require_experiment
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, WorkerError, one_line
from autotune.execution.process_group import ProcessGroup
from autotune.execution.task import TrialTask
from autotune.files import WEIGHTS_FILE
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import Objective, check_measured
from autotune.outcome import Outcome
from autotune.redaction import LogFormatter
from autotune.remote import refuse_url, user_path
from autotune.reporting.scores import score_format_of

_EPILOG = "An exported experiment runs by name: autotune train experiment=NAME --config-dir DIR"


def train_command(arguments: Sequence[str]) -> int:
    """Run ``autotune train`` with command-line arguments and return its exit code."""
    line = parse_command_line(
        "autotune train", "Train one configuration to its target.", _EPILOG, arguments
    )
    require_experiment(names_experiment(line.overrides), line.config_dirs)
    composer = composer_of(line, line.overrides)
    composer.refuse_sweeps()
    if print_config(line, composer):
        return 0
    composed = composer.compose()
    config, location = composed.trial, composed.config.checkpoint.folder

    from autotune.training import (  # noqa: PLC0415  # torch
        capabilities,
        device,
        main_thread,
        run,
        sources,
    )

    _print_log()
    machine = device.local_capabilities()
    settings: dict[str, Any] = {
        "num_threads": capabilities.cpus_per_worker(config, composed.config.cluster, machine),
        "score_test": True,
    }
    if location is not None:
        settings |= _kept_at(location, config, arguments)
    sources.train_missing_sources(composer, lambda line: print(line, flush=True))
    run.check_training(config)
    objective = build(composed.config.objective, config.allowed_targets, "objective")
    check_measured(objective, [machine.device_of(config)])
    print(f"device: {capabilities.describe_device(config, machine)}", flush=True)
    training = (
        run.start_training(config, **settings)
        if config.num_workers == 1 and not config.has_rendezvous
        else _train_in_ranks(
            config,
            settings["num_threads"],
            is_on_gpu=capabilities.uses_cuda(config, machine),
            num_gpus=machine.num_gpus,
        )
    )
    follow = partial(_follow, training, config.target.metric, device.is_out_of_memory)
    is_function = config.training is not None
    last, outcome, test_metric = main_thread.MainThread().run(follow) if is_function else follow()
    print(f"outcome {outcome}: {config.target}")
    if last is not None:
        early = last.reused_build_seconds
        reused = f" ({early:.3f} s of it spent earlier, to compile)" if early else ""
        print(
            f"phases: build {last.build_seconds:.3f} s{reused}, prepare {last.prepare_seconds:.3f}"
            f" s, train {last.train_seconds:.3f} s, evaluate {last.evaluate_seconds:.3f} s"
        )
    if location is not None:
        print(f"weights: {location.rstrip('/')}/{WEIGHTS_FILE}")
    if test_metric is not None:
        print(f"test {config.target.metric} {test_metric:.4f}")
    if last is None or outcome is not Outcome.REACHED:
        return EXIT_NOT_REACHED
    print(
        f"time to target: warm {last.warm_seconds:.3f} s, cold"
        f" {last.build_seconds + last.warm_seconds:.3f} s, objective"
        f" {_described_score(objective, config, last)}"
    )
    return 0


def _described_score(objective: Objective, config: TrialConfig, last: Evaluation) -> str:
    """The training's score as text with its unit."""
    result = TrialResult(
        trial=0,
        values={},
        overrides=(),
        seed=config.seed,
        outcome=Outcome.REACHED,
        evaluations=(last,),
        started_at=0.0,
        stopped_at=0.0,
        fingerprint={},
    )
    return score_format_of(objective).format(objective.score(result))


def _kept_at(location: str, config: TrialConfig, arguments: Sequence[str]) -> dict[str, Any]:
    """Settings of a training that keeps its state and weights at ``checkpoint.folder``, and goes on
    from a state that is there.

    Raises:
        ConfigError: the folder is a URL, or a training of this kind keeps no checkpoint here.
    """
    key = "checkpoint.folder"
    refuse_url(location, key)
    if config.training is not None:
        raise ConfigError(f"{key}: a custom training function keeps its own state; set {key}=null")
    if config.num_workers > 1:
        raise ConfigError(
            f"{key}: is not supported with parallelism.num_workers={config.num_workers}"
        )
    folder = user_path(location)
    # imports torch
    from autotune.training.states import TrainingStates  # noqa: PLC0415

    return {
        "states": TrainingStates(folder, every_seconds=0),
        "weights_path": folder / WEIGHTS_FILE,
        "origin": {"command": list(arguments)},
    }


def _train_in_ranks(
    config: TrialConfig, num_threads: int, *, is_on_gpu: bool, num_gpus: int
) -> Generator[Evaluation, None, float | None]:
    """Train with several workers, each a process of this machine, and yield the evaluations.

    Returns the metric on the test split.

    Raises:
        ConfigError: a worker refused the configuration, or there are fewer GPUs than workers.
        WorkerError: a worker failed.
    """
    if is_on_gpu and config.num_workers > num_gpus:
        raise ConfigError(
            f"parallelism.num_workers: found {config.num_workers}; this machine has {num_gpus} GPUs"
        )
    test_metric = None
    processes = ProcessGroup()
    with TemporaryDirectory(prefix="autotune-") as folder, closing(processes):
        training = TrialTask(
            name="train",
            config=config,
            cap_seconds=math.inf,
            num_threads=num_threads,
            deadline_seconds=math.inf,
            code_folders=tuple(sys.path),
            working_folder=str(Path.cwd()),
            hang_folder=folder,
            num_cpus=num_threads * config.num_workers,
            num_gpus=config.num_workers if is_on_gpu else 0,
            score_test=True,
        )
        for report in processes.train(training):
            test_metric = report.test_metric
            if report.evaluation is not None:
                yield report.evaluation
            elif report.outcome is Outcome.INVALID:
                raise ConfigError(report.error or "a worker refused the configuration")
            elif report.outcome is Outcome.OUT_OF_MEMORY:
                raise MemoryError((report.error or "").strip().rpartition("\n")[2])
            elif report.error is not None:
                raise WorkerError("a worker failed:", report.error)
    return test_metric


def _follow(
    training: Generator[Evaluation | None, Any, float | None],
    metric: str,
    is_out_of_memory: Callable[[BaseException], bool],
) -> tuple[Evaluation | None, Outcome, float | None]:
    """Print every evaluation; return the last one, the outcome and the metric on the test split."""
    last, outcome = None, Outcome.MISSED
    try:
        while True:
            if (evaluation := next(training)) is None:  # it was only saved
                continue
            last = evaluation
            speed = f"  {last.samples_per_second:,.0f} samples/s"
            print(
                f"step {last.step:6d}  epoch {last.epoch:6.2f}  train {last.train_seconds:8.3f} s "
                f" {metric} {last.metric:.4f}  loss {last.loss:.4f}"
                f"{'' if math.isnan(last.samples_per_second) else speed}",
                flush=True,
            )
            outcome = last.outcome or outcome
    except StopIteration as ended:
        return last, outcome, ended.value
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(one_line(error))
        return last, Outcome.OUT_OF_MEMORY, None


def _print_log() -> None:
    """Print what is logged of how the training is run, and by techniques, such as which layers a
    checkpoint gave.
    """
    for name in ("autotune.training.run", "autotune.training.techniques"):
        log = logging.getLogger(name)
        log.setLevel(logging.INFO)
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(LogFormatter())
        log.handlers = [handler]
