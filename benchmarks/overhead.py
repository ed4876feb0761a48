"""What a trial costs besides its training, ours against stock Ray Tune's: ``python -m
benchmarks.overhead``.

Both sides search the same space with the same number of tiny trainings on the same number of CPUs,
as many at once, tracked in MLflow on SQLite, each in a fresh process, in turn. Ours is ``python -m
autotune``; stock is ``benchmarks.stock_tune``, with Tune's defaults and, for what of it is the
reuse of actors alone, once more with that switched on. A third side of ours trains by a function of
the user's own (``benchmarks.plain_training.fit``), whose trials have a process each.

The measure, the same for every side:

    seconds outside training a trial = (window x trials at once - seconds in training) / number of
    trials

The window goes from the first time the sampler is asked for a point to the driver's hearing that
the last trial ended, so it holds the start of the first workers. Seconds in training are measured
inside the workers and summed: from the moment the code that trains runs (its imports done) to its
last evaluation, loading data and evaluating included, reporting not. What a process pays at its
first training alone (torch imports its compiler with the first optimizer, a second or two)
therefore counts as training, once for each of our workers and once for each of stock's trials: the
measure is kind to stock. The ratio of the windows needs no such rule and is printed beside it. So
are the seconds from the command to the first trial's end, and from the last trial's end to the
prompt.

Exit code 0: ours is at most a fifth of stock's, as a median over the repeats; 1: it is not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autotune.confirm.statistics import Ratio
from autotune.measurement import Evaluation
from autotune.search.study import finished_results, read_study
from benchmarks.measuring import circumstances, median_of_ratios, write_result

MAX_OUTSIDE_RATIO = 0.2
REPOSITORY = Path(__file__).parent.parent
SIDES = ("ours", "ours, a function", "stock", "stock reusing actors")
_EXIT_CODES = {True: (0, 3), False: (0,)}
"""Exit codes of a search that went well, by whether it is ours: hardly a trial reaches the
target, an accuracy of 1, and often none (3)."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search of one side, measured."""

    side: str
    num_trials: int
    process_seconds: float
    """Seconds from starting the process to its end: imports, start of Ray, search, closing."""
    first_result_seconds: float
    """Seconds from starting the process to the end of its first trial."""
    closing_seconds: float
    """Seconds from the end of the last trial to the end of the process."""
    window_seconds: float
    training_seconds: float
    """Seconds in training, summed over the trials."""
    outside_seconds_per_trial: float
    process_seconds_per_trial: float
    mean_training_seconds: float
    load_average: float
    """Load average of the machine over the minute before the start."""


