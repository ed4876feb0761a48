"""Does a stand-alone script train as fast as autotune says? ``python -m benchmarks.standalone``.

A study of each experiment ends with ``best.py``. The script then runs in turn with ``python -m
autotune train`` of the exported experiment, on the same seeds, each run in a new process, the side
that goes first alternating. The script's process finds torch and scikit-learn, with what these two
require, and no other package.

Exit code 0: for every experiment both sides end alike on every seed, and the median over the pairs
of the script's seconds to target over autotune's is at most 1.15; 1: for one it is not. The ratio
to what the study claimed is printed beside it: it holds other seeds as well.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from autotune.confirm.statistics import Ratio, RunScore, expected_score
from benchmarks.measuring import circumstances, median_of_ratios, write_result

MAX_RATIO = 1.15
PACKAGES = ("torch", "scikit-learn")
_FIRST_SEED = 30_000
"""Seed of the first pair; no study uses it."""
_SECONDS = re.compile(r"time to target: (?:warm )?([\d.]+) s")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run of the script and one of autotune, with the same seed."""

    seed: int
    script_first: bool
    script_seconds: float | None
    """Seconds to target; None if it was not reached."""
    autotune_seconds: float | None
    """Seconds to target by ``autotune train``; None if it was not reached."""


def only(packages: tuple[str, ...], folder: Path) -> Path:
    """Fill a folder with links to the installed files of some packages and of all that these
    require.
    """
    waiting, found = [*packages], set()
    while waiting:
        name = waiting.pop()
        try:
            files = distribution(name)
        except PackageNotFoundError:
            continue
        if files.metadata["Name"] in found:
            continue
        found.add(files.metadata["Name"])
        requirements = [Requirement(text) for text in files.requires or ()]
        waiting += [
            needed.name
            for needed in requirements
            if needed.marker is None or needed.marker.evaluate({"extra": ""})
        ]
        for top in {
            path.parts[0]
            for path in files.files or ()
            if path.parts[0] not in ("..", "__pycache__")
        }:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(files.locate_file(top))).resolve())
    return folder


def study(experiment: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Run one study, export what it found as an experiment, and return its ``best.json``.

    Raises:
        RuntimeError: the study did not end with a script.
    """
    said = _autotune(
        f"experiment={experiment}",
        f"study.name={experiment}",
        f"study.folder={folder}",
        "tracking=none",
        *overrides,
    )
    if not (folder / experiment / "best.py").is_file():
        raise RuntimeError(
            f"the study ended with {said.returncode} and without"
            f" best.py:\n{said.stdout[-2000:]}\n{said.stderr[-2000:]}"
        )
    _autotune(
        "export",
        f"study={experiment}",
        f"as={experiment}_found",
        f"folder={folder}",
        "--config-dir",
        f"{folder}/conf",
    )
    best: dict[str, Any] = json.loads(
        (folder / experiment / "best.json").read_text(encoding="utf-8")
    )
    return best


def run_pair(experiment: str, folder: Path, number: int) -> Pair:
    """Train once by the script and once by autotune, the first of them in turn."""
    seed, script_first = _FIRST_SEED + number, number % 2 == 0
    seconds: dict[str, float | None] = {}
    for side in ("script", "autotune") if script_first else ("autotune", "script"):
        if side == "script":
            environment = {**os.environ, "PYTHONPATH": str(folder / "packages")}
            command = [
                sys.executable,
                "-S",
                "-s",
                str(folder / experiment / "best.py"),
                "--seed",
                str(seed),
            ]
            said = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, cwd=folder
            )
        else:
            said = _autotune(
                "train",
                f"experiment={experiment}_found",
                f"seed={seed}",
                "--config-dir",
                f"{folder}/conf",
            )
        if said.returncode not in (0, 3):
            raise RuntimeError(
                f"{side} of {experiment} ended with"
                f" {said.returncode}:\n{said.stdout[-1000:]}\n{said.stderr[-2000:]}"
            )
        found = _SECONDS.search(said.stdout)
        seconds[side] = float(found[1]) if found else None
    return Pair(
        seed=seed,
        script_first=script_first,
        script_seconds=seconds["script"],
        autotune_seconds=seconds["autotune"],
    )


def _autotune(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune", *arguments], capture_output=True, text=True, check=False
    )


def _expected(pairs: list[Pair], max_seconds: float) -> float | None:
    """Expected seconds to target of the script.

    A run that missed it counts with the most that a run may take.
    """
    return expected_score(
        [
            RunScore(pair.script_seconds or max_seconds, reached=pair.script_seconds is not None)
            for pair in pairs
        ]
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.standalone", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--experiments", default="cnn,mlp,transformer")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("overrides", nargs="*", help="of the studies, such as search.num_trials=4")
    options = parser.parse_args()
    started, rows = circumstances(), []
    with tempfile.TemporaryDirectory(
        prefix="autotune-standalone-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        (folder / "packages").mkdir()
        only(PACKAGES, folder / "packages")
        for experiment in options.experiments.split(","):
            best = study(experiment, folder, options.overrides)
            pairs = [run_pair(experiment, folder, number) for number in range(options.pairs)]
            both = [
                (pair.script_seconds, pair.autotune_seconds)
                for pair in pairs
                if pair.script_seconds and pair.autotune_seconds
            ]
            ratio: Ratio | None = median_of_ratios(*zip(*both, strict=True)) if both else None
            end_alike = all(
                (pair.script_seconds is None) == (pair.autotune_seconds is None) for pair in pairs
            )
            claimed, expected = (
                best["best"]["expected_seconds"],
                _expected(pairs, best["target"]["max_train_seconds"]),
            )
            rows.append(
                {
                    "experiment": experiment,
                    "overrides": best["overrides"],
                    "ratio": ratio,
                    "end_alike": end_alike,
                    "pairs": pairs,
                    "claimed_seconds": claimed,
                    "script_expected_seconds": expected,
                }
            )
            print(
                f"{experiment}: script over autotune {ratio}; reached by {len(both)} of"
                f" {len(pairs)}, both sides alike: {end_alike}; expected {expected:.3f} s, claimed"
                f" {claimed:.3f} s",
                flush=True,
            )
    settings = {"pairs": options.pairs, "overrides": options.overrides, "packages": PACKAGES}
    result = {"experiments": rows}
    written = write_result("standalone", started=started, settings=settings, result=result)
    print(f"wrote {written}")
    return (
        0
        if all(
            row["end_alike"] and row["ratio"] and row["ratio"].ratio <= MAX_RATIO for row in rows
        )
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
