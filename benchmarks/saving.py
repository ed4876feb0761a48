"""What saving a training costs: ``python -m benchmarks.saving``.

A training function and a training of autotune's own loop run by ``start_training``, with states of
several sizes, each with all combinations of ``checkpoint.every_minutes`` and of seconds from one
evaluation to the next. Only the saving is real: between two evaluations the clock by which states
are due is put forward, in place of training. Two claims are checked:

* saving takes at most 3% of the seconds trained, also in a training of 30 s with a state each 3 s;
* a process that saves its training, or continues it, has no second copy of its state in memory.

Exit code 0: both hold; 1: one does not.
"""

import argparse
import itertools
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

import autotune
from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.files import STATE_FILE
from autotune.training.run import start_training
from autotune.training.states import TrainingStates
from benchmarks.measuring import circumstances, write_result

MAX_FRACTION = 0.03
MAX_FURTHER_COPIES = 0.1
KINDS = ("function", "own loop")
_REAL_EVALUATION_SECONDS = 60.0
"""Seconds from one evaluation to the next of autotune's own loop, whose few steps are real."""
_SCHEDULES = [(3.0, 0.1, 30.0)] + [
    (every, interval, max(600.0, 2.5 * every))
    for every in (5.0, 60.0, 600.0)
    for interval in (0.1, 1.0, 60.0)
]
"""Seconds from one state to the next, from one evaluation to the next, and of the training."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What saving one training took."""

    kind: str
    megabytes: int
    every_seconds: float
    evaluation_seconds: float
    trained_seconds: float
    num_states: int
    fraction: float
    """Share of the seconds trained that saving took."""
    most_fraction: float
    """The same of the seconds so far, where it was largest."""


class _Clock:
    """Stands in for ``time`` in the module of states, and can be put forward."""

    skipped = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped


def holding(checkpoint: autotune.Checkpoint, num_bytes: int) -> None:
    """A training function that has so many bytes to save, and trains nothing."""
    model = nn.ParameterList(torch.empty(num_bytes // 32).uniform_() for _ in range(8))
    checkpoint.load({"model": model})
    while True:
        checkpoint.save({"model": model})
        autotune.report(0.0)


def config_of(kind: str, megabytes: int) -> TrialConfig:
    """Configuration of a training with a state of about a size, which ends by itself never."""
    width = max(8, round(math.sqrt(megabytes * 1e6 / 12)))  # with two moments of AdamW, in float32
    overrides = (
        "experiment=mlp device=cpu optimizer=adamw evaluate_every_samples=32 epochs=100000"
        " target.value=-1 target.max_train_seconds=1e9 allowed_targets=[benchmarks.saving]"
        f" model.widths=[{width},{width}]"
    )
    config = Composer(overrides.split()).compose().trial
    if kind == "own loop":
        return config
    function = {"_target_": "benchmarks.saving.holding", "num_bytes": megabytes * 10**6}
    return replace(config, training=function)


def measure_saving(
    kind: str, megabytes: int, every: float, interval: float, seconds: float
) -> Saving:
    """Save a training, as autotune decides, for some seconds of training."""
    clock, most = _Clock(), 0.0
    with tempfile.TemporaryDirectory() as folder, patch("autotune.training.states.time", clock):
        states = TrainingStates(Path(folder, "run"), every)
        began, trained = clock.monotonic(), 0.0
        with closing(start_training(config_of(kind, megabytes), states=states)) as training:
            while trained < seconds:
                clock.skipped += interval
                next(training)
                trained = clock.monotonic() - began - states.seconds
                most = max(most, states.seconds / trained)
        numbers = [int(path.name) for path in Path(folder, "run").glob("*")]
        return Saving(
            kind=kind,
            megabytes=megabytes,
            every_seconds=every,
            evaluation_seconds=interval,
            trained_seconds=trained,
            num_states=max(numbers, default=0),
            fraction=states.seconds / trained,
            most_fraction=most,
        )


def measure_memory(kind: str, megabytes: int, folder: Path, task: str) -> dict[str, float]:
    """Begin a training, in a new process: only that, or to save it, or from the saved state.

    Returns the most memory that the process had beyond what it had before, in copies of the state:
    its own, and with pages of the state's file, which other processes share (VmHWM).
    """
    config, before = config_of(kind, megabytes), _memory("RssAnon", "VmRSS")
    states = TrainingStates(None if task == "beginning" else folder)
    with closing(start_training(config, states=states)) as training, _most_own_memory() as own:
        next(training)
        if task == "saving":
            training.send(True)
    most = max(own), *_memory("VmHWM")
    size = (folder / "1" / STATE_FILE).stat().st_size
    pairs = zip(("own", "resident"), most, before, strict=True)
    return {name: (now - then) / size for name, now, then in pairs}


@contextmanager
def _most_own_memory() -> Iterator[list[int]]:
    """Context in which a process's own memory is looked at all the time."""
    looks, ended = _memory("RssAnon"), threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            looks.extend(_memory("RssAnon"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield looks
    ended.set()
    thread.join()


def _memory(*names: str) -> list[int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) * 1024 for name in names]


def main() -> int:
    """Measure everything, print it, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 100, 1000])
    arguments = parser.parse_args()
    started = circumstances()
    savings = []
    for kind, megabytes in itertools.product(KINDS, arguments.megabytes):
        for schedule in _SCHEDULES:
            if kind == "function" or schedule[1] == _REAL_EVALUATION_SECONDS:
                savings.append(measure_saving(kind, megabytes, *schedule))
                print(f"{savings[-1].fraction:.2%} {savings[-1]}", flush=True)
    copies: dict[str, dict[str, float]] = {}
    fresh = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as folder, fresh:
        for kind, task in itertools.product(KINDS, ("saving", "continuing", "beginning")):
            given = kind, max(arguments.megabytes), Path(folder, kind), task
            copies[f"{kind}, {task}"] = fresh.submit(measure_memory, *given).result()
            print(f"{kind}, {task}: copies {copies[f'{kind}, {task}']}", flush=True)
    result = {"saving": savings, "copies": copies}
    path = write_result("saving", started=started, settings=vars(arguments), result=result)
    worst = max(saving.fraction for saving in savings)
    begun = {kind: copies[f"{kind}, beginning"]["own"] for kind in KINDS}
    further = max(own["own"] - begun[name.partition(",")[0]] for name, own in copies.items())
    print(f"saving takes at most {worst:.2%} of training, {MAX_FRACTION:.0%} are claimed")
    print(f"it takes {further:.2f} further copies of a state, {MAX_FURTHER_COPIES} are claimed")
    print(f"wrote {path}")
    return 0 if worst <= MAX_FRACTION and further <= MAX_FURTHER_COPIES else 1


if __name__ == "__main__":
    sys.exit(main())
