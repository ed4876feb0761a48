"""Text as characters: Python's own documentation, or the user's text.

A target in bits per character is only fair if every character costs something. A character that is
not in the vocabulary becomes one unknown symbol, which is predicted and costs bits like any other;
only *which* character it was is left out: at most 20.1 bits each. Characters found less than
``min_count`` times in the training part become unknown there, too: so a model learns how likely the
unknown symbol is (unseen characters are about as frequent as those seen once: Good, "The population
frequencies of species", 1953). A held-out part with many unknown characters is refused.

The default text differs between versions of Python, and so do results measured on it; the data
checksum in a fingerprint shows which text it was. A file given by ``data.root`` is the same
everywhere.
"""

import sys

import numpy as np
import torch

from autotune.errors import ConfigError, DataError, check_counts, explained
from autotune.remote import fetched
from autotune.workloads.splits import Splits, check_held_out

UNKNOWN = 0
"""The index of every character that is not in the vocabulary."""

MAX_UNKNOWN_FRACTION = 0.01
"""Maximum fraction of a held-out part's characters that may be unknown."""


Codes = np.ndarray[tuple[int, ...], np.dtype[np.int_]]
"""Code points, or indices, of characters."""


def text(
    *,
    root: str | None,
    length: int,
    max_characters: int | None,
    validation_fraction: float,
    test_fraction: float,
    min_count: int,
) -> Splits:
    """The first ``max_characters`` of a text as windows of ``length`` characters, split into train,
    validation and test.

    Inputs are int64 ``[samples, length]``, targets int64 ``[samples, length]``: a target is the
    character after its input, and every character of a part but its first is the target of exactly
    one window. The parts are contiguous stretches of the text that do not overlap: training,
    validation, test, in this order. A last window that is not full is left out.

    Index 0 is the unknown character; the other indices are the training part's characters from
    rarest to most frequent. So the highest index is sure to be among the targets, from which a
    training reads the number of classes.

    Args:
        root: a UTF-8 file or its URL; None means Python's documentation.
        length: number of characters in a window.
        max_characters: number of characters read; None means the whole text.
        validation_fraction: fraction of the text's characters for validation.
        test_fraction: fraction of the text's characters for test.
        min_count: characters found less often than this in the training part are unknown.

    Raises:
        ConfigError: a length, count or fraction is out of range.
        DataError: the text is missing, empty, not UTF-8 or too short, or a held-out part has too
            many unknown characters.
    """
    check_counts("data", length=length, max_characters=max_characters, min_count=min_count)
    check_held_out(validation_fraction, test_fraction)
    content = (_python_documentation() if root is None else _read(root, max_characters))[
        :max_characters
    ]
    codes = np.frombuffer(content.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    num_validation, num_test = (
        int(len(codes) * fraction) for fraction in (validation_fraction, test_fraction)
    )
    num_train = len(codes) - num_validation - num_test
    where = "data" if root is None else f"data.root: {root}"
    parts = np.split(codes, [num_train, num_train + num_validation])
    vocabulary = _vocabulary(_whole_windows(parts[0], length, where), min_count)
    splits: Splits = {}
    for name, part in zip(("train", "validation", "test"), parts, strict=True):
        indices = torch.from_numpy(vocabulary[_whole_windows(part, length, f"{where}: {name}")])
        unknown_fraction = float((indices == UNKNOWN).float().mean())
        if name != "train" and unknown_fraction > MAX_UNKNOWN_FRACTION:
            raise DataError(
                f"{where}: {name}: {unknown_fraction:.1%} of its characters are not among the"
                f" {vocabulary.max()} of the training part, more than {MAX_UNKNOWN_FRACTION:.0%}"
            )
        inputs, targets = (part.reshape(-1, length).clone() for part in (indices[:-1], indices[1:]))
        splits[name] = inputs, targets
    return splits


def _whole_windows(codes: Codes, length: int, where: str) -> Codes:
    """The characters that fill whole windows, and the one that follows the last window."""
    num_windows = (len(codes) - 1) // length
    if num_windows < 1:
        raise DataError(
            f"{where}: has {len(codes)} characters, and data.length needs {length + 1} or more"
        )
    return codes[: num_windows * length + 1]


def _python_documentation() -> str:
    """The text of all topics of Python's ``help()``, sorted by name, without repeated paragraphs.

    Many topics repeat sections of others: a paragraph is kept where it stands first, or a held-out
    part would hold text trained on.
    """
    try:
        # half a megabyte, and some distributions of Python leave it out
        from pydoc_data.topics import topics  # noqa: PLC0415
    except ImportError as error:
        raise DataError("data.root: this Python has no pydoc_data.topics; set data.root") from error
    paragraphs: dict[str, str] = {}
    for paragraph in "\n\n".join(topics[name].strip("\n") for name in sorted(topics)).split("\n\n"):
        paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(paragraphs.values())


def _read(root: str, max_characters: int | None) -> str:
    """Read a text's first ``max_characters``, with newlines as line ends."""
    file = fetched(root, "data.root")
    with (
        explained(f"data: {file} cannot be read"),
        file.open(encoding="utf-8-sig") as lines,
    ):
        content = lines.read(max_characters)
    if not content.strip():
        raise DataError(f"data.root: {root} is empty; use a UTF-8 text file")
    return content


def _vocabulary(codes: Codes, min_count: int) -> Codes:
    """The index of every code point.

    Those found at least ``min_count`` times count from 1, from the rarest to the most frequent, and
    all others are ``UNKNOWN``.
    """
    characters, first, counts = np.unique(codes, return_index=True, return_counts=True)
    order = np.lexsort((first, counts))
    kept = characters[order[counts[order] >= min_count]]
    if not len(kept):
        raise ConfigError(f"data.min_count: no character is found more than {counts.max()} times")
    indices = np.full(sys.maxunicode + 1, UNKNOWN, dtype=np.int64)
    indices[kept] = np.arange(1, len(kept) + 1)
    return indices
