"""Are main jobs slower, or what they export, than those of another commit? ``python -m
benchmarks.before_and_after --before CHECKOUT``.

Pairs of whole studies, ``python -m autotune experiment=NAME study.seed=1, 2, ...``, of the code in
``CHECKOUT`` and of this one, in turn, the side that goes first alternating; both with this Python
and its packages. Printed are the ratios after / before of wall clock and of the expected seconds of
what is exported, as each study's confirmation measured them.

Exit code 1: an interval of a ratio lies above 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from autotune.confirm.statistics import in_turns
from benchmarks.measuring import circumstances, median_of_ratios, write_result

HERE = Path(__file__).parent.parent


def run(checkout: Path, experiment: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Run one study of a checkout's code and return its wall seconds, exit code, and what it
    exported.

    Raises:
        RuntimeError: the command failed.
    """
    with tempfile.TemporaryDirectory(
        prefix="autotune-before-after-", ignore_cleanup_errors=True
    ) as folder:
        command = [
            sys.executable,
            "-m",
            "autotune",
            f"experiment={experiment}",
            "study.name=study",
            f"study.seed={seed}",
            *overrides,
        ]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        wall_seconds = time.monotonic() - began
        if done.returncode not in (0, 3):
            raise RuntimeError(
                f"{checkout}: {' '.join(command[1:])}: exit code"
                f" {done.returncode}\n{done.stdout}{done.stderr}"
            )
        path = Path(folder) / "outputs" / "study" / "best.json"
        best = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"best": {}}
    return {
        "seed": seed,
        "exit_code": done.returncode,
        "wall_seconds": wall_seconds,
        "expected_seconds": best["best"].get("expected_seconds"),
        "is_baseline": best.get("trial") == 0,
        "speed_up": best.get("speed_up"),
        "outcomes": best.get("outcomes"),
    }


def main() -> int:
    """Run the pairs, print the ratios after each, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.before_and_after", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--before",
        type=Path,
        required=True,
        help="a checkout of the other commit, as git worktree makes it",
    )
    parser.add_argument("--experiment", default="cnn")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if not (arguments.before / "autotune" / "__main__.py").is_file():
        parser.error(f"--before: {arguments.before} is no checkout of autotune")
    started = circumstances()
    sides = (arguments.before.resolve(), HERE)
    runs: tuple[list[dict[str, Any]], ...] = ([], [])
    ratios: dict[str, Any] = {}
    for side, number in in_turns(2, arguments.pairs):
        runs[side].append(
            run(
                sides[side],
                arguments.experiment,
                arguments.first_seed + number,
                arguments.overrides,
            )
        )
        if len(runs[0]) != len(runs[1]):
            continue
        for key in ("wall_seconds", "expected_seconds"):
            pairs = [
                (after[key], before[key])
                for before, after in zip(*runs, strict=True)
                if after[key] and before[key]
            ]
            if len(pairs) > 1:
                ratios[key] = median_of_ratios(
                    [after for after, _ in pairs], [before for _, before in pairs]
                )
        medians = [median(one["wall_seconds"] for one in of_side) for of_side in runs]
        shown = ", ".join(f"{key} {ratio}" for key, ratio in ratios.items())
        print(
            f"pair {len(runs[0])}: wall {medians[0]:.1f} s before, {medians[1]:.1f} s after;"
            f" {shown}",
            flush=True,
        )
        commits = [
            subprocess.run(
                ["git", "-C", side, "rev-parse", "HEAD"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout.strip()
            for side in sides
        ]
        result = {"commits": commits, "ratios": ratios, "before": runs[0], "after": runs[1]}
        write_result(
            f"before_and_after_{arguments.experiment}",
            started=started,
            settings=vars(arguments) | {"before": None},
            result=result,
        )
    return 1 if any(ratio.low is not None and ratio.low > 1 for ratio in ratios.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
