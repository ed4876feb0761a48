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

import numpy as np
import torch

from autotune.errors import ConfigError, DataError
from autotune.remote import fetched, files_in, is_remote, user_path
from autotune.workloads.splits import Splits

UNKNOWN = 0
"""The index of every character that is not in the vocabulary."""

MAX_UNKNOWN_FRACTION = 0.01
"""Maximum fraction of a held-out part's characters that may be unknown."""

ACCEPTED = "a UTF-8 text file, or a folder of .txt files"

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


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
        root: a UTF-8 file, a folder whose ``.txt`` files are read in the order of their names, or a
            URL of either; None means Python's documentation.
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
    if min(length, max_characters or 1, min_count) < 1:
        raise ConfigError("data: length, max_characters and min_count must be whole numbers from 1")
    if not (validation_fraction > 0 < test_fraction and validation_fraction + test_fraction < 1):
        raise ConfigError(
            "data: validation_fraction and test_fraction must be above 0, and their sum below 1"
        )
    content = (_python_documentation() if root is None else _read(root, max_characters))[
        :max_characters
    ]
    codes = np.frombuffer(content.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(
        np.int64
    )
    num_validation, num_test = (
        int(len(codes) * fraction) for fraction in (validation_fraction, test_fraction)
    )
    end = len(codes) - num_test
    bounds = {
        "train": (0, end - num_validation),
        "validation": (end - num_validation, end),
        "test": (end, len(codes)),
    }
    where = "data" if root is None else f"data.root: {root}"
    parts = {
        name: _whole_windows(codes[first:last], length, f"{where}: {name}")
        for name, (first, last) in bounds.items()
    }
    vocabulary = _vocabulary(parts["train"], min_count)
    splits: Splits = {}
    for name, part in parts.items():
        indices = _indices(part, vocabulary)
        unknown_fraction = float((indices == UNKNOWN).mean())
        if name != "train" and unknown_fraction > MAX_UNKNOWN_FRACTION:
            found = (
                f"{unknown_fraction:.1%} of its characters are not among the {len(vocabulary)} of"
                " the training part"
            )
            raise DataError(f"{where}: {name}: {found}, more than {MAX_UNKNOWN_FRACTION:.0%}")
        pair = (
            torch.from_numpy(indices[start : len(indices) - 1 + start].reshape(-1, length).copy())
            for start in (0, 1)
        )
        splits[name] = (next(pair), next(pair))
    return splits


def _python_documentation() -> str:
    """The text of all topics of Python's ``help()``, sorted by name, without repeated paragraphs.

    Many topics repeat sections of others: a paragraph is kept where it stands first, or a held-out
    part would hold text trained on.
    """
    try:
        # half a megabyte, and some distributions of Python leave it out
        from pydoc_data.topics import topics  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            f"data.root: this Python has no pydoc_data.topics; set data.root to {ACCEPTED}"
        ) from error
    paragraphs: dict[str, str] = {}
    for paragraph in "\n\n".join(topics[name].strip("\n") for name in sorted(topics)).split("\n\n"):
        paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(paragraphs.values())


def _read(root: str, max_characters: int | None) -> str:
    """Read a text's first ``max_characters``, with newlines as line ends and between a folder's
    files.
    """
    pieces: list[str] = []
    left = max_characters
    for location in _locations(root):
        file = fetched(location, "data.root")
        try:
            with file.open(encoding="utf-8-sig") as lines:
                pieces.append(lines.read(left))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.root: {file} cannot be read as {ACCEPTED}: {error}") from error
        left = None if left is None else max(0, left - len(pieces[-1]) - 1)
        if left == 0:
            break
    content = "\n".join(pieces)
    if not content.strip():
        raise DataError(f"data.root: {root} is empty; it must be {ACCEPTED}")
    return content


def _locations(root: str) -> list[str]:
    """Paths or URLs of a text's files, sorted by name; a folder at a URL ends with a slash."""
    if is_remote(root):
        return (
            [name for name in files_in(root, "data.root") if name.endswith(".txt")]
            if root.endswith("/")
            else [root]
        )
    path = user_path(root)
    return (
        [str(file) for file in sorted(path.glob("*.txt")) if file.is_file()]
        if path.is_dir()
        else [str(path)]
    )


def _whole_windows(codes: Indices, length: int, where: str) -> Indices:
    """The characters that fill whole windows, and the one that follows the last window."""
    num_windows = (len(codes) - 1) // length
    if num_windows < 1:
        raise DataError(
            f"{where}: has {len(codes)} characters, and data.length needs {length + 1} or more"
        )
    return codes[: num_windows * length + 1]


def _vocabulary(codes: Indices, min_count: int) -> Indices:
    """The code points found at least ``min_count`` times, from rarest to most frequent."""
    characters, first, counts = np.unique(codes, return_index=True, return_counts=True)
    order = np.lexsort((first, counts))
    kept = order[counts[order] >= min_count]
    if not len(kept):
        raise ConfigError(f"data.min_count: no character is found more than {counts.max()} times")
    return characters[kept]


def _indices(codes: Indices, vocabulary: Indices) -> Indices:
    """Each character's index in the vocabulary, from 1, or ``UNKNOWN``."""
    order = np.argsort(vocabulary)
    ranks = np.searchsorted(vocabulary, codes, sorter=order).clip(max=len(vocabulary) - 1)
    return np.where(vocabulary[order[ranks]] == codes, order[ranks] + 1, UNKNOWN)
