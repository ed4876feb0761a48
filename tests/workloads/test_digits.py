import pytest
import torch

from autotune.errors import DataError
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
    # no two of the 1,797 images are alike
    assert len({image.numpy().tobytes() for image in images}) == 1797


def test_a_part_of_the_classes_is_relabelled_and_split_in_the_same_proportion() -> None:
    whole, part = digits(), digits(classes=[7, 5])
    num_samples = sum(int(((targets == 5) | (targets == 7)).sum()) for _, targets in whole.values())
    sizes = {name: len(targets) for name, (_, targets) in part.items()}
    assert sum(sizes.values()) == num_samples
    assert sizes["validation"] == sizes["test"] == round(num_samples * 300 / 1797)
    mean_of = {label: part["train"][0][part["train"][1] == label].mean(0) for label in (0, 1)}
    for label, digit in ((0, 7), (1, 5)):
        images = whole["train"][0][whole["train"][1] == digit].mean(0)
        assert (
            torch.corrcoef(torch.stack([images.flatten(), mean_of[label].flatten()]))[0, 1] > 0.95
        )


def test_few_labels_are_some_of_the_training_samples_of_every_class() -> None:
    whole, few = digits(classes=[5, 6, 7, 8, 9]), digits(classes=[5, 6, 7, 8, 9], num_train=25)
    assert few["train"][1].bincount().tolist() == [5] * 5
    for name in ("validation", "test"):
        assert torch.equal(few[name][1], whole[name][1])
    std, mean = torch.std_mean(few["train"][0])
    assert abs(mean) < 1e-5
    assert abs(std - 1) < 1e-5
    assert len(digits(num_train=1197)["train"][1]) == 1197


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"classes": [1]},
            r"data\.classes: found \[1\], accepted are two or more different digits, 0 to 9",
        ),
        ({"classes": [1, 1]}, r"data\.classes: found \[1, 1\]"),
        ({"classes": [1, 10]}, r"data\.classes: found \[1, 10\]"),
        ({"num_train": 9}, r"data\.num_train: found 9, accepted is 10 to 1197"),
        ({"num_train": 2000}, r"data\.num_train: found 2000, accepted is 10 to 1197"),
    ],
)
def test_parts_that_are_not_there_are_one_line(values: dict[str, list[int]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        digits(**values)
