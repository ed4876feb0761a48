"""What trainings that differ in learning rate and seed only spend to build compiled code: ``python
-m benchmarks.compiling``.

Trainings of ``experiment=cnn`` with ``runtime.compile=default`` build in turn, beginning with no
compiled code on disk: all in one process, and each in a new process. In both, a last one is paused
at its first evaluation and resumed after another training, in the same process or in a new one.
What a training is charged is told beside what it spent. A resumed one spends all until its next
evaluation, less the training and the evaluation that it is charged for.

Exit code 0: every training after the first, and every resumed one, spends at most a quarter of the
first's build seconds; 1: not so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autotune.config.compose import Composer
from autotune.training.loop import train
from benchmarks.measuring import circumstances, write_result

MAX_RATIO = 0.25


@dataclass(frozen=True, kw_only=True)
class Build:
    """What one training spent to build, and what it was charged, in seconds."""

    processes: str
    training: str
    spent_seconds: float
    charged_seconds: float


def built(
    processes: str, number: int, device: str, paused: Path, *, resumes: bool = False
) -> Build:
    """Train to the first evaluation and pause there, or resume what was paused and train to the
    next.
    """
    overrides = [
        "experiment=cnn",
        f"device={device}",
        "runtime.compile=default",
        "epochs=3",
        "target.value=2",
        "cluster.cpus_per_worker=1",
    ]
    config = (
        Composer([*overrides, f"optimizer.lr={0.05 + number / 100:.2f}", f"seed={number}"])
        .compose()
        .trial
    )
    training = train(config, **({"paused_folder": paused} if resumes else {}))
    began = time.perf_counter()
    evaluation = next(training)
    seconds = time.perf_counter() - began
    if resumes:
        trained = json.loads((paused / "spent.json").read_text())
        spent = seconds - (evaluation.train_seconds + evaluation.evaluate_seconds - trained)
    else:
        spent = evaluation.spent_build_seconds
        training.send(paused)
        (paused / "spent.json").write_text(
            json.dumps(evaluation.train_seconds + evaluation.evaluate_seconds), encoding="utf-8"
        )
    training.close()
    name = "resumed" if resumes else f"{number}"
    return Build(
        processes=processes,
        training=name,
        spent_seconds=spent,
        charged_seconds=evaluation.build_seconds,
    )


def in_new_process(cache: Path, arguments: Sequence[str]) -> list[Build]:
    """Build in a new process what the arguments of this module's ``--only`` say."""
    environment = {**os.environ, "AUTOTUNE_CACHE": str(cache)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compiling", *arguments]
    lines = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    return [Build(**json.loads(line)) for line in lines if line.startswith("{")]


def only(processes: str, trainings: Sequence[str], device: str, folder: Path) -> None:
    """Build each training in this process, ``r`` before a number to resume it, and print what it
    took.
    """
    for text in trainings:
        number = int(text.lstrip("r"))
        paused = folder / f"{processes}-{number}"
        paused.mkdir(exist_ok=True)
        print(
            json.dumps(
                vars(built(processes, number, device, paused, resumes=text.startswith("r")))
            ),
            flush=True,
        )


def main() -> int:
    """Measure, print and write, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiling", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--trainings",
        type=int,
        default=10,
        help="trainings of each kind of process, the first included",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    # of a child process: folder, kind of process, trainings
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        folder, processes, *trainings = arguments.only
        only(processes, trainings, arguments.device, Path(folder))
        return 0

    started = circumstances()
    numbers = [str(number) for number in range(arguments.trainings)]
    resumed = ["r" + numbers[-2]]  # the last training came between
    builds: list[Build] = []
    with tempfile.TemporaryDirectory(prefix="autotune-compiling-") as folder:
        for processes, groups in (
            ("reused", [[*numbers, *resumed]]),
            ("fresh", [[text] for text in (*numbers, *resumed)]),
        ):
            for group in groups:
                chosen = ["--device", arguments.device, "--only", folder, processes, *group]
                for build in in_new_process(Path(folder) / f"cache-{processes}", chosen):
                    builds.append(build)
                    print(
                        f"{processes:<7} training {build.training:<8} spent"
                        f" {build.spent_seconds:7.3f} s, charged {build.charged_seconds:7.3f} s",
                        flush=True,
                    )
    holds = True
    ratios: dict[str, list[float]] = {}
    for processes in ("reused", "fresh"):
        first, *others = (build.spent_seconds for build in builds if build.processes == processes)
        *later, resumed_ratio = ratios[processes] = [seconds / first for seconds in others]
        holds = holds and max(ratios[processes]) <= MAX_RATIO
        print(
            f"{processes:<7} cold {first:.2f} s; others / cold: median {median(later):.4f}, largest"
            f" {max(later):.4f} (n = {len(later)}); resumed / cold: {resumed_ratio:.4f}"
        )
    path = write_result(
        "compiling",
        started=started,
        settings=vars(arguments),
        result={"builds": builds, "ratios": ratios, "holds": holds},
    )
    print(f"{'holds' if holds else 'FAILS'}: every ratio is at most {MAX_RATIO}\nwritten to {path}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
