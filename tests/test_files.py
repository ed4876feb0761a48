"""Files written whole or not at all, and with the number of their format."""

import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import DataError, FileError
from autotune.files import (
    FORMAT,
    appending,
    check_format,
    drop_middle,
    replace_file,
    replacing,
)


def test_a_file_is_replaced_when_all_of_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text("old")
    with replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_goes_wrong_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "best.json"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as part:
            part.write_text("ne")
            raise error

    with pytest.raises(FileError if error is OSError else error):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_a_files_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "study" / "best.yaml"
    victim.write_text("precious")
    path.parent.mkdir()
    path.symlink_to(victim)
    (path.parent / ".best.yaml.part").symlink_to(victim)
    replace_file(path, "best")
    assert victim.read_text() == "precious"
    assert path.read_text() == "best"
    assert not path.is_symlink()


def test_what_cannot_be_appended_to_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=rf"^{tmp_path}: cannot be written: Is a directory$"):
        appending(tmp_path)


def test_the_middle_of_a_file_is_cut_out_and_the_rest_still_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    path.write_bytes(b"first" + b"." * 100 + b"last")
    with appending(path) as file:
        drop_middle(path, num_first=5, num_last=4)
        file.write("more")
    assert path.read_text() == "first\n[autotune left out what was here]\nlastmore"


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.parent.rmdir(), "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_named_in_one_line(
    tmp_path: Path, prepare: Callable[[Path], None], said: str
) -> None:
    path = tmp_path / "study" / "best.json"
    path.parent.mkdir()
    prepare(path)
    with pytest.raises(FileError, match=rf"^{path}: cannot be written: {said}$"):
        replace_file(path, "{}")


def test_a_library_s_own_words_do_not_replace_the_system_s(tmp_path: Path) -> None:
    path = tmp_path / "curves.parquet"
    with (
        pytest.raises(FileError, match=rf"^{path}: cannot be written: No space left on device$"),
        replacing(path),
    ):
        raise OSError(
            errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device"
        )


def test_a_format_of_the_future_is_refused_and_one_without_number_is_the_first() -> None:
    for known in (None, 1, FORMAT):
        check_format(known, "study.yaml")
    for wrong in (FORMAT + 1, 0, -1, True, 1.5, "1", [1], {}):
        said = f"study.yaml: format: found {str(wrong)!r}, this autotune reads 1 to {FORMAT}; upd"
        with pytest.raises(DataError, match=f"^{re.escape(said)}"):
            check_format(wrong, "study.yaml")
