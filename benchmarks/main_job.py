"""How often does the main job end with a gain, how large is it, and how long does it take? ``python
-m benchmarks.main_job``.

Whole studies, ``python -m autotune experiment=cnn study.seed=1, 2, ...``, one after the other and
nothing beside them, from the command to the prompt. What the first ``--later-studies`` of them
export is trained again by ``python -m autotune train`` on ``--later-runs`` other seeds, and what a
success costs there is held against what the study claimed.

Exit code 1: fewer than nineteen of twenty (95% of any number) confirm a gain whose interval
excludes 1, one ends with the baseline, the geometric mean of the ratios is below 2.5, the median
wall clock above 80 s, confirmation takes more than 40% of it, or claims differ from later runs by
more than 7% (geometric mean), or by less but with an interval (Student's, over studies) that
excludes 1. With ``--equal`` all configurations of the space are equal, and it is 1 where more than
5% of the studies confirm a gain.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, median, stdev
from typing import Any

from scipy.special import stdtrit

from autotune.confirm.statistics import RunScore, expected_score
from benchmarks.measuring import circumstances, write_result

_LEARNING_RATE = 0.01
"""Learning rate of the shipped baselines on digits."""
_FIRST_SEED = 20_000
"""Seed of the first later run; no study uses it."""
_PHASES = re.compile(r"phases: build ([\d.]+) s, prepare ([\d.]+) s, train ([\d.]+) s")
_NUM_TRAININGS = 100
"""Number of trainings over which the build seconds of a process are spread, as in
``conf/objective/time.yaml``."""


def run(experiment: str, seed: int, overrides: list[str], num_later_runs: int) -> dict[str, Any]:
    """Run one study and its later runs; return the study's row of the result."""
    with tempfile.TemporaryDirectory(
        prefix="autotune-main-job-", ignore_cleanup_errors=True
    ) as folder:
        command = [
            sys.executable,
            "-m",
            "autotune",
            f"experiment={experiment}",
            "study.name=study",
            f"study.folder={folder}",
            f"study.seed={seed}",
            f"tracking.uri=sqlite:///{folder}/mlflow.db",
            *overrides,
        ]
        began = time.monotonic()
        confirming_at = None
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if confirming_at is None and line.startswith("confirmation run"):
                    confirming_at = time.monotonic()
        ended = time.monotonic()
        path = Path(folder) / "study" / "best.json"
        best = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        later = [] if best is None else [*later_runs(folder, num_later_runs)]
    if process.returncode not in (0, 3):
        raise RuntimeError(f"autotune ended with {process.returncode}:\n{''.join(lines[-20:])}")
    speed_up = best["speed_up"] if best is not None else None
    return {
        "seed": seed,
        "wall_seconds": ended - began,
        "confirmation_seconds": 0.0 if confirming_at is None else ended - confirming_at,
        "num_confirmation_runs": sum(
            bool(re.match(r"confirmation run \d", line)) for line in lines
        ),
        "is_baseline_best": speed_up is None,
        "speed_up": speed_up,
        "baseline": None if best is None else best["baseline"]["expected_seconds"],
        "best": None if best is None else best["best"]["expected_seconds"],
        "later_expected_seconds": expected_score(later),
        "later_runs": later,
    }


def later_runs(folder: str, num_runs: int) -> Iterator[RunScore]:
    """Train the configuration that a folder's study found as a user would: exported, by name, in
    a new process each time.
    """
    if num_runs:
        exported = _autotune(
            "export",
            "study=study",
            "as=found",
            f"folder={folder}",
            "--config-dir",
            f"{folder}/conf",
        )
        if exported.returncode:
            raise RuntimeError(
                f"autotune export ended with {exported.returncode}:\n{exported.stderr[-2000:]}"
            )
    for number in range(num_runs):
        said = _autotune(
            "train",
            "experiment=found",
            f"seed={_FIRST_SEED + number}",
            "--config-dir",
            f"{folder}/conf",
        )
        phases = _PHASES.search(said.stdout)
        if phases is None:
            raise RuntimeError(
                "autotune train ended with"
                f" {said.returncode}:\n{said.stdout[-1000:]}\n{said.stderr[-2000:]}"
            )
        build, prepare, train = map(float, phases.groups())
        yield RunScore(build / _NUM_TRAININGS + prepare + train, reached=said.returncode == 0)


