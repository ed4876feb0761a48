"""What a run in a fresh process costs besides its training, forked against newly started: ``python
-m benchmarks.fresh_processes``.

Both sides train the same configuration on the same seed, one run at a time on one CPU: *forked* as
confirmation does (``execution/fresh.py``: a process forked from one that has imported all and never
trained), *new* in a Ray actor that is started for the run and imports torch anew, as trainings of
several workers do. The sides take turns within each pair.

    seconds outside training = from asking for the run until its result is there, less build,
    prepare, train and evaluate

What building takes is no part of it, nor of the comparison of training times: a new process imports
torch's compiler while it builds. Training is compared in seconds (prepare and train) and, since the
neighbours on a shared machine have little part in it, in the CPU time that the thread which trains
used from the first evaluation to the last (a Ray actor has other threads, which compute a little
too).

Exit code 0: a forked run takes at most half a second outside its training, as a median, and the
intervals of both ratios of training, forked over new, hold 1; 1: not so.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.confirm.statistics import in_turns
from autotune.execution.cluster import connected
from autotune.execution.fresh import FreshProcesses, FreshRun
from autotune.execution.task_run import TrialTask
from autotune.training.loop import train
from benchmarks.measuring import circumstances, median_of_ratios, ratio_of_means, write_result

MAX_OUTSIDE_SECONDS = 0.5
REPOSITORY = str(Path(__file__).parent.parent)
SIDES = ("forked", "new")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one side, measured."""

    side: str
    pair: int
    outside_seconds: float
    training_seconds: float
    """Seconds of the phases prepare and train."""
    training_cpu_seconds: float
    """CPU seconds of the thread that trains, from the first evaluation to the last."""
    build_seconds: float
    load_average: float
    """Load average of the machine over the minute before the run."""


def trained(config: TrialConfig) -> Iterator[dict[str, float]]:
    """Train by autotune's own loop, and report as a user's training function does: the values
    that ``run_once`` reads.
    """
    evaluations = train(replace(config, training=None), num_threads=1)
    evaluation, first_cpu_seconds = next(evaluations), time.thread_time()
    for evaluation in evaluations:  # noqa: B007  # only the last evaluation is used
        pass
    yield {
        "metric": time.thread_time() - first_cpu_seconds,
        "loss": evaluation.warm_seconds,
        "epoch": evaluation.build_seconds,
    }


def run_once(
    side: str, pair: int, processes: FreshProcesses, config: TrialConfig, folder: str
) -> Run:
    """Train once in a fresh process of a side.

    Raises:
        RuntimeError: the run did not end as it should.
    """
    load_average = os.getloadavg()[0]
    task = TrialTask(
        name=f"{side}-{pair}",
        config=config,
        cap_seconds=float("inf"),
        num_threads=1,
        deadline_seconds=600,
        code_folders=(REPOSITORY,),
        working_folder=folder,
        hang_folder=folder,
        num_cpus=1,
        num_gpus=0,
    )
    run = FreshRun(
        task=task,
        trial=pair,
        values={},
        overrides=(),
        on_start=lambda: None,
        on_evaluation=lambda evaluation: None,
    )
    began = time.perf_counter()
    result = processes.train(run)
    seconds = time.perf_counter() - began
    if result is None or result.last is None or result.error is not None:
        raise RuntimeError(f"{side} run of pair {pair} gave {result}")
    last = result.last
    return Run(
        side=side,
        pair=pair,
        outside_seconds=seconds - last.build_seconds - last.warm_seconds - last.evaluate_seconds,
        training_seconds=last.loss,
        training_cpu_seconds=last.metric,
        build_seconds=last.epoch,
        load_average=load_average,
    )


def of(runs: Sequence[Run], side: str, field: str) -> list[float]:
    """The values of a field for the runs of one side, in order of their pairs."""
    return [
        getattr(run, field) for run in sorted(runs, key=lambda run: run.pair) if run.side == side
    ]


def main() -> int:
    """Measure all pairs, print and write them, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fresh_processes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--pairs", type=int, default=40, help="runs of each side")
    parser.add_argument(
        "--epochs", type=float, default=10, help="epochs of each training, a tenth of a second each"
    )
    arguments = parser.parse_args()

    started = circumstances()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="autotune-fresh-") as folder, ExitStack() as stack:
        base = [
            "experiment=cnn",
            "device=cpu",
            "target.value=2",
            "target.max_train_seconds=600",
            f"epochs={arguments.epochs}",
        ]
        own = {
            "training": {"_target_": "benchmarks.fresh_processes.trained"},
            "allowed_targets": ("benchmarks",),
        }
        configs = [
            replace(Composer([*base, f"seed={pair}"]).compose().trial, **own)
            for pair in range(arguments.pairs)
        ]
        size = stack.enter_context(
            connected(Composer([*base, "cluster.num_cpus=2"]).compose().config.cluster)
        )
        interrupt = threading.Event()
        processes = {
            side: stack.enter_context(
                FreshProcesses(
                    fit=size.holds, interrupt=interrupt, max_retakes=0, can_fork=side == "forked"
                )
            )
            for side in SIDES
        }
        began = time.perf_counter()
        run_once("forked", 0, processes["forked"], configs[0], folder)
        first_seconds = time.perf_counter() - began
        for number, pair in in_turns(len(SIDES), arguments.pairs):
            side = SIDES[number]
            runs.append(run_once(side, pair, processes[side], configs[pair], folder))
            shown = runs[-1]
            print(
                f"pair {pair:<3} {side:<7} outside {shown.outside_seconds:.3f} s, build"
                f" {shown.build_seconds:.3f} s, training {shown.training_seconds:.3f} s, load"
                f" {shown.load_average:.1f}",
                flush=True,
            )

    training, computing = (
        [of(runs, side, field) for side in SIDES]
        for field in ("training_seconds", "training_cpu_seconds")
    )
    outside_forked, outside_new = (of(runs, side, "outside_seconds") for side in SIDES)
    ratios = {
        "training, forked / new": ratio_of_means(*training),
        "training, forked / new, median": median_of_ratios(*training),
        "CPU time of training, forked / new": ratio_of_means(*computing),
        "outside training, new / forked, median": median_of_ratios(outside_new, outside_forked),
    }
    outside = {side: median(of(runs, side, "outside_seconds")) for side in SIDES}
    building = {side: median(of(runs, side, "build_seconds")) for side in SIDES}
    holds = {
        f"outside training, forked: median at most {MAX_OUTSIDE_SECONDS} s": (
            outside["forked"] <= MAX_OUTSIDE_SECONDS
        ),
        **{
            f"{name}: the interval holds 1": found.low <= 1 <= found.high
            for name, found in ratios.items()
            if name.endswith("forked / new")
        },
    }
    path = write_result(
        "fresh_processes",
        started=started,
        settings=vars(arguments),
        result={
            "ratios": ratios,
            "median_outside_seconds": outside,
            "median_build_seconds": building,
            "first_run_seconds": first_seconds,
            "holds": holds,
            "runs": runs,
        },
    )
    for side in SIDES:
        print(
            f"{side:<7} outside training {outside[side]:.3f} s a run, building {building[side]:.3f}"
            " s (medians)"
        )
    print(f"the first forked run, with the start of its fork server: {first_seconds:.2f} s")
    for name, ratio in ratios.items():
        print(f"{name:<42} {ratio}")
    for name, is_so in holds.items():
        print(f"{'holds' if is_so else 'FAILS'}: {name}")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