def run_search(side: str, arguments: argparse.Namespace, *, seed: int) -> Search:
    """Run one search of one side, in a temporary folder of its own.

    Raises:
        RuntimeError: the search's process failed, or not every trial ended as it should.
    """
    is_ours = side.startswith("ours")
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(
        prefix="autotune-overhead-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        command = (
            _our_command(side, arguments, folder, seed)
            if is_ours
            else _stock_command(side, arguments, folder, seed)
        )
        began = time.time()
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        ended = time.time()
        if done.returncode not in _EXIT_CODES[is_ours]:
            raise RuntimeError(
                f"{side} ended with"
                f" {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        measured = _read_ours(folder) if is_ours else json.loads(done.stdout.splitlines()[-1])
    seconds: Sequence[float] = measured["training_seconds"]
    if len(seconds) != arguments.trials:
        raise RuntimeError(f"{side} ended {len(seconds)} trials, not {arguments.trials}")
    first_end, last_end = min(measured["ended_at"]), max(measured["ended_at"])
    process_seconds, window_seconds, training_seconds = (
        ended - began,
        last_end - measured["first_asked_at"],
        sum(seconds),
    )
    return Search(
        side=side,
        num_trials=arguments.trials,
        process_seconds=process_seconds,
        first_result_seconds=first_end - began,
        closing_seconds=ended - last_end,
        window_seconds=window_seconds,
        training_seconds=training_seconds,
        outside_seconds_per_trial=(window_seconds * arguments.concurrency - training_seconds)
        / arguments.trials,
        process_seconds_per_trial=process_seconds / arguments.trials,
        mean_training_seconds=training_seconds / arguments.trials,
        load_average=load_average,
    )


def _our_command(side: str, arguments: argparse.Namespace, folder: Path, seed: int) -> list[str]:
    length = {"batch_size": arguments.batch_size, "epochs": arguments.epochs}
    space = [
        f"search_space=[{Path(__file__).with_name('overhead_space.yaml')}]",
        *(f"{key}={value}" for key, value in length.items()),
    ]
    return [
        sys.executable,
        "-m",
        "autotune",
        "experiment=cnn",
        "study.name=overhead",
        f"study.folder={folder}",
        f"study.seed={seed}",
        *(space if side == "ours" else _function(length)),
        "target.value=1",
        "target.max_train_seconds=600",
        "stopping=none",
        "confirm=none",
        "device=cpu",
        f"search.num_trials={arguments.trials}",
        f"search.max_concurrent_trials={arguments.concurrency}",
        f"cluster.num_cpus={arguments.concurrency}",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
    ]


def _function(length: Mapping[str, int]) -> list[str]:
    """Settings of our side that trains by a function: what ``overhead_space.yaml`` says, of its
    arguments.
    """
    values = {
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "lr_schedule": "constant",
        "norm": "none",
        **length,
    }
    node = ", ".join(
        f"{key}: {value}"
        for key, value in {"_target_": "benchmarks.plain_training.fit", **values}.items()
    )
    return [
        f"training={{{node}}}",
        "allowed_targets=[benchmarks]",
        "search_space=[]",
        "training.lr=tag(log,interval(1e-3,0.3))",
        "training.momentum=interval(0.8,0.98)",
        "training.weight_decay=tag(log,interval(1e-5,1e-2))",
        "training.lr_schedule=choice(constant,cosine)",
        "training.norm=choice(none,batch)",
    ]


def _stock_command(side: str, arguments: argparse.Namespace, folder: Path, seed: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "benchmarks.stock_tune",
        f"--trials={arguments.trials}",
        f"--concurrency={arguments.concurrency}",
        f"--epochs={arguments.epochs}",
        f"--batch-size={arguments.batch_size}",
        f"--seed={seed}",
        f"--folder={folder}",
        *(["--reuse-actors"] if side == "stock reusing actors" else []),
    ]


def _read_ours(folder: Path) -> Mapping[str, Any]:
    """Read the numbers that ``benchmarks.stock_tune`` prints from our study's storage."""
    study = read_study("overhead", folder / "overhead")
    results = finished_results(study).values()
    return {
        "first_asked_at": min(
            trial.datetime_start.timestamp() for trial in study.trials if trial.datetime_start
        ),
        "ended_at": [result.stopped_at for result in results],
        "training_seconds": [
            _in_training(result.last) for result in results if result.last is not None
        ],
    }


def _in_training(last: Evaluation) -> float:
    return last.build_seconds + last.prepare_seconds + last.train_seconds + last.evaluate_seconds


def print_table(searches: Sequence[Search], ratios: Mapping[str, Ratio]) -> None:
    """Print the medians of each side, then the ratios."""
    header = (
        "outside a trial",
        "process a trial",
        "training a trial",
        "window",
        "first result",
        "closing",
    )
    print(f"\n{'median seconds':<22}" + "".join(f"{text:>18}" for text in header))
    for side in SIDES:
        own = [search for search in searches if search.side == side]
        columns = (
            [search.outside_seconds_per_trial for search in own],
            [search.process_seconds_per_trial for search in own],
            [search.mean_training_seconds for search in own],
            [search.window_seconds for search in own],
            [search.first_result_seconds for search in own],
            [search.closing_seconds for search in own],
        )
        print(f"{side:<22}" + "".join(f"{median(column):>18.4g}" for column in columns))
    print()
    for name, ratio in ratios.items():
        print(f"{name:<46} {ratio}")


def main() -> int:
    """Measure all repeats, print and write them, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--trials", type=int, default=100, help="trials of each search")
    parser.add_argument("--repeats", type=int, default=3, help="searches of each side")
    parser.add_argument("--concurrency", type=int, default=2, help="trials at once, one CPU each")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of each training")
    parser.add_argument("--batch-size", type=int, default=64, help="samples a step")
    arguments = parser.parse_args()

    started = circumstances()
    searches: list[Search] = []
    for repeat in range(arguments.repeats):
        for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
            searches.append(run_search(side, arguments, seed=repeat))
            outside, process = searches[-1].outside_seconds_per_trial, searches[-1].process_seconds
            print(
                f"repeat {repeat}: {side:<22} {outside:.4g} s outside training a trial,"
                f" {process:.4g} s in all",
                flush=True,
            )

    def of(side: str, field: str) -> list[float]:
        return [getattr(search, field) for search in searches if search.side == side]

    ratios = {
        f"{label}, ours / {other}": median_of_ratios(of("ours", field), of(other, field))
        for label, field in (
            ("outside training", "outside_seconds_per_trial"),
            ("window", "window_seconds"),
            ("whole process", "process_seconds"),
            ("first result", "first_result_seconds"),
            ("closing", "closing_seconds"),
        )
        for other in SIDES[2:]
    }
    fields = [of(side, "outside_seconds_per_trial") for side in SIDES[1::-1]]
    ratios["outside training, ours, a function / ours"] = median_of_ratios(*fields)
    holds = ratios["outside training, ours / stock"].ratio <= MAX_OUTSIDE_RATIO
    path = write_result(
        "overhead",
        started=started,
        settings=vars(arguments),
        result={
            "ratios": ratios,
            "holds": {f"outside training, ours / stock: at most {MAX_OUTSIDE_RATIO}": holds},
            "searches": searches,
        },
    )
    print_table(searches, ratios)
    print(
        f"{'holds' if holds else 'FAILS'}: ours outside training is at most {MAX_OUTSIDE_RATIO} of"
        " stock's"
    )
    print(f"written to {path}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
