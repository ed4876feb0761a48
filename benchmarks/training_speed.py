"""How much faster is autotune's loop than a textbook's? ``python -m benchmarks.training_speed``.

Both sides train the same model on the same data from the same seed for the same number of steps,
samples in the same order, in turn in one process, the side that goes first alternating. The
textbook's loop is ``benchmarks/textbook.py``; autotune's is ``autotune.training.loop.train`` with
the configuration as it stands: what is measured is the loop, not a better recipe. Both have torch's
own number of threads. Two claims are checked, over the pairs:

* the textbook's seconds are at least 1.5 times autotune's prepare and train seconds (median of
  ratios);
* the accuracy is equal: the mean difference on the test split is at most half a point.

Exit code 0: both hold; 1: one does not.
"""

import argparse
import sys
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch.utils.data import TensorDataset

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.training.components import make_components
from autotune.training.data import load_data
from autotune.training.device import pick_device, seed_everything
from autotune.training.loop import train
from autotune.training.set_up import num_steps
from benchmarks.measuring import circumstances, median_of_ratios, write_result
from benchmarks.textbook import TextbookTraining

MIN_RATIO = 1.5
MAX_ACCURACY_DIFFERENCE = 0.005
WORKLOADS = {
    "digits": ["experiment=cnn", "epochs=20"],
    "fashion_mnist": ["experiment=cnn_fashion", "epochs=1"],
    "cifar10": ["experiment=cnn_cifar10", "epochs=1"],
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One training by the textbook's loop and one by autotune's, back to back."""

    textbook_first: bool
    textbook_seconds: float
    own_seconds: float
    textbook_accuracy: float
    own_accuracy: float


def train_textbook(config: TrialConfig, num_workers: int) -> tuple[float, float]:
    """Train by the textbook's loop; return its seconds and test accuracy."""
    data, device = load_data(config), pick_device(config.device)
    assert data.test is not None
    seed_everything(config.seed)
    parts = make_components(config, data, device, num_steps(config, data))
    training = TextbookTraining(
        model=parts.model,
        optimizer=parts.optimizer,
        schedule=parts.schedule,
        loss=parts.loss,
        batch_size=config.batch_size,
        epochs=round(config.epochs),
        num_workers=num_workers,
        seed=config.seed,
        device=device,
        autocast_dtype=None,
    )
    seconds = training.train(TensorDataset(data.transform(data.train.inputs), data.train.targets))
    return seconds, training.accuracy(data.transform(data.test.inputs), data.test.targets)


def train_function(config: TrialConfig, num_threads: int) -> tuple[float, float]:
    """Train by autotune's loop; return its prepare and train seconds, and its test accuracy."""
    training = train(config, num_threads=num_threads, score_test=True)
    last = next(training)  # the only one: at the end
    try:
        next(training)
    except StopIteration as ended:
        return last.warm_seconds, float(ended.value)
    raise RuntimeError("evaluated more than once")


def measure_pair(
    config: TrialConfig, *, num_workers: int, num_threads: int, textbook_first: bool
) -> Pair:
    """Run both sides once."""
    if textbook_first:
        textbook, own = train_textbook(config, num_workers), train_function(config, num_threads)
    else:
        own, textbook = train_function(config, num_threads), train_textbook(config, num_workers)
    return Pair(
        textbook_first=textbook_first,
        textbook_seconds=textbook[0],
        own_seconds=own[0],
        textbook_accuracy=textbook[1],
        own_accuracy=own[1],
    )


def measure(workload: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all pairs of a workload.

    Return them with the ratio and the difference of accuracies.
    """
    endless = [
        "target.value=2",
        "target.max_train_seconds=36000",
        "evaluate_every_samples=1000000000",
    ]
    root = [f"data.root={arguments.data_root}"] if workload != "digits" else []
    composer = Composer(
        [*WORKLOADS[workload], *root, *endless, f"device={arguments.device}", *arguments.overrides]
    )
    threads = torch.get_num_threads()
    pairs = []
    # the first is not counted: it has the work that a process does only once
    for number in range(-1, arguments.pairs):
        config = composer.compose([f"seed={max(number, 0)}"]).trial
        torch.set_num_threads(threads)
        pair = measure_pair(
            config,
            num_workers=arguments.workers,
            num_threads=threads,
            textbook_first=number % 2 == 0,
        )
        pairs += [pair] if number >= 0 else []
    ratio = median_of_ratios(
        [pair.textbook_seconds for pair in pairs], [pair.own_seconds for pair in pairs]
    )
    difference = fmean(pair.own_accuracy - pair.textbook_accuracy for pair in pairs)
    print(f"{workload:14s} textbook / autotune  {ratio}")
    print(
        f"{'':14s} test accuracy        {fmean(pair.textbook_accuracy for pair in pairs):.4f}"
        f" textbook, {fmean(pair.own_accuracy for pair in pairs):.4f} autotune (difference"
        f" {difference:+.4f})"
    )
    return {
        "ratio": ratio,
        "accuracy_difference": difference,
        "textbook_seconds_median": median(pair.textbook_seconds for pair in pairs),
        "own_seconds_median": median(pair.own_seconds for pair in pairs),
        "num_threads": threads,
        "config": composer.compose().trial.as_dict(),
        "pairs": pairs,
    }


def main() -> int:
    """Measure all pairs, print and write them, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_speed", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=["digits"],
        help="the others read --data-root",
    )
    parser.add_argument("--data-root", default="data", help="folder of the official files")
    parser.add_argument("--pairs", type=int, default=10, help="interleaved pairs to measure")
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of the textbook's DataLoader"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("overrides", nargs="*", help="of the configuration, for both sides")
    arguments = parser.parse_args()
    started = circumstances()
    results = {workload: measure(workload, arguments) for workload in arguments.workloads}
    holds = {
        f"{workload}: textbook / autotune at least {MIN_RATIO}": result["ratio"].ratio >= MIN_RATIO
        for workload, result in results.items()
    } | {
        f"{workload}: accuracy equal within {MAX_ACCURACY_DIFFERENCE}": (
            abs(result["accuracy_difference"]) <= MAX_ACCURACY_DIFFERENCE
        )
        for workload, result in results.items()
    }
    path = write_result(
        "training_speed",
        started=started,
        settings=vars(arguments),
        result={"workloads": results, "holds": holds},
    )
    for claim, held in holds.items():
        print(f"{'holds' if held else 'FAILS'}: {claim}")
    print(f"written to {path}")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
