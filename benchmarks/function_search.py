"""Does proposing better points pay? ``python -m benchmarks.function_search --surrogate DIR``.

On recordings it cannot: a point that a search proposes gives way to the nearest recorded one. Here
a function gives the learning curve of any point, and searches are replayed over it as
``benchmarks.search`` replays them over recordings. The functions:

- ``lcbench``: a surrogate of small nets on tabular data sets (LCBench, in YAHPO Gym's
  ``model.onnx`` and ``encoding.json``; ``pip install onnxruntime``), one for each OpenML task.
- ``late``: synthetic curves that stay flat for 10% to 70% of a training, and then rise.
- ``early``: the same curves without their flat start.

A tenth of random points reach a function's target, and the time limit is 1.5 times the median full
training. No function knows seeds, so each trial learns at a pace of its own: lognormal, with a
deviation of 0.1 (repeated trainings of AlgoPerf differ by so much).

Reported are the seconds that the best trial so far needs at an even pace, after so many median full
trainings: as the ratio of the first policy's to each other's, a geometric mean over functions and
seeds with a 95% interval by the bootstrap. Until a trial has reached the target, the time limit
counts. No claim is checked.

Exit code 0: it ran; 2: there is no surrogate or no onnxruntime, or an option is wrong.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from autotune.measurement import Target
from autotune.outcome import Outcome
from autotune.recording import RecordedTrial, Recording
from autotune.search.points import Array, RandomTrial, UnitCube
from autotune.search.samplers import quiet_optuna
from autotune.space import SearchSpace, Suggestion
from benchmarks.measuring import circumstances, write_result
from benchmarks.replay.simulation import replay
from benchmarks.search import one_thread_processes
from benchmarks.search_peers.policies import POLICIES
from benchmarks.search_peers.scores import interval

BUDGETS = (5, 10, 20, 50)
"""Budgets in median full trainings."""
TASKS = (3945, 7593, 34539, 126026, 126029, 167104, 167149, 167161, 167168, 167181, 167185, 167190)
"""OpenML tasks of ``lcbench``."""
_SURROGATE_VARIABLE = "AUTOTUNE_SURROGATE"
_PACE_DEVIATION = 0.1
"""Deviation of the logarithm of a trial's pace."""
_NUM_EVALUATIONS = 50
_LCBENCH_SPACE = {
    "batch_size": {"type": "int", "low": 16, "high": 512, "log": True},
    "learning_rate": {"type": "float", "low": 1e-4, "high": 0.1, "log": True},
    "momentum": {"type": "float", "low": 0.1, "high": 0.99},
    "weight_decay": {"type": "float", "low": 1e-5, "high": 0.1, "log": True},
    "num_layers": {"type": "int", "low": 1, "high": 5},
    "max_units": {"type": "int", "low": 64, "high": 1024, "log": True},
    "max_dropout": {"type": "float", "low": 0.0, "high": 1.0},
}
"""Parameters in the order of the surrogate's inputs, after the epoch."""
_SYNTHETIC_SPACE = {
    "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
    "batch_size": {"type": "int", "low": 16, "high": 1024, "log": True},
    "dropout": {"type": "float", "low": 0.0, "high": 0.5},
    "optimizer": ["sgd", "adam", "lamb"],
}


class Function(Protocol):
    """The learning curve of any point of a space."""

    space: SearchSpace

    def curve(self, point: Suggestion) -> tuple[Array, Array]:
        """Seconds since the start and metric, higher is better, of each evaluation
        ``[evaluations]``, without noise.
        """
        ...


class LCBench:
    """A surrogate of LCBench's trainings on one task."""

    def __init__(self, folder: Path, task: int) -> None:
        import onnxruntime  # an optional library

        self.space = SearchSpace.from_mapping(_LCBENCH_SPACE, "lcbench")
        codes = json.loads((folder / "encoding.json").read_text(encoding="utf-8"))["OpenML_task_id"]
        self._code = codes[str(task)]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._model = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)

    def curve(self, point: Suggestion) -> tuple[Array, Array]:
        """The surrogate's curve: 52 epochs, and validation accuracy as a fraction."""
        batch_size, *others = (point.values[key] for key in _LCBENCH_SPACE)
        rows = [[epoch, batch_size, *others] for epoch in range(1, 53)]
        seconds, metrics = self._model.run(
            None,
            {
                "x_cat": np.full((len(rows), 1), self._code, np.int32),
                "x_cont": np.array(rows, np.float32),
            },
        )[0].T[:2]
        return np.maximum.accumulate(np.maximum(seconds, 1e-3)), metrics / 100


