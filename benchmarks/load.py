"""What grows with a study? ``python -m benchmarks.load``: 10,000 trials, 64 at once, curves of
100,000 points, 2,000 candidates.

Every part is one study from its command to the prompt, with Optuna's journal, MLflow in a SQLite
file, the default sampler and a training function that does next to nothing. Of the study of many
trials are told: wall seconds a trial over the last thousand, over those of the first thousand; the
driver's memory; the seconds from the last trial's end until MLflow holds all runs; resuming the
ended study, ``autotune report`` and MLflow's ``search_runs``. The other parts tell their seconds,
the driver's memory and what is missing in MLflow.

Exit code 0: every bound holds; 1: one does not.
"""

import argparse
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.search.study import finished_results, read_study
from benchmarks.measuring import circumstances, write_result

MAX_GROWTH = 1.3
MAX_DRIVER_BYTES = 1_000_000_000
MAX_BYTES_A_TRIAL = 20_000
MAX_BACKLOG_SECONDS = 60.0
MAX_RESUME_SECONDS = 20.0
MAX_REPORT_SECONDS = 60.0
_ENDED = (0, 3)
"""Exit codes of a study that ended: something reached the target, or nothing did."""


def train(config: Any) -> Iterator[Mapping[str, float]]:
    """A training function that evaluates twice: one point in three reaches the target, after a
    time that depends on the point.
    """
    lr, size = math.log10(config.optimizer["lr"]), math.log2(config.batch_size)
    misfit = abs(lr + 1.5) / 1.5 + abs(size - 7) / 4
    time.sleep(0.002 * (1 + misfit))
    yield {"metric": 0.5}
    time.sleep(0.002 * (1 + misfit))
    yield {"metric": 1.0 - 0.3 * misfit}


def train_long(config: Any) -> Iterator[Mapping[str, float]]:
    """A training function with a curve of 100,000 points that stays short of its target."""
    for step in range(1, int(config.epochs) + 1):
        yield {"metric": 0.5 * step / config.epochs, "loss": 1.0 / step}


@dataclass(kw_only=True)
class Load:
    """What one study took."""

    part: str
    num_trials: int
    seconds: float = 0.0
    """From the study's command to the prompt."""
    driver_bytes: int = 0
    """Highest resident memory of the driver, in bytes."""
    missing_runs: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    hundreds: list[float] = field(default_factory=list)
    """Mean wall seconds a trial, for each hundred trials in order."""
    driver_bytes_at: list[tuple[float, int]] = field(default_factory=list)
    """Resident memory of the driver in bytes, by Unix time."""
    faults: list[str] = field(default_factory=list)
    """Bounds that do not hold."""


class Watch:
    """Reads the memory of a study's processes, and how many runs its MLflow store holds, twice a
    second, while the study runs.
    """

    def __init__(self, process: "subprocess.Popen[str]", store: Path) -> None:
        self._process, self._store = process, store
        self.driver: list[tuple[float, int]] = []
        self.ended_runs: list[tuple[float, int]] = []
        """Unix times, and the number of ended runs of trials in the store then."""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._process.poll() is None:
            self.driver.append((time.time(), _resident_bytes(self._process.pid)))
            self.ended_runs.append((time.time(), num_ended(self._store)))
            time.sleep(0.5)
        self.ended_runs.append((time.time(), num_ended(self._store)))


def _resident_bytes(process: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return 1024 * int(line.split()[1])
    return 0


def num_ended(store: Path) -> int:
    """Number of runs of trials in an MLflow store that have ended."""
    query = (
        "select count(*) from runs join tags on tags.run_uuid = runs.run_uuid "
        "where tags.key = 'autotune.phase' and tags.value = 'search' and runs.end_time is not null"
    )
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=1)) as database,
    ):
        return int(database.execute(query).fetchone()[0])
    return 0


def run_command(folder: Path, *arguments: str, command: Sequence[str] = ()) -> tuple[float, Watch]:
    """Run a command of autotune's to its end, in a folder.

    Return its seconds and what was seen meanwhile.

    Raises:
        RuntimeError: it failed.
    """
    began = time.monotonic()
    with (folder / "log").open("a+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune", *command, *arguments],
            cwd=folder,
            stdout=log,
            stderr=log,
            text=True,
            env={**_environment(), "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"},
        )
        watch = Watch(process, folder / "mlflow.db")
        if process.wait() not in _ENDED:
            raise RuntimeError(
                f"{' '.join(arguments)}: ended with"
                f" {process.returncode}\n{(folder / 'log').read_text()[-4000:]}"
            )
    return time.monotonic() - began, watch


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "AUTOTUNE_MAX_RETAKES": "0",
    }


