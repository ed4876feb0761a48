"""Files written whole or not at all, never through a link, and with the number of their format."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import DataError, FileError
from autotune.files import (
    FORMAT,
    appending,
    check_format,
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


def test_a_part_that_another_process_replaced_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"

    def write() -> None:
        with replacing(path) as part:
            part.unlink()
            part.symlink_to("/etc/passwd")

    with pytest.raises(
        FileError, match=r"best\.yaml: cannot be written: another process writes it too"
    ):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_is_appended_to_or_locked_is_a_file_and_no_link_or_pipe(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "autotune.log"
    victim.write_text("precious")
    path.symlink_to(victim)
    with pytest.raises(
        FileError,
        match=r"autotune\.log: found a symbolic link, must be a file, or nothing there$",
    ):
        appending(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileError, match="found a pipe, must be a file"):
        appending(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(FileError, match="found a folder, must be a file"):
        appending(path)
    assert victim.read_text() == "precious"


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
    with pytest.raises(
        DataError,
        match=(
            rf"^study\.yaml: has format {FORMAT + 1}, this autotune reads up to {FORMAT}; update"
            r" autotune$"
        ),
    ):
        check_format(FORMAT + 1, "study.yaml")
    for wrong in (0, -1, True, 1.5, "1", [1], {}):
        with pytest.raises(
            DataError, match=r"^study\.yaml: format: found .*, must be a whole number from 1 to"
        ):
            check_format(wrong, "study.yaml")