def _autotune(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune", command, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def claims_over_later(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds that studies claimed for their exports over those of later runs: the geometric mean,
    with a 95% interval.

    Empty with fewer than two studies; the ratio is 0 if an exported configuration never reached the
    target later.
    """
    both = [
        (row["best"], row["later_expected_seconds"])
        for row in rows
        if row["best"] and row["later_expected_seconds"]
    ]
    if len(both) < 2:
        return {}
    if any(math.isinf(later) for _, later in both):
        return {
            "claim_over_later": 0.0,
            "claim_over_later_low": 0.0,
            "claim_over_later_high": 0.0,
            "num_claims": len(both),
        }
    logarithms = [math.log(claimed / later) for claimed, later in both]
    reach = float(stdtrit(len(both) - 1, 0.975)) * stdev(logarithms) / math.sqrt(len(both))
    mean = fmean(logarithms)
    return {
        "claim_over_later": math.exp(mean),
        "claim_over_later_low": math.exp(mean - reach),
        "claim_over_later_high": math.exp(mean + reach),
        "num_claims": len(both),
    }


def _gain(speed_up: Mapping[str, Any] | None) -> str:
    if speed_up is None:
        return "the baseline"
    high = "no end" if speed_up["high"] is None else f"{speed_up['high']:.2f}"
    return f"{speed_up['ratio']:.2f}x [{speed_up['low']:.2f}, {high}]"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.main_job", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--experiment", default="cnn")
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument(
        "--first-seed", type=int, default=1, help="of the first study; the next ones count on (1)"
    )
    parser.add_argument(
        "--later-runs",
        type=int,
        default=0,
        help="trainings of what a study exported, on other seeds (0)",
    )
    parser.add_argument(
        "--later-studies", type=int, default=10, help="studies of which it is trained again (10)"
    )
    parser.add_argument(
        "--equal", action="store_true", help="search a space in which all configurations are equal"
    )
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.equal:
        arguments.overrides += [
            "search_space=[]",
            f"optimizer.lr=interval({_LEARNING_RATE},{_LEARNING_RATE + 1e-9})",
        ]
    started = circumstances()
    rows = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.studies):
        num_later_runs = arguments.later_runs if len(rows) < arguments.later_studies else 0
        rows.append(run(arguments.experiment, seed, arguments.overrides, num_later_runs))
        row = rows[-1]
        print(
            f"seed {seed}: {_gain(row['speed_up'])}, {row['wall_seconds']:.0f} s,"
            f" {row['confirmation_seconds']:.0f} s of them to confirm"
            + (
                f"; claimed {row['best']:.3g} s, later {row['later_expected_seconds']:.3g} s"
                if row["later_expected_seconds"]
                else ""
            ),
            flush=True,
        )
    gains = [row["speed_up"]["ratio"] for row in rows if row["speed_up"] is not None]
    found = {
        "confirmed": sum(
            row["speed_up"] is not None and row["speed_up"]["low"] > 1 for row in rows
        ),
        "baseline_best": sum(row["is_baseline_best"] for row in rows),
        "geometric_mean": geometric_mean(gains) if gains else math.nan,
        "median_wall_seconds": median(row["wall_seconds"] for row in rows),
        "confirmation_share": (
            sum(row["confirmation_seconds"] for row in rows)
            / sum(row["wall_seconds"] for row in rows)
        ),
        **claims_over_later(rows),
    }
    print(", ".join(f"{name} {value:.3g}" for name, value in found.items()) + f" (n={len(rows)})")
    print(
        write_result(
            f"main_job_{arguments.experiment}{'_equal' if arguments.equal else ''}",
            started=started,
            settings=vars(arguments),
            result={**found, "studies": rows},
        )
    )
    if arguments.equal:
        return 0 if found["confirmed"] <= 0.05 * len(rows) else 1
    is_often = found["confirmed"] >= 0.95 * len(rows) and found["baseline_best"] == 0
    is_true = not arguments.later_runs or (
        1 / 1.07 <= found.get("claim_over_later", math.nan) <= 1.07
        and found["claim_over_later_low"] <= 1 <= found["claim_over_later_high"]
    )
    is_quick = found["median_wall_seconds"] <= 80 and found["confirmation_share"] <= 0.4
    return 0 if is_often and is_quick and is_true and found["geometric_mean"] >= 2.5 else 1


if __name__ == "__main__":
    sys.exit(main())
