"""A study's folder that is in use or cannot be written is refused in one line, before anything is
trained.
"""

import errno
import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import AutotuneError, StudyError
from autotune.execution.study_folder import log_file, sole_user
from autotune.execution.task import warn_once
from tests.execution.conftest import fill


def _refused(folder: Path) -> str:
    def use() -> None:
        with sole_user(folder), log_file(folder / "autotune.log", print):
            raise AssertionError("it was let in")

    with pytest.raises(AutotuneError) as refused:
        use()
    assert "\n" not in str(refused.value)
    return str(refused.value).replace(str(folder), "whole")


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (
            lambda disk: subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True),
            "Read-only file system",
        ),
        (fill, "No space left on device"),
    ],
)
def test_a_full_or_read_only_disk_is_told_before_anything_is_trained(
    small_disk: Path, prepare: Callable[[Path], object], said: str
) -> None:
    folder = small_disk / "whole"
    with sole_user(folder):
        pass
    prepare(small_disk)
    refused = _refused(folder)
    assert refused.startswith("study.folder: whole")
    assert refused.endswith(f": cannot be written: {said}")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    with (
        sole_user(folder),
        pytest.raises(StudyError, match=r"^study\.name=study: another process runs it"),
        sole_user(folder),
    ):
        pass
    assert not (folder / ".probe").exists()
    with sole_user(folder):
        pass


def test_a_folder_on_a_file_system_without_locks_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with sole_user(tmp_path / "study"):
        pass


def test_a_warning_of_trials_is_shown_and_logged_once(tmp_path: Path) -> None:
    said: list[str] = []
    line = f"a trial of {tmp_path} leaves devices idle"
    with log_file(tmp_path / "autotune.log", said.append):
        warn_once(line)
        warn_once(line)
    warn_once(f"{line}, after the study")
    assert said == [line]
    assert (tmp_path / "autotune.log").read_text().count(line) == 1
