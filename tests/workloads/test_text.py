from typing import Any

import pytest
import torch

from autotune.errors import ConfigError, DataError
from autotune.workloads.splits import Splits
from autotune.workloads.text import UNKNOWN, text

SETTINGS: dict[str, Any] = {
    "root": None,
    "length": 8,
    "max_characters": None,
    "validation_fraction": 0.25,
    "test_fraction": 0.25,
    "min_count": 1,
}


def read(**changes: Any) -> Splits:
    return text(**(SETTINGS | changes))


def test_a_target_is_the_character_after_its_input(write: Any) -> None:
    splits = read(root=write("abcd" * 25))
    for inputs, targets in splits.values():
        assert inputs.dtype is targets.dtype is torch.int64
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == 8
        assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1]), (
            "and every character is the target of one window"
        )


def test_parts_are_stretches_of_the_text_without_a_character_in_common(write: Any) -> None:
    # 100 to train, 60 to validate, 40 to test, each cut to whole windows of 8 and one more
    letters = "".join(chr(0x4E00 + number) for number in range(100))
    splits = read(root=write(letters * 2), validation_fraction=0.3, test_fraction=0.2)
    covered = {
        name: torch.cat([inputs.flatten(), targets[-1, -1:]]).tolist()
        for name, (inputs, targets) in splits.items()
    }
    assert {name: len(part) for name, part in covered.items()} == {
        "train": 97,
        "validation": 57,
        "test": 33,
    }
    # the same letters again, of which the last three are not in the training part
    assert covered["validation"] == covered["train"][:57]
    assert covered["test"] == covered["train"][60:93]


def test_the_vocabulary_is_the_training_parts_from_rarest_to_most_frequent(write: Any) -> None:
    splits = read(root=write("aaabbc" * 100 + "ab" * 99 + "€€" + "cab" * 100), length=10)
    assert set(splits["train"][0].flatten().tolist()) == {1, 2, 3}
    assert splits["train"][0][0, :6].tolist() == [3, 3, 3, 2, 2, 1]
    held_out = torch.cat([splits["validation"][1].flatten(), splits["test"][1].flatten()])
    assert int((held_out == UNKNOWN).sum()) == 2


def test_a_rare_character_is_unknown_in_training_too(write: Any) -> None:
    root = write("Q" + "ab" * 300)
    assert int((read(root=root, min_count=1)["train"][0] == UNKNOWN).sum()) == 0
    unknown = (read(root=root, min_count=2)["train"][0] == UNKNOWN).nonzero().tolist()
    assert unknown == [[0, 0]]


def test_pythons_documentation_is_the_default() -> None:
    splits = read(length=128, max_characters=50_000, validation_fraction=0.1, test_fraction=0.1)
    assert len(splits["train"][0]) == (40_000 - 1) // 128
    assert 50 < int(splits["train"][1].max()) < 150


def test_a_text_is_read_as_far_as_asked_with_newlines_as_line_ends(write: Any) -> None:
    some = read(root=write("cd\r\n" * 30, "a.txt"), max_characters=60, length=4)
    same = read(root=write("cd\n" * 20, "b.txt"), length=4)
    assert all(torch.equal(some[name][0], same[name][0]) for name in some)


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (b" \n\n ", {}, r"data\.root: .*file is empty; use a UTF-8 text file"),
        (b"abc\xff" * 50, {}, r"file cannot be read: UnicodeDecodeError: 'utf-8' codec"),
        (
            b"abcd" * 8,
            {"length": 8},
            r"validation: has 8 characters, and data\.length needs 9 or more",
        ),
        (
            b"ab" * 40 + b"xy" * 40,
            {},
            r"validation: \d+\.\d% of its characters are not among the 2 of the training part",
        ),
        (b"abcd" * 50, {"length": 0}, r"data\.length: found 0, must be a whole number from 1"),
        (b"abcd" * 50, {"min_count": 999}, r"no character is found more than 25 times"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    write: Any, content: bytes, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as refused:
        read(root=write(content), **changes)
    assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match=r"nope cannot be read"):
        read(root="nope")
