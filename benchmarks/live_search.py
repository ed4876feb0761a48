"""Which search finds the faster configuration in the same time? ``python -m benchmarks.live_search``.

Whole studies, live, in fresh processes and in turn: ``python -m autotune experiment=cnn search=...`` for each search that is asked for,
and ``benchmarks.stock_time_to_accuracy``, Ray Tune's own Tuner with OptunaSearch and ASHA. All train the same space with the same
training code on the same number of workers for the same wall seconds of searching, counted from the first trial's start.

What each study found is then trained again, on fresh seeds that are the same for every side and in turn, and counted with its time to
target there: the median of its runs. A study that found nothing, or whose configuration falls short of the target on fresh seeds, is
counted with ``max_train_seconds``. The ratio is of geometric means over the studies, its interval by the bootstrap over them.

Exit code 0: the first search's configurations are not slower than stock's, as far as the interval can tell; 1: they are.
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

from autotune.comparison import in_turns
from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.outcome import Outcome
from autotune.training.loop import train
from benchmarks.measuring import circumstances, write_result

STOCK = "ray_tune_asha"
REPOSITORY = Path(__file__).parent.parent
_FIRST_SEED = 10_000
"""Of the runs that count; no study uses it."""
_NUM_RESAMPLES = 4000


@dataclass(frozen=True, kw_only=True)
class Study:
    """What one study found, and what that takes on fresh seeds."""

    side: str
    seed: int
    num_trials: int
    search_seconds: float | None
    """Time to target of the best trial, as the search measured it; None where none reached the target."""
    overrides: tuple[str, ...] | None
    confirmed_seconds: tuple[float, ...] = ()
    """Of each fresh run; ``max_train_seconds`` where it fell short of the target."""

    @property
    def seconds(self) -> float:
        """What the study counts with."""
        return median(self.confirmed_seconds)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One side's geometric mean over another's, with a 95% interval."""

    numerator: str
    denominator: str
    ratio: float
    low: float
    high: float
    num_studies: int


def run_study(side: str, arguments: argparse.Namespace, seed: int) -> Study:
    """One search of one side, in a process and a folder of its own.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-live-search-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = _stock_command(arguments, folder, seed) if side == STOCK else _own_command(side, arguments, folder, seed)
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if done.returncode not in ((0,) if side == STOCK else (0, 3)):
            raise RuntimeError(f"{side} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found = json.loads(done.stdout.splitlines()[-1]) if side == STOCK else _read_own(folder / "study" / "trials.csv", arguments)
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
        sys.executable, "-m", "autotune", f"experiment={arguments.experiment}", f"search={side}", "study.name=study",
        f"study.folder={folder}", f"study.seed={seed}", "search.num_trials=null", f"search.time_budget_seconds={arguments.seconds}",
        f"cluster.num_cpus={arguments.concurrency}", "tracking=none", "confirm=none", "device=cpu",
    ]  # fmt: skip


def _stock_command(arguments: argparse.Namespace, folder: Path, seed: int) -> list[str]:
    return [
        sys.executable, "-m", "benchmarks.stock_time_to_accuracy", f"--experiment={arguments.experiment}",
        f"--seconds={arguments.seconds}", f"--seed={seed}", f"--concurrency={arguments.concurrency}", f"--folder={folder}",
    ]  # fmt: skip


def _read_own(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a study of autotune's found, from its table of trials."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    reached = [row for row in rows if row["outcome"] == Outcome.REACHED]
    best = min(reached, key=lambda row: float(row["time_to_target_seconds"]), default=None)
    keys = list(rows[0])[list(rows[0]).index("error") + 1 :] if rows else []
    return {
        "num_trials": len(rows),
        "seconds": None if best is None else float(best["time_to_target_seconds"]),
        "overrides": None if best is None else [f"{key}={best[key].replace(' ', '')}" for key in keys if best[key] != ""],
    }


def confirm(studies: Sequence[Study], composer: Composer, num_runs: int) -> list[Study]:
    """Train what each study found on fresh seeds, one after the other in turns."""
    configs = [None if each.overrides is None else composer.compose(each.overrides).trial for each in studies]
    worst = composer.compose().trial.target.max_train_seconds
    seconds: list[list[float]] = [[] for _ in studies]
    for config in configs:  # not counted: what a process does only once
        if config is not None:
            _train(config, _FIRST_SEED - 1)
    for place, number in in_turns(len(studies), num_runs):
        config = configs[place]
        seconds[place].append(worst if config is None else _train(config, _FIRST_SEED + number))
    return [replace(each, confirmed_seconds=tuple(own)) for each, own in zip(studies, seconds, strict=True)]


def _train(config: TrialConfig, seed: int) -> float:
    *_, last = train(replace(config, seed=seed), num_threads=1)
    return last.warm_seconds if last.outcome is Outcome.REACHED else config.target.max_train_seconds


def compare(studies: Sequence[Study], numerator: str, denominator: str) -> Comparison:
    """One side's times over another's; studies of one seed are a pair."""
    logarithms = {side: np.log([each.seconds for each in studies if each.side == side]) for side in (numerator, denominator)}
    differences = logarithms[numerator] - logarithms[denominator]
    drawn = np.random.default_rng(0).choice(differences, (_NUM_RESAMPLES, len(differences))).mean(axis=1)
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
    """Run all studies, print and write what came of them."""
    sides = [*arguments.searches.split(","), STOCK]
    started = circumstances()
    composer = Composer([f"experiment={arguments.experiment}", "device=cpu"])
    studies: list[Study] = []
    for place, seed in in_turns(len(sides), arguments.studies):
        studies.append(run_study(sides[place], arguments, seed))
        found = studies[-1]
        took = "nothing" if found.search_seconds is None else f"{found.search_seconds:.3g} s"
        print(
            f"study {len(studies)} of {len(sides) * arguments.studies}: {found.side} seed {seed}: {took} ({found.num_trials} trials)",
            flush=True,
        )
    studies = confirm(sorted(studies, key=lambda each: (each.seed, each.side)), composer, arguments.runs)
    for side in sides:
        own = [each.seconds for each in studies if each.side == side]
        spread = f"{min(own):.3g} to {max(own):.3g}"
        print(f"{side}: {geometric_mean(own):.3g} s to target on fresh seeds (geometric mean of {len(own)} studies; {spread})")
    comparisons = [compare(studies, STOCK, side) for side in sides[:-1]]
    for each in comparisons:
        print(f"{each.numerator} / {each.denominator}: {each.ratio:.3g} [{each.low:.3g}, {each.high:.3g}] (n={each.num_studies})")
    path = write_result("live_search", started=started, settings=vars(arguments), result={"comparisons": comparisons, "studies": studies})
    print(f"wrote {path}")
    return 0 if comparisons[0].high >= 1 else 1


def main(command_line: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_search", description=__doc__.partition("\n")[0])
    parser.add_argument("--experiment", default="cnn")
    parser.add_argument("--searches", default="freeze_thaw,tpe", help="autotune's, with commas; the first one is held against stock")
    parser.add_argument("--studies", type=int, default=10, help="of each side")
    parser.add_argument("--seconds", type=float, default=40, help="of searching, a study")
    parser.add_argument("--runs", type=int, default=5, help="on fresh seeds, of what a study found")
    parser.add_argument("--concurrency", type=int, default=2, help="workers of one CPU each")
    return run(parser.parse_args(command_line))


if __name__ == "__main__":
    sys.exit(main())
