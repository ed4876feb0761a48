"""Do whole studies run on this machine's GPU? ``python -m benchmarks.gpu_studies [--data-root
DIR]``.

Each row is a command as a user types it, all in one new folder. A row holds if the command ends
with exit code 0, if what the row is about is found in the study's files, and if nothing of it is
left on the GPU. Exit code 0: all rows hold; 1: one does not.
"""

import argparse
import csv
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measuring import circumstances, write_result

TOO_MANY_GIB = 100_000
"""GiB that no machine has."""
_HOG = """
import time, torch
matrix = torch.randn(4096, 4096, device="cuda" if torch.cuda.is_available() else "cpu")
until = time.time() + {seconds}
while time.time() < until:
    (matrix @ matrix).sum().item()
"""
_LEAVE_SECONDS = 20.0
"""Longest wait for the processes of a command that has ended to leave the GPU."""
_COMPILING = "search_space=[cnn,gpu,{_gpu_:{runtime.compile:[null,default]}}]"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One command, and what is to be found in its study."""

    name: str
    arguments: tuple[str, ...]
    """Of ``python``."""
    limit_seconds: float
    holds: Callable[[Mapping[str, Any]], bool] = lambda found: True
    """Whether the facts of the study (see ``facts_of``) are as they should be."""
    hog_seconds: float = 0.0
    """Seconds for which another process computes on the GPU meanwhile."""


def rows(data_root: str | None) -> list[Row]:
    """The rows, those first that say most."""

    def tune(name: str, *settings: str) -> tuple[str, ...]:
        return ("-m", "autotune", *settings, f"study.name=gpu_{name}")

    listed = [
        Row(
            name="cnn",
            arguments=tune("cnn", "experiment=cnn"),
            limit_seconds=240,
            holds=lambda found: found["is_confirmed"],
        ),
        Row(
            name="own",
            arguments=("-m", "benchmarks.gpu_studies", "--own-loop"),
            limit_seconds=120,
            holds=lambda found: (
                found["outcomes"].get("OUT_OF_MEMORY", 0) > 0
                and found["outcomes"].get("REACHED", 0) > 0
            ),
        ),
        Row(
            name="precision",
            arguments=tune(
                "precision",
                "experiment=cnn",
                _COMPILING,
                "search.time_budget_seconds=40",
                "confirm=quick",
            ),
            limit_seconds=200,
            holds=lambda found: not found["outcomes"].get("ERRORED", 0),
        ),
        Row(
            name="contention",
            arguments=tune("contention", "experiment=cnn_smoke", "confirm=none"),
            limit_seconds=90,
            holds=lambda found: found["num_contended"] > 0,
            hog_seconds=60,
        ),
        Row(
            name="transformer",
            arguments=tune(
                "transformer",
                "experiment=transformer",
                "search.num_trials=12",
                "search.time_budget_seconds=30",
                "confirm=none",
            ),
            limit_seconds=150,
            holds=lambda found: not found["outcomes"].get("ERRORED", 0),
        ),
        Row(
            name="compare",
            arguments=(
                "-m",
                "autotune",
                "compare",
                "experiment=cnn",
                "a=[device=cpu]",
                "b=[device=auto]",
                "num_seeds=3",
            ),
            limit_seconds=90,
        ),
    ]
    if data_root is not None:
        settings = (
            f"data.root={data_root}",
            "search.num_trials=null",
            "search.time_budget_seconds=180",
            "confirm.max_runs=12",
        )
        listed.append(
            Row(
                name="cifar10_speed",
                arguments=tune("cifar10_speed", "experiment=cifar10_speed", *settings),
                limit_seconds=420,
                holds=lambda found: found["is_confirmed"],
            )
        )
    return listed


def run_row(row: Row, folder: Path) -> dict[str, Any]:
    """Run a row's command in a folder and return its exit code and seconds, the facts of its
    study, and what is left on the GPU.
    """
    command = [sys.executable, *row.arguments]
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    hog = (
        subprocess.Popen([sys.executable, "-c", _HOG.format(seconds=row.hog_seconds)])
        if row.hog_seconds
        else None
    )
    began = time.monotonic()
    output = folder / f"{row.name}.log"
    try:
        with (
            output.open("w", encoding="utf-8") as file,
            subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=folder, env=environment
            ) as process,
        ):
            exit_code = _wait(process, row.limit_seconds)
    finally:
        if hog is not None:
            hog.kill()
            hog.wait()
    wall_seconds = time.monotonic() - began
    return {
        "command": command[1:],
        "exit_code": exit_code,
        "wall_seconds": wall_seconds,
        **facts_of(folder / "outputs" / f"gpu_{row.name}", wall_seconds),
        "left_on_gpu": _left_on_gpu(),
        "said": output.read_text(encoding="utf-8", errors="replace").splitlines()[-12:],
    }


def _wait(process: subprocess.Popen[bytes], limit_seconds: float) -> int:
    """Wait for a command and return its exit code.

    Past its limit it is interrupted as by Ctrl-C, at last killed, and the code is 124.
    """
    try:
        return process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        return 124


def facts_of(folder: Path, wall_seconds: float) -> dict[str, Any]:
    """What the files of a study say: how its trials ended, the seconds that search and the rest
    took, and what was confirmed.
    """
    table = folder / "trials.csv"
    if not table.is_file():
        return {}
    with table.open(newline="", encoding="utf-8") as file:
        trials = list(csv.DictReader(file))
    times = [float(trial[key]) for trial in trials for key in ("started_at", "stopped_at")]
    search_seconds = max(times) - min(times)
    trained = sum(
        float(trial["build_seconds"] or 0) + float(trial["train_seconds"] or 0) for trial in trials
    )
    best = (
        json.loads(path.read_text(encoding="utf-8"))
        if (path := folder / "best.json").is_file()
        else {}
    )
    log = folder / "autotune.log"
    return {
        "outcomes": dict(Counter(trial["outcome"] for trial in trials)),
        "devices": sorted({trial["device_kind"] for trial in trials if trial["device_kind"]}),
        "search_seconds": search_seconds,
        "seconds_after_search": wall_seconds - search_seconds,
        "build_share_of_search": (
            sum(float(trial["build_seconds"] or 0) for trial in trials) / max(search_seconds, 1e-9)
        ),
        "trained_share_of_search": trained / max(search_seconds, 1e-9),
        "num_contended": (
            log.read_text(encoding="utf-8", errors="replace").count("computed on its GPU")
            if log.is_file()
            else 0
        ),
        "is_confirmed": bool(best.get("speed_up")),
        "speed_up": best.get("speed_up"),
        "best": best.get("overrides"),
        "device": best.get("device"),
    }


def _left_on_gpu() -> list[str]:
    """Processes that compute on a GPU once those of the last command had time to leave.

    Empty where there is no GPU to ask.
    """
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    until = time.monotonic() + _LEAVE_SECONDS
    while True:
        try:
            left = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(
                "\n"
            )
        except (OSError, subprocess.CalledProcessError):
            return []
        left = [line for line in left if line.strip()]
        if not left or time.monotonic() > until:
            return left
        time.sleep(1)


def train_function(lr: float, batch_size: int, amp: bool, gib: float) -> None:
    """A user's own loop: some of its points take more memory than there is, and the next must
    train all the same.
    """
    import torch  # --help does without
    from sklearn.datasets import load_digits

    import autotune

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ballast = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=device)
    inputs, targets = (torch.tensor(array, device=device) for array in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(60):
        for rows in torch.randperm(1500, device=device).split(batch_size):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=amp):
                loss = torch.nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
        autotune.report((model(inputs[1500:]).argmax(1) == targets[1500:]).float().mean())
    del ballast


def tune_own() -> None:
    """Tune ``train_function`` from Python, as study ``gpu_own``."""
    import autotune

    autotune.tune(
        train_function,
        space={
            "lr": autotune.log(0.003, 1),
            "batch_size": [32, 128, 500],
            "amp": [False, True],
            "gib": [0.01, TOO_MANY_GIB],
        },
        baseline={"lr": 0.01, "batch_size": 128, "amp": False, "gib": 0.01},
        target=autotune.target("accuracy", at_least=0.93, max_seconds=10),
        trials=14,
        name="gpu_own",
    )


def main() -> int:
    """Run the rows, print a line for each, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_studies", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--data-root",
        help="folder of CIFAR-10's official files; without it, cifar10_speed is left out",
    )
    parser.add_argument("--rows", default="", help="names of rows, with commas; empty for all")
    parser.add_argument("--limit", type=float, help="seconds after which any row is interrupted")
    parser.add_argument("--folder", type=Path, help="folder of the studies; a new one without it")
    parser.add_argument("--name", default="gpu_studies", help="of the result file")
    parser.add_argument("--own-loop", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own_loop:
        tune_own()
        return 0
    listed = rows(arguments.data_root)
    wanted = arguments.rows.split(",") if arguments.rows else [row.name for row in listed]
    if unknown := set(wanted) - {row.name for row in listed}:
        parser.error(
            f"--rows: found {', '.join(sorted(unknown))}, must be one of"
            f" {', '.join(row.name for row in listed)}"
        )
    started, results, folder = (
        circumstances(),
        {},
        arguments.folder or Path(tempfile.mkdtemp(prefix="gpu_studies-")),
    )
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"rows": wanted, "data_root": arguments.data_root, "limit": arguments.limit}
    print(f"studies are in {folder}", flush=True)
    for row in listed:
        if row.name not in wanted:
            continue
        print(f"{row.name}: {' '.join(row.arguments)}", flush=True)
        found = results[row.name] = run_row(
            replace(row, limit_seconds=min(row.limit_seconds, arguments.limit or math.inf)), folder
        )
        found["holds"] = (
            found["exit_code"] == 0 and bool(row.holds(found)) and not found["left_on_gpu"]
        )
        shown = {
            key: found[key]
            for key in (
                "exit_code",
                "wall_seconds",
                "outcomes",
                "search_seconds",
                "speed_up",
                "left_on_gpu",
            )
            if key in found
        }
        print(f"  {'holds' if found['holds'] else 'DOES NOT HOLD'}: {shown}", flush=True)
        if not found["holds"]:
            print("\n".join(f"    {line}" for line in found["said"]), flush=True)
        print(
            f"  {write_result(arguments.name, started=started, settings=settings, result=results)}",
            flush=True,
        )
    return 0 if all(found["holds"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
