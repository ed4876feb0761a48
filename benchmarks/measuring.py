"""What every benchmark needs: facts about the machine, and a result file.

On a shared machine absolute times mean nothing, so a benchmark claims ratios: both sides run in
turn, each pair under much the same load, and the spread of the pairs' ratios says how far they can
be trusted (``median_of_ratios``).
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from autotune.confirm.statistics import (
    Ratio,
    RunScore,
    bootstrap_interval,
    ratio_of_expected_scores,
    resampled,
    student_interval,
)
from autotune.training.capabilities import cpu_name, versions

_FEWEST_RESAMPLED = 8
RESULTS = Path(__file__).parent / "results"


def circumstances() -> dict[str, Any]:
    """Facts that a benchmark's numbers depend on, to be taken at its start: date, commit,
    processor, GPU, cores, load average, versions.
    """
    import torch  # --help does without

    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit(),
        "machine": {
            "cpu": cpu_name(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "num_cores": (
                len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            ),
            "load_average": os.getloadavg(),
            "versions": versions(),
        },
    }


def write_result(
    name: str, *, started: Mapping[str, Any], settings: Mapping[str, Any], result: Mapping[str, Any]
) -> Path:
    """Write the result of a benchmark as ``results/<name>-<date>.json``.

    A later run on the same day replaces it.

    ``started`` is the return value of ``circumstances`` from before the run. Dataclasses in
    ``result`` are written as their fields.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{started['date'].partition('T')[0]}.json"
    content = {
        "benchmark": name,
        **started,
        "load_average_at_end": os.getloadavg(),
        "settings": settings,
        "result": result,
    }
    path.write_text(json.dumps(content, indent=1, default=asdict) + "\n", encoding="utf-8")
    return path


def _commit() -> str | None:
    """The checked-out commit, with ``-dirty`` if the package's files differ from it.

    None outside a checkout.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        return (
            f"{commit}-dirty"
            if _git("status", "--porcelain", "--", "autotune", "conf", "search_spaces")
            else commit
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(
        command, cwd=RESULTS.parent.parent, check=True, capture_output=True, text=True
    ).stdout.strip()


def ratio_of_means(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Ratio of two mean times over pairs; numbers at the same index of both sides are a pair.

    Raises:
        ValueError: there is no pair, the sides have different lengths, or a number is not above 0.
    """
    _check(numerators, denominators)
    sides = ([RunScore(each, reached=True) for each in side] for side in (numerators, denominators))
    ratio = ratio_of_expected_scores(*sides)
    assert ratio is not None, "there are pairs of numbers above 0"
    return ratio


def median_of_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Median over pairs of numerator / denominator, which one burst of load does not decide.

    With fewer than eight pairs the interval is that of the geometric mean of the ratios.

    Raises:
        ValueError: there is no pair, the sides have different lengths, or a number is not above 0.
    """
    _check(numerators, denominators)
    ratios = np.array(numerators, dtype=np.float64) / np.array(denominators, dtype=np.float64)
    ratio = float(np.median(ratios))
    if len(ratios) < _FEWEST_RESAMPLED:
        logarithms = np.log(ratios)
        return student_interval(ratio, float(logarithms.mean()), logarithms - logarithms.mean())
    drawn = np.median(ratios[resampled(len(ratios))], axis=1)
    return bootstrap_interval(ratio, drawn, len(ratios))


def _check(numerators: Sequence[float], denominators: Sequence[float]) -> None:
    if len(numerators) != len(denominators) or not numerators:
        counts = f"{len(numerators)} and {len(denominators)}"
        raise ValueError(f"{counts} runs; a ratio needs pairs, and at least one")
    if not (least := min(*numerators, *denominators)) > 0:
        raise ValueError(f"found {least}, a ratio needs numbers above 0")
