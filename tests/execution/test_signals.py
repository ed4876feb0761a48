"""Signals that end a command: SIGTERM and SIGHUP do what Ctrl-C does, whoever gets them."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.config.command_line import interruptible
from tests.support.patience import PATIENCE_SECONDS, exit_code, wait_until

_COMMAND = (
    "experiment=cnn_smoke",
    "study.name=ended",
    "search=tpe",
    "stopping=none",
    "target.value=0.999",
    "target.max_train_seconds=60",
    "epochs=200",
    "optimizer.lr=interval(1e-4,1e-3)",
    "search.num_trials=1000",  # never ends by itself
    "tracking=none",
)
_WAITS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from autotune.config.command_line import run_main
def command(arguments):
    print("ready", flush=True)
    time.sleep(60)
run_main(command)
"""


@pytest.fixture(autouse=True)
def _hangups_are_heard() -> Iterator[None]:
    """SIGHUP ends what the tests start also where the tests themselves run under nohup."""
    of_tests = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, of_tests)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_sets_the_event_and_a_later_one_raises(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_process = signal.signal(number, signal.SIG_DFL)
    with interruptible() as interrupt:
        signal.raise_signal(number)
        assert interrupt.is_set()
        signal.raise_signal(number)  # as timeout(1) does: once to the process, once to its group
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 5)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.signal(number, of_process) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGHUP, 130), (signal.SIGUSR1, 75)],
)
def test_a_command_that_a_signal_ends_says_so_in_one_line(
    number: signal.Signals, code: int, commands: Any
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS],
        env=commands.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (code, "autotune: interrupted\n")


def _assert_resumable(said: str) -> None:
    line = said.splitlines()[-1]
    assert sorted(shlex.split(line)) == sorted(["python", "-m", "autotune", *_COMMAND])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGHUP, True)]
)
def test_a_study_ends_in_good_order_whoever_gets_the_signal(
    commands: Any, tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    process = commands.start(*_COMMAND, folder=tmp_path)
    try:
        wait_until((tmp_path / "outputs/ended/trace.csv").is_file, process=process)
        time.sleep(5)
        (os.killpg if to_group else os.kill)(process.pid, number)
        assert exit_code(process) == (75 if number is signal.SIGTERM else 130)
        assert (tmp_path / "err.txt").read_text() == ""
        _assert_resumable((tmp_path / "out.txt").read_text())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


_HANGS = """
import re

def hangs(lr):
    yield {"metric": 0.1}
    re.match("(a+)+$", 60 * "a" + "b")  # keeps Python's lock, and takes longer than anyone lives
"""


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_study_that_hangs_and_all_that_it_started(
    commands: Any, tmp_path: Path
) -> None:
    (tmp_path / "hanging.py").write_text(_HANGS)
    (tmp_path / "my_conf/experiment").mkdir(parents=True)
    (tmp_path / "my_conf/experiment/hangs.yaml").write_text(
        "# @package _global_\ntraining: {_target_: hanging.hangs, lr: 0.1}\nsearch_space:"
        " [{training.lr: [0.1, 0.2]}]\n"
    )
    command = [
        "experiment=hangs",
        "allowed_targets=[hanging]",
        "study.name=ended",
        "search=random",
        "tracking=none",
    ]
    process = commands.start(*command, "--config-dir", "my_conf", folder=tmp_path)
    try:
        wait_until(lambda: any((tmp_path / "outputs/ended").glob("hang-*")), process=process)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1.2)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        assert exit_code(process) == 130
        assert "study.name=ended" in (tmp_path / "out.txt").read_text().splitlines()[-1]
        wait_until(lambda: not _of_session(process.pid))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _of_session(session: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
