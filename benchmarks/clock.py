"""Does measuring slow the training down, and does the clock account for all of it? ``python -m
benchmarks.clock``.

The same training runs as a bare PyTorch loop and under ``autotune.training.loop.train``, in turn in
one process on one torch thread, the side that goes first alternating. Two claims are checked:

* autotune's reported train seconds are at most 1.02 times the bare loop's, as a median over the
  pairs;
* its four phases (build, prepare, train, evaluate) sum to the wall clock around the training within
  1%, in every run.

Exit code 0: both hold; 1: one does not.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from statistics import median

import torch

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation
from autotune.training.loop import train
from autotune.workloads.images import digits
from benchmarks.measuring import circumstances, median_of_ratios, write_result
from benchmarks.plain_training import Settings, train_plain

MAX_TRAIN_RATIO = 1.02
MAX_UNACCOUNTED_FRACTION = 0.01
_SAMPLES_OF_TEN_EPOCHS = 11_970


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One bare training and one under autotune, back to back."""

    bare_first: bool
    bare_train_seconds: float
    train_seconds: float
    wall_seconds: float
    """Wall-clock seconds around autotune's whole training."""
    phase_seconds: float
    """Sum of the four phases of autotune's training."""

    @property
    def unaccounted_fraction(self) -> float:
        """Share of the wall clock that belongs to no phase.

        Negative if the phases sum to more than the wall clock.
        """
        return 1 - self.phase_seconds / self.wall_seconds


def settings_of(config: TrialConfig) -> Settings:
    """Settings of the plain training that does the same as a configuration's training."""
    return Settings(
        lr=config.optimizer["lr"],
        momentum=config.optimizer["momentum"],
        weight_decay=config.optimizer["weight_decay"],
        lr_schedule="cosine",
        norm=config.model["norm"],
        widths=tuple(config.model["widths"]),
        batch_size=config.batch_size,
        epochs=int(config.epochs),
        evaluate_every_samples=config.evaluate_every_samples or 0,
        seed=config.seed,
    )


def measure_pair(config: TrialConfig, *, bare_first: bool) -> Pair:
    """Run both sides once.

    Raises:
        RuntimeError: the sides end with different metrics or losses, so they did not do the same
            training.
    """
    if bare_first:
        bare_train_seconds, bare_end = _run_bare(config)
        last, wall_seconds = _run_timed(config)
    else:
        last, wall_seconds = _run_timed(config)
        bare_train_seconds, bare_end = _run_bare(config)
    if not (
        math.isclose(last.metric, bare_end[0], rel_tol=1e-6)
        and math.isclose(last.loss, bare_end[1], rel_tol=1e-5)
    ):
        raise RuntimeError(
            f"not the same training: {last.metric, last.loss} under autotune, {bare_end} bare"
        )
    phase_seconds = (
        last.build_seconds + last.prepare_seconds + last.train_seconds + last.evaluate_seconds
    )
    return Pair(
        bare_first=bare_first,
        bare_train_seconds=bare_train_seconds,
        train_seconds=last.train_seconds,
        wall_seconds=wall_seconds,
        phase_seconds=phase_seconds,
    )


def _run_bare(config: TrialConfig) -> tuple[float, tuple[float, float]]:
    """Run the bare loop; return its train seconds, and its last accuracy and loss."""
    evaluations: list[tuple[float, float]] = []
    train_seconds = train_plain(
        settings_of(config), digits(), lambda metric, loss: evaluations.append((metric, loss))
    )
    return train_seconds, evaluations[-1]


def _run_timed(config: TrialConfig) -> tuple[Evaluation, float]:
    """Run autotune's loop.

    Return its last evaluation, and the wall-clock seconds around the whole training.
    """
    began = time.perf_counter()
    last = None
    for last in train(config, num_threads=1):  # noqa: B007  # only the last evaluation is used
        pass
    wall_seconds = time.perf_counter() - began
    assert last is not None
    return last, wall_seconds


def main() -> int:
    """Measure all pairs, print and write them, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clock", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--pairs", type=int, default=40, help="interleaved pairs to measure")
    parser.add_argument(
        "--epochs",
        type=int,
        default=50,
        help="length of each training; choose it so that one takes a second or two",
    )
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    overrides = [
        "lr_schedule=cosine",
        f"epochs={arguments.epochs}",
        f"evaluate_every_samples={_SAMPLES_OF_TEN_EPOCHS}",
    ]
    # neither target nor time ends a training early
    endless = ["target.value=2", "target.max_train_seconds=3600"]
    config = Composer(["experiment=cnn", "device=cpu", *overrides, *endless]).compose().trial
    started = circumstances()
    # not counted: it has the work that a process does only once
    measure_pair(config, bare_first=True)
    pairs = [measure_pair(config, bare_first=number % 2 == 0) for number in range(arguments.pairs)]

    ratio = median_of_ratios(
        [pair.train_seconds for pair in pairs], [pair.bare_train_seconds for pair in pairs]
    )
    worst = max((pair.unaccounted_fraction for pair in pairs), key=abs)
    holds = {
        f"train seconds, autotune / bare: at most {MAX_TRAIN_RATIO}": (
            ratio.ratio <= MAX_TRAIN_RATIO
        ),
        f"phases sum to the wall clock within {MAX_UNACCOUNTED_FRACTION:.0%}": (
            abs(worst) <= MAX_UNACCOUNTED_FRACTION
        ),
    }
    path = write_result(
        "clock",
        started=started,
        settings={**vars(arguments), "num_threads": 1, "config": config.as_dict()},
        result={
            "train_ratio": ratio,
            "bare_train_seconds_median": median(pair.bare_train_seconds for pair in pairs),
            "unaccounted_fraction_worst": worst,
            "unaccounted_fraction_median": median(pair.unaccounted_fraction for pair in pairs),
            "holds": holds,
            "pairs": pairs,
        },
    )
    print(f"train seconds, autotune / bare   {ratio}")
    for name, first in (("bare", True), ("autotune", False)):
        ratios = [
            pair.train_seconds / pair.bare_train_seconds
            for pair in pairs
            if pair.bare_first is first
        ]
        if ratios:
            print(f"  {name} first".ljust(33) + f"{median(ratios):.4g} (n={len(ratios)})")
    print(
        f"wall clock outside all phases    {worst:+.3%} at worst,"
        f" {median(pair.unaccounted_fraction for pair in pairs):+.3%} median"
    )
    for claim, held in holds.items():
        print(f"{'holds' if held else 'FAILS'}: {claim}")
    print(f"written to {path}")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
