"""What the studies of the fault bench train: parts of a hundredth of a second, which can be paused,
with a diary of the bench's own.

A training writes a line into the diary when it begins, and before each report. A fault that has to
happen within a training is a file in the folder ``tokens`` beside the diary: the first training
that takes it away, by a rename, does what its name says.
"""

import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import autotune

NUM_PARTS = 8
MEMORY_GROUP = "FAULTS_MEMORY_GROUP"
"""Environment variable with the folder of the control group whose memory is limited."""
_MIB = 2**20


def train(
    rate: float,
    width: int,
    part_seconds: float,
    diary: str,
    seed: int,
    checkpoint: "autotune.Checkpoint",
) -> None:
    """Fit a sum by gradient descent and report the error after each part."""
    model = torch.nn.Linear(width, 1, bias=False)
    begin = checkpoint.load({"model": model}).get("part", 0)
    book = Diary(Path(diary), {"seed": seed, "rate": rate, "width": width})
    book.write("begin", part=begin)
    inputs = torch.randn(64, width, generator=torch.Generator().manual_seed(seed))
    for part in range(begin, NUM_PARTS):
        began = time.thread_time()
        for _ in range(4):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                model.weight -= rate * model.weight.grad
        time.sleep(part_seconds)
        seconds = time.thread_time() - began + part_seconds
        error = loss.item() / width
        fault = book.take_token()
        if fault is not None:
            error = fault(error)
        checkpoint.save({"model": model, "part": part + 1})
        book.write("report", part=part + 1, seconds=seconds)
        autotune.report(error)


class Diary:
    """Lines that trainings write for the bench, each in one call, so that those of several
    processes do not mix.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path, self._facts = path, facts

    def write(self, event: str, **facts: Any) -> None:
        """Append a line."""
        line = (
            json.dumps(
                {"event": event, **self._facts, "pid": os.getpid(), "at": time.monotonic(), **facts}
            )
            + "\n"
        )
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, line.encode())
        os.close(file)

    def take_token(self) -> Callable[[float], float] | None:
        """Take a token, if there is one: returns what it does, which is given the error and
        returns the one to report.
        """
        for token in sorted(self._path.with_name("tokens").iterdir()):
            with suppress(FileNotFoundError):
                token.rename(self._path.with_name("taken") / token.name)
                self.write("fault", token=token.name)
                return _FAULTS[token.name.partition("-")[0]]
        return None


def _hang(error: float) -> float:
    ctypes.PyDLL(None).sleep(10**6)  # in C, with the interpreter's lock held
    return error


def _kill(error: float) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return error


def _stop(error: float) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)  # the bench lets it go on
    return error


def _nan(error: float) -> float:
    return float("nan")


def _device_memory(error: float) -> float:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _memory_limit(error: float) -> float:
    """Allocate more than the process may: Python raises MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(
        resource.RLIMIT_AS, (used + 64 * _MIB, resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    bytearray(1024 * _MIB)
    return error


def _memory_kill(error: float) -> float:
    """Allocate more than the control group may that the bench has made: the kernel kills this
    process.
    """
    (Path(os.environ[MEMORY_GROUP]) / "cgroup.procs").write_text(str(os.getpid()))
    held = [b"x" * _MIB + bytes(1) for _ in range(1024)]
    return error + 0 * len(held)


_FAULTS = {
    "hang": _hang,
    "kill": _kill,
    "stop": _stop,
    "nan": _nan,
    "devicememory": _device_memory,
    "memorylimit": _memory_limit,
    "memorykill": _memory_kill,
}
