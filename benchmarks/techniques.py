"""What do transfer, distillation and pruning bring in time to target? ``python -m
benchmarks.techniques``.

Both sides of a pair train the same model on the same data from the same seed to the same target, in
turn in one process on one torch thread, the side that goes first alternating. Each comparison is
made twice: with the experiment's own settings, and with the rate and schedule (or its length) that
suit each side best, picked from one grid for both, on seeds of their own. Time to target is warm:
prepare and train. What a technique starts from is trained once beforehand and told apart.

There is no claim to hold: whatever comes out is written down. Exit code 0.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.confirm.statistics import RunScore, in_turns, ratio_of_expected_scores
from autotune.outcome import Outcome
from autotune.training.loop import train
from autotune.training.sources import train_missing_sources
from benchmarks.measuring import circumstances, write_result

_FIRST_SEED, _FIRST_PICKING_SEED = 1_000, 2_000
_RATES = tuple(f"optimizer.lr={rate}" for rate in (0.01, 0.02, 0.04, 0.08))
_SCHEDULES, _LENGTHS = ("lr_schedule=constant", "lr_schedule=one_cycle"), ("epochs=8", "epochs=20")


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Two configurations with the same target, without and with a technique: overrides of an
    experiment.
    """

    common: tuple[str, ...]
    without: tuple[str, ...]
    having: tuple[str, ...]
    beside_rate: tuple[str, ...] = _SCHEDULES
    """Overrides from which each side may choose one, besides its learning rate."""


_FROM_DIGITS = ("technique=transfer", "technique.source=digits_source")
_FROM_TEACHER = (
    "technique=distillation",
    "technique.source=digits_teacher",
    "technique.temperature=4.0",
    "technique.mix=0.9",
)
COMPARISONS = {
    "transfer": Sides(
        common=("experiment=transfer",),
        without=(),
        having=(*_FROM_DIGITS, "technique.unfreeze_at=0.0"),
    ),
    "transfer_frozen_at_first": Sides(
        common=("experiment=transfer",),
        without=(),
        having=(*_FROM_DIGITS, "technique.unfreeze_at=0.05"),
    ),
    "distillation": Sides(common=("experiment=distill",), without=(), having=_FROM_TEACHER),
    "distillation_near_the_ceiling": Sides(
        common=("experiment=distill", "target.value=0.97"), without=(), having=_FROM_TEACHER
    ),
    "pruning_over_dense": Sides(
        common=("experiment=prune",), without=("technique=none",), having=(), beside_rate=_LENGTHS
    ),
    "pruning_over_pruned_at_the_start": Sides(
        common=("experiment=prune",),
        without=(
            "technique.start_fraction=0.0",
            "technique.end_fraction=0.0",
            "technique.num_prunings=1",
        ),
        having=(),
        beside_rate=_LENGTHS,
    ),
    "pruning_half_of_the_filters_over_dense": Sides(
        common=("experiment=prune",),
        without=("technique=none",),
        having=("technique.structured=true", "technique.sparsity=0.5"),
        beside_rate=_LENGTHS,
    ),
}


def run(config: TrialConfig, seed: int) -> RunScore:
    """Train once, to the target or to the end of the schedule or of the time."""
    *_, last = train(replace(config, seed=seed), num_threads=1)
    return RunScore(last.warm_seconds, last.outcome is Outcome.REACHED)


def grid(
    composer: Composer, overrides: Sequence[str], beside_rate: Sequence[str]
) -> dict[str, TrialConfig]:
    """The configurations of a side at all points of the grid, by the overrides of the point."""
    points = itertools.product(_RATES, beside_rate)
    return {" ".join(point): composer.compose([*overrides, *point]).trial for point in points}