class Synthetic:
    """Curves that rise to a quality of the point's own, towards which they halve their distance in
    a time of its own, after a flat start.

    Args:
        is_late: whether there is a flat start.
    """

    def __init__(self, seed: int, *, is_late: bool) -> None:
        rng = np.random.default_rng(seed)
        self.space = SearchSpace.from_mapping(_SYNTHETIC_SPACE, "synthetic")
        self._cube = UnitCube(self.space)
        self._flat_fraction = rng.uniform(0.1, 0.7) * is_late
        num_features = self._cube.num_features
        self._best = rng.uniform(0.2, 0.8, num_features)
        self._weights = rng.dirichlet(np.ones(num_features))
        # of the flat start, of halving, of a step's seconds
        self._slopes = rng.normal(0, [[0.2], [0.7], [0.7]], (3, num_features))
        self._jitter = rng.integers(2**31)

    def curve(self, point: Suggestion) -> tuple[Array, Array]:
        """The point's curve, with noise of 0.003 in the metric that is always the same."""
        features = self._cube.features([point])[0]
        quality = 0.95 - 0.6 * float(self._weights @ (features - self._best) ** 2)
        flat, halving, step_seconds = np.exp(self._slopes @ (features - 0.5))
        done = np.arange(1, _NUM_EVALUATIONS + 1) / _NUM_EVALUATIONS
        rising = np.maximum(0.0, done - self._flat_fraction * flat) / (0.06 * halving)
        seed = [self._jitter, *(int(each * 1e6) for each in features)]
        noise = np.random.default_rng(seed).normal(0, 0.003, _NUM_EVALUATIONS)
        metrics = 0.1 + (quality - 0.1) * (1 - 0.5**rising) + noise
        return 100 * step_seconds * done, metrics


class FunctionPoints:
    """A function's trials, as the ``PointPlacement`` of a replay."""

    def __init__(self, function: Function, seed: int) -> None:
        self._function, self._rng = function, np.random.default_rng(seed)
        self.last: RecordedTrial
        """The trial that was handed out last; not set before the first one."""
        self.trials: list[RecordedTrial] = []

    def __call__(self, suggestion: Suggestion) -> Suggestion:
        """Make a trial of the point, at a pace of its own; every point can be trained."""
        seconds, metrics = self._function.curve(suggestion)
        pace = math.exp(self._rng.normal(0, _PACE_DEVIATION))
        # as many steps show the metric of ``pace`` times as many
        steps = np.arange(1.0, len(seconds) + 1)
        metrics = np.interp(steps * pace, steps, metrics)
        self.last = _trial(len(self.trials), suggestion, seconds, metrics)
        self.trials.append(self.last)
        return suggestion

    def can_repeat(self, suggestion: Suggestion) -> bool:
        """Whether a point may be trained again: any."""
        return True


def _trial(number: int, point: Suggestion, seconds: Array, metrics: Array) -> RecordedTrial:
    return RecordedTrial(
        number=number,
        suggestion=point,
        steps=tuple(range(1, len(seconds) + 1)),
        train_seconds=tuple(seconds.tolist()),
        metrics=tuple(metrics.tolist()),
    )


@lru_cache(maxsize=4)
def as_recording(kind: str, number: int, folder: Path | None) -> tuple[Function, Recording, float]:
    """A function, a recording of a thousand random points of it, and the seconds of their median
    full training.
    """
    function: Function = (
        LCBench(folder, number)
        if kind == "lcbench" and folder
        else Synthetic(number, is_late=kind == "late")
    )
    by_chance = RandomTrial(np.random.default_rng(0))
    points = [function.space.suggest(by_chance) for _ in range(1000)]
    trials = [_trial(index, each, *function.curve(each)) for index, each in enumerate(points)]
    full_seconds = float(np.median([each.train_seconds[-1] for each in trials]))
    target = Target(
        metric="accuracy",
        mode="max",
        value=float(np.quantile([max(each.metrics) for each in trials], 0.9)),
        max_train_seconds=1.5 * full_seconds,
    )
    recording = Recording(target=target, space=function.space, trials=tuple(trials))
    return function, recording, full_seconds


@dataclass(frozen=True, kw_only=True)
class FunctionSearch:
    """One search over one function."""

    kind: str
    number: int
    policy: str
    seed: int
    folder: Path | None


