import torch

from autotune.workloads.digits import digits


def test_digits_are_split_by_class_and_standardised() -> None:
    splits = digits()
    assert {name: tuple(inputs.shape) for name, (inputs, _) in splits.items()} == {
        "train": (1197, 1, 8, 8),
        "validation": (300, 1, 8, 8),
        "test": (300, 1, 8, 8),
    }
    inputs, targets = splits["train"]
    assert inputs.dtype is torch.float32
    assert targets.dtype is torch.int64
    assert abs(inputs.mean().item()) < 1e-5
    assert abs(inputs.std().item() - 1) < 1e-5
    for _, targets in splits.values():
        assert targets.bincount().min() > 0.09 * len(targets)


def test_digits_are_the_same_whatever_the_trial_seed() -> None:
    torch.manual_seed(1)
    first = digits()
    torch.manual_seed(2)
    second = digits()
    for name in first:
        assert torch.equal(first[name][0], second[name][0])
        assert torch.equal(first[name][1], second[name][1])


def test_no_digit_is_in_two_splits() -> None:
    images = torch.cat([inputs for inputs, _ in digits().values()]).flatten(1)
    assert len({image.numpy().tobytes() for image in images}) == 1797  # no two of the 1,797 images are alike