def best_of(configs: Mapping[str, TrialConfig], num_seeds: int) -> str:
    """Name of the point that reaches the target most often.

    Among equals, of the one with the least median time.
    """

    def rank(name: str) -> tuple[int, float]:
        runs = [run(configs[name], _FIRST_PICKING_SEED + number) for number in range(num_seeds)]
        return -sum(score.reached for score in runs), median(
            score.seconds or math.inf for score in runs
        )

    return min(configs, key=rank)


def compare(without: TrialConfig, having: TrialConfig, num_pairs: int) -> dict[str, Any]:
    """Run all pairs; return the ratio of the sides, and the runs of both."""
    runs: tuple[list[RunScore], list[RunScore]] = ([], [])
    for side, config in enumerate((without, having)):
        # not counted: it has the work that a process does only once
        run(config, _FIRST_SEED - 1 - side)
    for side, number in in_turns(2, num_pairs):
        runs[side].append(run((without, having)[side], _FIRST_SEED + number))
    return {
        "without_over_having": ratio_of_expected_scores(*runs),
        "without": _told(runs[0]),
        "having": _told(runs[1]),
    }


def _told(runs: Sequence[RunScore]) -> dict[str, Any]:
    return {
        "num_reached": sum(score.reached for score in runs),
        "num_runs": len(runs),
        "seconds_median": median(score.seconds or 0.0 for score in runs),
        "seconds": [score.seconds for score in runs],
        "reached": [score.reached for score in runs],
    }


def _relative(settings: Any) -> Any:
    """Settings with paths relative to the current folder where they lie in it."""
    if isinstance(settings, Mapping):
        return {key: _relative(value) for key, value in settings.items()}
    return settings.removeprefix(f"{Path.cwd()}/") if isinstance(settings, str) else settings


def measure(name: str, *, num_pairs: int, num_picking_seeds: int) -> dict[str, Any]:
    """Make one comparison twice: with the experiment's own settings, and with the best settings
    of each side.
    """
    sides, said = COMPARISONS[name], list[str]()
    composer = Composer([*sides.common, "device=cpu", "target.max_train_seconds=600"])
    overrides = {"without": sides.without, "having": sides.having}
    configs = {side: composer.compose(own).trial for side, own in overrides.items()}
    train_missing_sources(composer, said.append)
    told = {side: _relative(config.as_dict()) for side, config in configs.items()}
    found: dict[str, Any] = {"sides": sides, "sources": said, "configs": told}
    found["same_settings"] = compare(configs["without"], configs["having"], num_pairs)
    _print(name, "same settings", found["same_settings"])
    grids = {side: grid(composer, own, sides.beside_rate) for side, own in overrides.items()}
    found["best"] = {side: best_of(points, num_picking_seeds) for side, points in grids.items()}
    found["best_settings"] = compare(
        *(grids[side][found["best"][side]] for side in ("without", "having")), num_pairs
    )
    _print(name, "each side's best", found["best_settings"])
    print(f"{'':40s} {found['best']['without']} | {found['best']['having']}", flush=True)
    return found


def _print(name: str, settings: str, found: Mapping[str, Any]) -> None:
    told = (
        f"{found[side]['num_reached']}/{found[side]['num_runs']} in"
        f" {found[side]['seconds_median']:.3g} s"
        for side in ("without", "having")
    )
    print(
        f"{name:40s} {settings:18s} without / having {found['without_over_having']}  "
        f" {' | '.join(told)}",
        flush=True,
    )


def main() -> int:
    """Measure all comparisons, print and write them, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.techniques", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--comparisons", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--pairs", type=int, default=20, help="interleaved pairs to measure")
    parser.add_argument(
        "--picking-seeds", type=int, default=10, help="trainings of each point of the grid"
    )
    arguments = parser.parse_args()
    started = circumstances()
    results = {
        name: measure(name, num_pairs=arguments.pairs, num_picking_seeds=arguments.picking_seeds)
        for name in arguments.comparisons
    }
    path = write_result(
        "techniques",
        started=started,
        settings={**vars(arguments), "num_threads": 1},
        result=results,
    )
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
