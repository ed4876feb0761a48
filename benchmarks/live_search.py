"""Which search finds the faster configuration in the same time? ``python -m
benchmarks.live_search``.

Whole studies, live, in fresh processes and in turn: ``python -m autotune experiment=cnn
search=...`` for each search that is asked for, and ``benchmarks.stock_time_to_accuracy``, Ray
Tune's own Tuner with OptunaSearch and ASHA. All train the same space with the same training code on
the same number of workers for the same wall seconds of searching, counted from the first trial's
start.

What each study found is then trained again, on fresh seeds that are the same for every side and in
turn, and counted with its time to target there: the median of its runs. A study that found nothing,
or whose configuration falls short of the target on fresh seeds, is counted with
``max_train_seconds``. The ratio is of geometric means over the studies, its interval by the
bootstrap over them.

Exit code 0: the first search's configurations are not slower than stock's, as far as the interval
can tell; 1: they are.
"""

import argparse
import csv
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.confirm.statistics import in_turns
from autotune.outcome import Outcome
from autotune.training.loop import train
from benchmarks.measuring import circumstances, write_result

STOCK = "ray_tune_asha"
REPOSITORY = Path(__file__).parent.parent
_FIRST_SEED = 10_000
"""Seed of the first run that counts; no study uses it."""
_NUM_RESAMPLES = 4000


