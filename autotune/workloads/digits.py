"""scikit-learn's handwritten digits: real images that come with a dependency, small enough to
tune on a laptop in a minute.
"""

import gzip
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from autotune.errors import DataError
from autotune.workloads.splits import Splits, scikit_learn_file, stratified_split

NUM_CLASSES = 10
_HELD_OUT = (300, 1797)
"""Number of validation samples, the same as of test samples, and of all samples in the whole
data set."""


def digits(*, classes: Sequence[int] | None = None, num_train: int | None = None) -> Splits:
    """The 1,797 digits as 1,197 train, 300 validation and 300 test samples, or a part of them.

    Inputs are float32 ``[samples, 1, 8, 8]``, standardised with the train split's mean and
    deviation over all pixels; targets are int64 ``[samples]``, 0 to 9.

    Args:
        classes: digits to keep, in all three splits in the same proportion; their targets are 0, 1,
            ... in this order.
        num_train: training samples to keep of these classes, with each class's share to within one
            sample.

    Raises:
        DataError: ``classes`` are not two or more different digits, or ``num_train`` is below their
            number or above the samples.
    """
    table = _read_table()
    inputs = torch.from_numpy(table[:, :-1]).to(torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(table[:, -1]).to(torch.int64)
    if classes is not None:
        inputs, targets = _only(classes, inputs, targets)
    num_held_out = round(len(targets) * _HELD_OUT[0] / _HELD_OUT[1])
    rest, test = stratified_split(targets, num_held_out)
    in_train, in_validation = stratified_split(targets[rest], num_held_out)
    train, validation = rest[in_train], rest[in_validation]
    if num_train is not None:
        num_classes = int(targets.max()) + 1
        if not num_classes <= num_train <= len(train):
            raise DataError(
                f"data.num_train: found {num_train}, accepted is {num_classes} to {len(train)}"
            )
        if num_train < len(train):
            train = train[stratified_split(targets[train], num_train)[1]]
    std, mean = torch.std_mean(inputs[train])
    inputs = (inputs - mean) / std
    splits = {"train": train, "validation": validation, "test": test}
    return {name: (inputs[indices], targets[indices]) for name, indices in splits.items()}


def _only(classes: Sequence[int], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The samples of some classes; their targets become the index of the class in the list."""
    if (
        len(classes) < 2
        or len(set(classes)) < len(classes)
        or not set(classes) <= set(range(NUM_CLASSES))
    ):
        raise DataError(
            f"data.classes: found {list(classes)}, accepted are two or more different digits, 0 to"
            f" {NUM_CLASSES - 1}"
        )
    new_targets = torch.full((NUM_CLASSES,), -1)
    new_targets[list(classes)] = torch.arange(len(classes))
    relabelled = new_targets[targets]
    return inputs[relabelled >= 0], relabelled[relabelled >= 0]


def _read_table() -> np.ndarray:
    """Read the 64 pixels and the digit of each sample, ``[1797, 65]``, from the file that
    ``sklearn.datasets.load_digits`` reads.

    Raises:
        DataError: scikit-learn is not installed, or keeps the file elsewhere.
    """
    with gzip.open(scikit_learn_file("digits.csv.gz"), "rt") as lines:
        return np.loadtxt(lines, delimiter=",", dtype=np.float32)
