"""CIFAR-10 to 94% on one GPU, against a textbook's ResNet-9: ``python -m benchmarks.cifar10_speed
--data-root DIR``.

Both sides are held to the protocol of the published speed records: train on all 50,000 images for a
fixed schedule, score the official test images once at its end, and count as having reached 94% when
the *mean* accuracy over fresh seeds is at least that.

* autotune: ``experiment=cifar10_speed``, its prepare and train seconds (set-up, augmentation, every
  step; not loading the data, nor compiling, which one process pays once and which is printed beside
  it).
* textbook: ResNet-9 in autocast by ``benchmarks/textbook.py``: a ``DataLoader`` whose workers crop
  and mirror one image at a time, ``.item()`` at every step, SGD with one cycle; the seconds of its
  loop.

Three claims are checked: the textbook's mean seconds are at least 4 times autotune's, autotune's
median is at most 3.0 s over at least 40 runs, and both sides' mean accuracy is at least 94%. Exit
code 0: all hold; 1: one does not.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from statistics import fmean, median, stdev

import torch
from torch.utils.data import Dataset

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.training.data import load_data
from autotune.training.device import pick_device, seed_everything
from autotune.training.loop import train
from autotune.training.schedules import one_cycle
from autotune.workloads.cnn import ResNet9
from benchmarks.measuring import circumstances, write_result
from benchmarks.textbook import TextbookTraining

TARGET = 0.94
MIN_RATIO = 4.0
MAX_SECONDS = 3.0
FEWEST_RUNS = 40
_PADDING = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: its seconds as the module's docstring counts them for its side, and the
    accuracy at its end.
    """

    seed: int
    seconds: float
    accuracy: float
    build_seconds: float


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Training images as a textbook augments them: one at a time, padded, cropped and mirrored
    at random.
    """

    def __init__(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        self._images = torch.nn.functional.pad(images, (_PADDING,) * 4, mode="reflect")
        self._targets = targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        top, left = (int(torch.randint(2 * _PADDING + 1, ())) for _ in range(2))
        image = self._images[index, :, top : top + 32, left : left + 32]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), self._targets[index]


def train_speed(config: TrialConfig) -> Run:
    """Train the speed recipe once, to the end of its schedule."""
    (last,) = train(config)
    return Run(
        seed=config.seed,
        seconds=last.warm_seconds,
        accuracy=last.metric,
        build_seconds=last.build_seconds,
    )


def train_textbook(config: TrialConfig, *, epochs: int, num_workers: int) -> Run:
    """Train the textbook's ResNet-9 once, on the same images."""
    data, device = load_data(config), pick_device(config.device)
    seed_everything(config.seed)
    model = ResNet9(
        input_shape=(3, 32, 32),
        num_classes=10,
        widths=[64, 128, 256, 512],
        norm="batch",
        logits_scale=0.125,
    ).to(device)
    batch_size = 512
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.4, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    training = TextbookTraining(
        model=model,
        optimizer=optimizer,
        schedule=one_cycle(
            optimizer, epochs * (len(data.train) // batch_size), warmup_fraction=0.2
        ),
        loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        batch_size=batch_size,
        epochs=epochs,
        num_workers=num_workers,
        seed=config.seed,
        device=device,
        autocast_dtype=torch.bfloat16,
    )
    seconds = training.train(Augmented(data.transform(data.train.inputs), data.train.targets))
    accuracy = training.accuracy(data.transform(data.validation.inputs), data.validation.targets)
    return Run(seed=config.seed, seconds=seconds, accuracy=accuracy, build_seconds=0.0)


def describe(name: str, runs: list[Run]) -> str:
    """A line with the mean accuracy of the runs, its standard error, and their median, least and
    most seconds.
    """
    error = (
        stdev(run.accuracy for run in runs) / math.sqrt(len(runs)) if len(runs) > 1 else math.nan
    )
    seconds = [run.seconds for run in runs]
    return (
        f"{name:10s} accuracy {fmean(run.accuracy for run in runs):.4f} ± {error:.4f}, warm seconds"
        f" {median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f}), n={len(runs)}"
    )


def main() -> int:
    """Make all trainings of both sides, print and write the numbers, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cifar10_speed", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--data-root", default="data", help="folder of CIFAR-10's official files")
    parser.add_argument(
        "--runs", type=int, default=FEWEST_RUNS, help="trainings of autotune's side"
    )
    parser.add_argument("--textbook-runs", type=int, default=2)
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=math.inf,
        help="after these, begin no further training of autotune's side",
    )
    parser.add_argument("--textbook-epochs", type=int, default=24)
    parser.add_argument(
        "--workers", type=int, default=8, help="processes of the textbook's DataLoader"
    )
    parser.add_argument("--experiment", default="cifar10_speed")
    parser.add_argument("--name", default="cifar10_speed", help="of the result file")
    parser.add_argument("overrides", nargs="*", help="of the experiment")
    arguments = parser.parse_args()
    endless = [
        "target.value=2",
        "target.max_train_seconds=36000",
        "evaluate_every_samples=1000000000",
    ]
    composer = Composer(
        [
            f"experiment={arguments.experiment}",
            f"data.root={arguments.data_root}",
            *endless,
            *arguments.overrides,
        ]
    )
    started, began = circumstances(), time.monotonic()
    sides: dict[str, list[Run]] = {"textbook": [], "autotune": []}
    share = math.ceil(arguments.runs / max(1, arguments.textbook_runs))
    # in turns: a share of ours after each textbook training
    for number in range(max(arguments.runs, arguments.textbook_runs)):
        if sides["autotune"] and time.monotonic() - began > arguments.max_seconds:
            break
        config = composer.compose([f"seed={number}"]).trial
        if number % share == 0 and len(sides["textbook"]) < arguments.textbook_runs:
            sides["textbook"].append(
                train_textbook(
                    config, epochs=arguments.textbook_epochs, num_workers=arguments.workers
                )
            )
            print(describe("textbook", sides["textbook"]), flush=True)
        sides["autotune"].append(run := train_speed(config))
        print(
            f"autotune   seed {number}: accuracy {run.accuracy:.4f}, warm seconds"
            f" {run.seconds:.3f}, build {run.build_seconds:.1f} s, {time.monotonic() - began:.0f} s"
            " since the start",
            flush=True,
        )
    for name, runs in sides.items():
        print(describe(name, runs) if runs else f"{name:10s} not run")
    own = sides["autotune"]
    print(f"autotune   build {own[0].build_seconds:.1f} s once a process")
    holds = {
        f"autotune: median of warm seconds at most {MAX_SECONDS}, at least {FEWEST_RUNS} runs": (
            len(own) >= FEWEST_RUNS and median(run.seconds for run in own) <= MAX_SECONDS
        )
    }
    for name, runs in sides.items():
        if runs:
            holds[f"{name}: mean accuracy at least {TARGET}"] = (
                fmean(run.accuracy for run in runs) >= TARGET
            )
    if sides["textbook"]:
        ratio = fmean(run.seconds for run in sides["textbook"]) / fmean(run.seconds for run in own)
        print(f"textbook / autotune, mean seconds  {ratio:.2f}")
        holds[f"textbook / autotune at least {MIN_RATIO}"] = ratio >= MIN_RATIO
    path = write_result(
        arguments.name,
        started=started,
        settings={**vars(arguments), "config": composer.compose().trial.as_dict()},
        result={"sides": sides, "holds": holds},
    )
    for claim, held in holds.items():
        print(f"{'holds' if held else 'FAILS'}: {claim}")
    print(f"written to {path}")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