@dataclass(frozen=True, kw_only=True)
class Study:
    """The best configuration of one study, and its times to target on fresh seeds."""

    side: str
    seed: int
    num_trials: int
    search_seconds: float | None
    """Time to target of the best trial, as the search measured it; None if no trial reached the
    target."""
    overrides: tuple[str, ...] | None
    confirmed_seconds: tuple[float, ...] = ()
    """Time to target of each run on fresh seeds; ``max_train_seconds`` for a run that fell short
    of the target."""

    @property
    def seconds(self) -> float:
        """The study's time to target: the median of its runs on fresh seeds."""
        return median(self.confirmed_seconds)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The geometric mean of one side's times over another side's, with a 95% interval."""

    numerator: str
    denominator: str
    ratio: float
    low: float
    high: float
    num_studies: int


def run_study(side: str, arguments: argparse.Namespace, seed: int) -> Study:
    """Run one search of one side, in a process and a folder of its own.

    Raises:
        RuntimeError: the search's process failed.
    """
    with tempfile.TemporaryDirectory(
        prefix="autotune-live-search-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        command = (
            _stock_command(arguments, folder, seed)
            if side == STOCK
            else _own_command(side, arguments, folder, seed)
        )
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if done.returncode not in ((0,) if side == STOCK else (0, 3)):
            raise RuntimeError(
                f"{side} ended with"
                f" {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        found = (
            json.loads(done.stdout.splitlines()[-1])
            if side == STOCK
            else _read_own(folder / "study" / "trials.csv", arguments)
        )
    overrides = found["overrides"]
    return Study(
        side=side,
        seed=seed,
        num_trials=found["num_trials"],
        search_seconds=found["seconds"],
        overrides=None if overrides is None else tuple(overrides),
    )


def _own_command(side: str, arguments: argparse.Namespace, folder: Path, seed: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "autotune",
        f"experiment={arguments.experiment}",
        f"search={side}",
        "study.name=study",
        f"study.folder={folder}",
        f"study.seed={seed}",
        "search.num_trials=null",
        f"search.time_budget_seconds={arguments.seconds}",
        f"cluster.num_cpus={arguments.concurrency}",
        "tracking=none",
        "confirm=none",
        "device=cpu",
    ]


def _stock_command(arguments: argparse.Namespace, folder: Path, seed: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "benchmarks.stock_time_to_accuracy",
        f"--experiment={arguments.experiment}",
        f"--seconds={arguments.seconds}",
        f"--seed={seed}",
        f"--concurrency={arguments.concurrency}",
        f"--folder={folder}",
    ]


def _read_own(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Number of trials and best configuration of an autotune study, read from its
    ``trials.csv``.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    reached = [row for row in rows if row["outcome"] == Outcome.REACHED]
    best = min(reached, key=lambda row: float(row["time_to_target_seconds"]), default=None)
    keys = list(rows[0])[list(rows[0]).index("error") + 1 :] if rows else []
    return {
        "num_trials": len(rows),
        "seconds": None if best is None else float(best["time_to_target_seconds"]),
        "overrides": (
            None
            if best is None
            else [f"{key}={best[key].replace(' ', '')}" for key in keys if best[key] != ""]
        ),
    }


def confirm(studies: Sequence[Study], composer: Composer, num_runs: int) -> list[Study]:
    """Train each study's best configuration on fresh seeds, one run after the other, the studies
    in turns.
    """
    configs = [
        None if study.overrides is None else composer.compose(study.overrides).trial
        for study in studies
    ]
    worst = composer.compose().trial.target.max_train_seconds
    seconds: list[list[float]] = [[] for _ in studies]
    for config in configs:  # not counted: they have the work that a process does only once
        if config is not None:
            _train(config, _FIRST_SEED - 1)
    for place, number in in_turns(len(studies), num_runs):
        config = configs[place]
        seconds[place].append(worst if config is None else _train(config, _FIRST_SEED + number))
    return [
        replace(study, confirmed_seconds=tuple(own))
        for study, own in zip(studies, seconds, strict=True)
    ]


def _train(config: TrialConfig, seed: int) -> float:
    *_, last = train(replace(config, seed=seed), num_threads=1)
    return last.warm_seconds if last.outcome is Outcome.REACHED else config.target.max_train_seconds


def compare(studies: Sequence[Study], numerator: str, denominator: str) -> Comparison:
    """Compare the times of two sides; two studies with the same seed are a pair."""
    logarithms = {
        side: np.log([study.seconds for study in studies if study.side == side])
        for side in (numerator, denominator)
    }
    differences = logarithms[numerator] - logarithms[denominator]
    drawn = (
        np.random.default_rng(0)
        .choice(differences, (_NUM_RESAMPLES, len(differences)))
        .mean(axis=1)
    )
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Comparison(
        numerator=numerator,
        denominator=denominator,
        ratio=math.exp(differences.mean()),
        low=math.exp(low),
        high=math.exp(high),
        num_studies=len(differences),
    )


def run(arguments: argparse.Namespace) -> int:
    """Run all studies, print and write their results, and return the exit code."""
    sides = [*arguments.searches.split(","), STOCK]
    started = circumstances()
    composer = Composer([f"experiment={arguments.experiment}", "device=cpu"])
    studies: list[Study] = []
    for place, seed in in_turns(len(sides), arguments.studies):
        studies.append(run_study(sides[place], arguments, seed))
        found = studies[-1]
        took = "nothing" if found.search_seconds is None else f"{found.search_seconds:.3g} s"
        print(
            f"study {len(studies)} of {len(sides) * arguments.studies}: {found.side} seed {seed}:"
            f" {took} ({found.num_trials} trials)",
            flush=True,
        )
    studies = confirm(
        sorted(studies, key=lambda study: (study.seed, study.side)), composer, arguments.runs
    )
    for side in sides:
        own = [study.seconds for study in studies if study.side == side]
        spread = f"{min(own):.3g} to {max(own):.3g}"
        print(
            f"{side}: {geometric_mean(own):.3g} s to target on fresh seeds (geometric mean of"
            f" {len(own)} studies; {spread})"
        )
    comparisons = [compare(studies, STOCK, side) for side in sides[:-1]]
    for ratio in comparisons:
        print(
            f"{ratio.numerator} / {ratio.denominator}: {ratio.ratio:.3g} [{ratio.low:.3g},"
            f" {ratio.high:.3g}] (n={ratio.num_studies})"
        )
    path = write_result(
        "live_search",
        started=started,
        settings=vars(arguments),
        result={"comparisons": comparisons, "studies": studies},
    )
    print(f"wrote {path}")
    return 0 if comparisons[0].high >= 1 else 1


def main(command_line: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live_search", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--experiment", default="cnn")
    parser.add_argument(
        "--searches",
        default="freeze_thaw,tpe",
        help="autotune's, with commas; the first one is held against stock",
    )
    parser.add_argument("--studies", type=int, default=10, help="of each side")
    parser.add_argument("--seconds", type=float, default=40, help="of searching, a study")
    parser.add_argument("--runs", type=int, default=5, help="on fresh seeds, of what a study found")
    parser.add_argument("--concurrency", type=int, default=2, help="workers of one CPU each")
    return run(parser.parse_args(command_line))


if __name__ == "__main__":
    sys.exit(main())
