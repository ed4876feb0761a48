"""How often does the main job end with a gain, how large is it, and how long does it take? ``python -m benchmarks.main_job``.

Whole studies, ``python -m autotune experiment=cnn study.seed=1, 2, ...``, one after the other and nothing beside them, from the command to
the prompt. Exit code 1: fewer than nineteen of twenty (95% of any number) confirm a gain whose interval excludes 1, one ends with
the baseline, the geometric mean of the ratios is below 2.5, the median wall clock above 80 s, or confirmation takes more than 40% of it.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.measuring import circumstances, write_result


def run(experiment: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One study; its row of the table."""
    with tempfile.TemporaryDirectory(prefix="autotune-main-job-", ignore_cleanup_errors=True) as folder:
        command = [
            sys.executable, "-m", "autotune", f"experiment={experiment}", "study.name=study", f"study.folder={folder}",
            f"study.seed={seed}", f"tracking.uri=sqlite:///{folder}/mlflow.db", *overrides,
        ]  # fmt: skip
        began = time.monotonic()
        confirming_at = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if confirming_at is None and line.startswith("confirmation run"):
                    confirming_at = time.monotonic()
        ended = time.monotonic()
        path = Path(folder) / "study" / "best.json"
        best = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if process.returncode not in (0, 3):
        raise RuntimeError(f"autotune ended with {process.returncode}:\n{''.join(lines[-20:])}")
    speed_up = best["speed_up"] if best is not None else None
    return {
        "seed": seed,
        "wall_seconds": ended - began,
        "confirmation_seconds": 0.0 if confirming_at is None else ended - confirming_at,
        "num_confirmation_runs": sum(bool(re.match("confirmation run", line)) for line in lines),
        "is_baseline_best": speed_up is None,
        "speed_up": speed_up,
        "baseline": None if best is None else best["baseline"]["expected_seconds"],
        "best": None if best is None else best["best"]["expected_seconds"],
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.main_job", description=__doc__.partition("\n")[0])
    parser.add_argument("--experiment", default="cnn")
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    started = circumstances()
    rows = []
    for seed in range(1, arguments.studies + 1):
        rows.append(run(arguments.experiment, seed, arguments.overrides))
        row = rows[-1]
        gain = "the baseline" if row["speed_up"] is None else "{ratio:.2f}x [{low:.2f}, {high}]".format(**row["speed_up"])
        print(f"seed {seed}: {gain}, {row['wall_seconds']:.0f} s, {row['confirmation_seconds']:.0f} s of them to confirm", flush=True)
    gains = [row["speed_up"]["ratio"] for row in rows if row["speed_up"] is not None]
    found = {
        "confirmed": sum(row["speed_up"] is not None and row["speed_up"]["low"] > 1 for row in rows),
        "baseline_best": sum(row["is_baseline_best"] for row in rows),
        "geometric_mean": geometric_mean(gains) if gains else math.nan,
        "median_wall_seconds": median(row["wall_seconds"] for row in rows),
        "confirmation_share": sum(row["confirmation_seconds"] for row in rows) / sum(row["wall_seconds"] for row in rows),
    }
    print(", ".join(f"{name} {value:.3g}" for name, value in found.items()) + f" (n={len(rows)})")
    print(write_result(f"main_job_{arguments.experiment}", started=started, settings=vars(arguments), result={**found, "studies": rows}))
    is_often = found["confirmed"] >= 0.95 * len(rows) and found["baseline_best"] == 0
    is_quick = found["median_wall_seconds"] <= 80 and found["confirmation_share"] <= 0.4
    return 0 if is_often and is_quick and found["geometric_mean"] >= 2.5 else 1


if __name__ == "__main__":
    sys.exit(main())
