"""scikit-learn's handwritten digits: real images that come with a dependency, small enough to tune on a laptop in a minute."""

import torch

from autotune.workloads.splits import Splits, stratified_split


def digits() -> Splits:
    """1,797 digits as 1,197 train, 300 validation and 300 test samples.

    Inputs are float32 ``[samples, 1, 8, 8]``, standardised with the train split's mean and deviation over all pixels; targets
    are int64 ``[samples]``, 0 to 9.
    """
    # Imported here because scikit-learn takes a second to import, and no other workload needs it.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    loaded = load_digits()
    inputs = torch.from_numpy(loaded.images).to(torch.float32).unsqueeze(1)
    targets = torch.from_numpy(loaded.target).to(torch.int64)
    rest, test = stratified_split(targets, 300)
    in_train, in_validation = stratified_split(targets[rest], 300)
    train, validation = rest[in_train], rest[in_validation]
    std, mean = torch.std_mean(inputs[train])
    inputs = (inputs - mean) / std
    splits = {"train": train, "validation": validation, "test": test}
    return {name: (inputs[indices], targets[indices]) for name, indices in splits.items()}
