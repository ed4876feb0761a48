"""scikit-learn's handwritten digits: real images that come with a dependency, small enough to tune on a laptop in a minute."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch

from autotune.errors import DataError
from autotune.workloads.splits import Splits, stratified_split


def digits() -> Splits:
    """1,797 digits as 1,197 train, 300 validation and 300 test samples.

    Inputs are float32 ``[samples, 1, 8, 8]``, standardised with the train split's mean and deviation over all pixels; targets
    are int64 ``[samples]``, 0 to 9.
    """
    table = _read_table()
    inputs = torch.from_numpy(table[:, :-1]).to(torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(table[:, -1]).to(torch.int64)
    rest, test = stratified_split(targets, 300)
    in_train, in_validation = stratified_split(targets[rest], 300)
    train, validation = rest[in_train], rest[in_validation]
    std, mean = torch.std_mean(inputs[train])
    inputs = (inputs - mean) / std
    splits = {"train": train, "validation": validation, "test": test}
    return {name: (inputs[indices], targets[indices]) for name, indices in splits.items()}


def _read_table() -> np.ndarray:
    """The 64 pixels and the digit of each sample, [1797, 65], from the file that ``sklearn.datasets.load_digits`` reads.

    The file is read without importing scikit-learn: that takes longer than a whole training on it, in every process.

    Raises:
        DataError: scikit-learn is not installed, or keeps the file elsewhere.
    """
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package else None
    path = Path(folders[0]) / "datasets" / "data" / "digits.csv.gz" if folders else None
    if path is None or not path.is_file():
        raise DataError(f"data: digits: {path or 'scikit-learn'} is not there; accepted is an installed scikit-learn")
    with gzip.open(path, "rt") as lines:
        return np.loadtxt(lines, delimiter=",", dtype=np.float32)