def run_search(search: FunctionSearch) -> tuple[FunctionSearch, list[float]]:
    """Replay a search, and the seconds of the best trial after each budget."""
    quiet_optuna()
    function, recording, full_seconds = as_recording(search.kind, search.number, search.folder)
    points = FunctionPoints(function, search.seed)
    kind = POLICIES[search.policy]
    trace = replay(
        recording,
        # it has the verbs
        lambda place: kind.make(recording, seed=search.seed, place=place),  # type: ignore[arg-type,return-value]
        within=None,
        points=points,
        max_seconds=BUDGETS[-1] * full_seconds,
    )
    found = []
    for budget in BUDGETS:
        reached = [
            (stretch.train_seconds, stretch.trial)
            for stretch in trace.stretches
            if stretch.outcome == Outcome.REACHED
            and stretch.stopped_seconds <= budget * full_seconds
        ]
        seconds = None
        if reached:
            point = points.trials[min(reached)[1]].suggestion
            seconds = _trial(0, point, *function.curve(point)).time_to_target(recording.target)
        found.append(seconds or recording.target.max_train_seconds)
    return search, found


def ratios(
    found: dict[tuple[str, int, int], list[float]], policies: Sequence[str], numbers: Sequence[int]
) -> dict[str, list[tuple[float, float, float]]]:
    """Ratio of the first policy's seconds to each other's after each budget, with its interval."""
    seeds = sorted({seed for _, _, seed in found})
    logs = {
        policy: np.log(
            [[found[policy, number, seed] for seed in seeds] for number in numbers]
        )  # [functions, seeds, budgets]
        for policy in policies
    }
    told = {}
    for policy in policies[1:]:
        differences = logs[policies[0]] - logs[policy]
        told[policy] = [
            (float(np.exp(of_budget.mean())), *interval(of_budget))
            for of_budget in np.moveaxis(differences, 2, 0)
        ]
    return told


def main(command_line: Sequence[str] | None = None) -> int:
    """Read the command line, run, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.function_search", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--functions", choices=("lcbench", "late", "early"), default="lcbench")
    parser.add_argument(
        "--surrogate",
        default=os.environ.get(_SURROGATE_VARIABLE),
        help=f"folder of LCBench's model.onnx; else the variable {_SURROGATE_VARIABLE}",
    )
    parser.add_argument(
        "--numbers", default="", help="tasks or seeds of functions, with commas; else all"
    )
    parser.add_argument("--policies", default="freeze_thaw,tpe_asha_pruned,random_cap")
    parser.add_argument("--seeds", type=int, default=10, help="searches over each function")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(command_line)
    console = Console(width=None if sys.stdout.isatty() else 160)
    is_lcbench = arguments.functions == "lcbench"
    if is_lcbench and not (
        arguments.surrogate and (Path(arguments.surrogate) / "model.onnx").is_file()
    ):
        console.print(
            f"no surrogate: found {arguments.surrogate}; give --surrogate DIR, a folder with"
            " LCBench's model.onnx and encoding.json of YAHPO Gym"
        )
        return 2
    if is_lcbench and importlib.util.find_spec("onnxruntime") is None:
        console.print("no onnxruntime: pip install onnxruntime")
        return 2
    policies = arguments.policies.split(",")
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        console.print(f"--policies: found {unknown[0]}; use {', '.join(POLICIES)}")
        return 2
    try:
        numbers = [int(number) for number in arguments.numbers.split(",") if number]
    except ValueError:
        console.print(f"--numbers: found {arguments.numbers}; use whole numbers with commas")
        return 2
    numbers = numbers or list(TASKS if is_lcbench else range(200))
    started = circumstances()
    searches = [
        FunctionSearch(
            kind=arguments.functions,
            number=number,
            policy=policy,
            seed=seed,
            folder=Path(arguments.surrogate) if is_lcbench else None,
        )
        for number in numbers
        for seed in range(arguments.seeds)
        for policy in policies
    ]
    found: dict[tuple[str, int, int], list[float]] = {}
    with one_thread_processes(arguments.processes) as pool:
        for search, seconds in pool.imap_unordered(run_search, searches):
            found[search.policy, search.number, search.seed] = seconds
            if len(found) % max(1, len(searches) // 10) == 0:
                console.print(f"{len(found)} of {len(searches)} searches")
    told = ratios(found, policies, numbers)
    table = Table(
        title=f"Best found by {policies[0]} / by another, {arguments.functions}: {len(numbers)}"
        f" functions, {arguments.seeds} seed(s)",
        title_justify="left",
    )
    table.add_column("by", no_wrap=True)
    for budget in BUDGETS:
        table.add_column(f"{budget} full trainings [95%]", justify="right")
    for policy, by_budget in told.items():
        table.add_row(policy, *(f"{at:.3f} [{low:.3f}, {high:.3f}]" for at, low, high in by_budget))
    console.print(table)
    settings: dict[str, Any] = {**vars(arguments), "numbers": numbers}
    result = {
        "budgets": BUDGETS,
        "ratios": told,
        "found": [[*search, *seconds] for search, seconds in sorted(found.items())],
    }
    name = f"function_search_{arguments.functions}"
    console.print(
        f"written to {write_result(name, started=started, settings=settings, result=result)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