def study_arguments(name: str, function: str, num_trials: int, *others: str) -> list[str]:
    """Command-line arguments of a study of one of this module's training functions."""
    return [
        "experiment=cnn",
        f"study.name={name}",
        f"training={{_target_: benchmarks.load.{function}}}",
        "allowed_targets=[benchmarks]",
        f"search.num_trials={num_trials}",
        "search.time_budget_seconds=null",
        "target.value=0.9",
        "confirm=none",
        "device=cpu",
        *others,
    ]


def measure(part: str, folder: Path, arguments: Sequence[str], num_trials: int) -> Load:
    """Run a study and measure it."""
    seconds, watch = run_command(folder, *arguments)
    results = sorted(
        finished_results(read_study(part, folder / "outputs" / part)).values(),
        key=lambda result: result.stopped_at,
    )
    ends = [result.stopped_at for result in results]
    written = [at for at, count in watch.ended_runs if count >= len(results)]
    load = Load(
        part=part,
        num_trials=len(results),
        seconds=seconds,
        driver_bytes=max(resident for _, resident in watch.driver),
        missing_runs=len(results) - watch.ended_runs[-1][1],
        hundreds=[(ends[end] - ends[end - 100]) / 100 for end in range(100, len(ends), 100)],
        driver_bytes_at=watch.driver[:: max(1, len(watch.driver) // 200)],
    )
    behind = len(results) - max(
        (count for at, count in watch.ended_runs if at <= ends[-1]), default=0
    )
    load.figures |= {
        "runs_behind_at_last_trial": behind,
        "backlog_seconds": (written[0] - ends[-1]) if written else math.inf,
        "search_seconds": ends[-1] - results[0].started_at,
    }
    if len(results) < num_trials:
        load.faults.append(f"{len(results)} of {num_trials} trials")
    if load.missing_runs:
        load.faults.append(f"MLflow lacks {load.missing_runs} runs")
    return load


def at_once(folder: Path, num_trials: int, others: Sequence[str]) -> Load:
    """Trials that run 64 at once, on however few cores."""
    load = measure(
        "at_once",
        folder,
        study_arguments("at_once", "train", num_trials, "cluster.num_cpus=64", *others),
        num_trials,
    )
    _bound(load, "backlog_seconds", MAX_BACKLOG_SECONDS)
    return load


def long_curves(folder: Path, num_points: int, others: Sequence[str]) -> Load:
    """One trial whose curve has so many points, resumed and reported."""
    arguments = study_arguments(
        "curves", "train_long", 1, f"epochs={num_points}", "stopping=none", *others
    )
    load = measure("curves", folder, arguments, 1)
    load.figures |= {
        "points": num_points,
        "resume_seconds": run_command(folder, *arguments)[0],
        "report_seconds": run_command(folder, "study=curves", command=["report"])[0],
        "report_megabytes": (folder / "outputs/curves/report.html").stat().st_size / 1e6,
        "journal_megabytes": (folder / "outputs/curves/study.log").stat().st_size / 1e6,
    }
    for figure, most in (
        ("backlog_seconds", MAX_BACKLOG_SECONDS),
        ("report_seconds", MAX_REPORT_SECONDS),
    ):
        _bound(load, figure, most)
    return load


def many_candidates(folder: Path, num_candidates: int, others: Sequence[str]) -> Load:
    """A search among so many options of one key, which have no order."""
    space = folder / "space.yaml"
    space.write_text(
        f"model.widths: {[[8 + place, 16] for place in range(num_candidates)]}\nbatch_size: [32,"
        " 64, 128, 256]\n"
    )
    arguments = study_arguments("candidates", "train", 100, f"search_space=[{space}]", *others)
    load = measure("candidates", folder, arguments, 100)
    load.figures["candidates"] = num_candidates
    _bound(load, "backlog_seconds", MAX_BACKLOG_SECONDS)
    return load


def many_trials(folder: Path, num_trials: int, others: Sequence[str]) -> Load:
    """One study of many trials, resumed and reported."""
    arguments = study_arguments("many", "train", num_trials, *others)
    load = measure("many", folder, arguments, num_trials)
    window = min(1000, num_trials // 4)
    results = finished_results(read_study("many", folder / "outputs/many")).values()
    ends = sorted(result.stopped_at for result in results)
    first, last = (ends[window] - ends[0]) / window, (ends[-1] - ends[-1 - window]) / window
    load.figures |= {
        "window": window,
        "first_seconds_a_trial": first,
        "last_seconds_a_trial": last,
        "growth": last / first,
        "bytes_a_trial": (
            (_bytes_at(load, ends[-1]) - _bytes_at(load, ends[window])) / (num_trials - window)
        ),
        "resume_seconds": run_command(folder, *arguments)[0],
        "report_seconds": run_command(folder, "study=many", command=["report"])[0],
        **search_runs_seconds(folder),
        "report_megabytes": (folder / "outputs/many/report.html").stat().st_size / 1e6,
        "journal_megabytes": (folder / "outputs/many/study.log").stat().st_size / 1e6,
    }
    _bound(load, "growth", MAX_GROWTH)
    _bound(load, "bytes_a_trial", MAX_BYTES_A_TRIAL)
    _bound(load, "backlog_seconds", MAX_BACKLOG_SECONDS)
    _bound(load, "resume_seconds", MAX_RESUME_SECONDS)
    _bound(load, "report_seconds", MAX_REPORT_SECONDS)
    if load.driver_bytes > MAX_DRIVER_BYTES:
        load.faults.append(f"driver memory {load.driver_bytes / 1e6:.0f} MB")
    return load


def _bytes_at(load: Load, at: float) -> int:
    """Resident memory of the driver at a Unix time."""
    return next(
        (resident for seconds, resident in load.driver_bytes_at if seconds >= at),
        load.driver_bytes_at[-1][1],
    )


def search_runs_seconds(folder: Path) -> dict[str, float]:
    """Seconds of MLflow's ``search_runs`` for the best hundred runs and for the first 1,000, as
    its page and a notebook ask for them.
    """
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    seconds = {}
    for count in (100, 1000):
        began = time.monotonic()
        client.search_runs(
            experiments,
            "tags.`autotune.phase` = 'search'",
            max_results=count,
            order_by=["metrics.score ASC"],
        )
        seconds[f"search_{count}_runs_seconds"] = time.monotonic() - began
    return seconds


def _bound(load: Load, figure: str, most: float) -> None:
    if not load.figures[figure] <= most:
        load.faults.append(f"{figure} {load.figures[figure]:.4g}, at most {most:g}")


def main() -> int:
    """Measure the parts, print and write what they took, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--trials", type=int, default=10_000, help="trials of the study of many")
    parser.add_argument(
        "--at-once", type=int, default=256, help="trials of the study that runs 64 at once"
    )
    parser.add_argument("--points", type=int, default=100_000, help="points of the long curve")
    parser.add_argument(
        "--candidates", type=int, default=2000, help="options of the key that is searched over"
    )
    parser.add_argument(
        "--parts", default="many,at_once,curves,candidates", help="which parts to run"
    )
    parser.add_argument("--keep", type=Path, help="folder to leave the studies in")
    parser.add_argument(
        "others", nargs="*", help="further arguments of every study, such as search=random"
    )
    arguments = parser.parse_args()
    started = circumstances()
    loads: list[Load] = []
    for part in arguments.parts.split(","):
        folder = (
            Path(tempfile.mkdtemp(prefix="autotune-load-"))
            if arguments.keep is None
            else arguments.keep / part
        )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            measure_part, size = {
                "many": (many_trials, arguments.trials),
                "at_once": (at_once, arguments.at_once),
                "curves": (long_curves, arguments.points),
                "candidates": (many_candidates, arguments.candidates),
            }[part]
            loads.append(measure_part(folder, size, arguments.others))
        finally:
            if arguments.keep is None:
                shutil.rmtree(folder, ignore_errors=True)
        load = loads[-1]
        print(
            f"{load.part}: {load.num_trials} trials in {load.seconds:.0f} s, driver"
            f" {load.driver_bytes / 1e6:.0f} MB, {load.missing_runs} runs missing"
        )
        print("  ms a trial by hundreds:", " ".join(f"{1000 * s:.0f}" for s in load.hundreds))
        print(
            "  MB of the driver:", " ".join(f"{b / 1e6:.0f}" for _, b in load.driver_bytes_at[::10])
        )
        for name, value in load.figures.items():
            print(f"  {name:<28} {value:.4g}")
        for fault in load.faults:
            print(f"  FAILS: {fault}")
    faults = [fault for load in loads for fault in load.faults]
    path = write_result(
        "load",
        started=started,
        settings={**vars(arguments), "keep": None},
        result={"holds": not faults, "studies": loads},
    )
    print(f"written to {path}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
