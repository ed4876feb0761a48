"""Whose fault an exception of a training is: told by its type and its codes, and, where a library
has neither, by the names in its message.
"""

import errno
import os
import pickle
import signal
from pathlib import Path

import pynvml
import pytest
import torch
from torch import distributed

from autotune.errors import (
    ConfigError,
    DataError,
    DivergedError,
    FileError,
    StateError,
    TimedOutError,
)
from autotune.failure import Failure, FailureKind, ProcessFailedError, kind_of_exit, kind_of_text
from autotune.files import replace_file
from autotune.training.failures import failure_of

NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error,"


def accelerator_error(code: int, said: str) -> torch.AcceleratorError:
    error = torch.AcceleratorError(f"CUDA error: {said}\nSearch for `cudaError...` in the docs.")
    error.error_code = code
    return error


def wrapped(error: Exception) -> Exception:
    """The same error as a library raises it that catches what a batch raises."""
    outer = ValueError("the batch failed")
    outer.__cause__ = error
    return outer


def failure(error: Exception) -> Failure:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001  # as the trained code raises
        return failure_of(caught)


MACHINE = {
    "ECC": accelerator_error(214, "uncorrectable ECC error encountered"),
    "launch failure": accelerator_error(719, "unspecified launch failure"),
    "busy": accelerator_error(46, "all CUDA-capable devices are busy or unavailable"),
    "illegal instruction": accelerator_error(715, "an illegal instruction was encountered"),
    "lost": pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST),
    "Xid": RuntimeError("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
    "without a code": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "wrapped": wrapped(accelerator_error(214, "uncorrectable ECC error encountered")),
    "input/output": OSError(errno.EIO, "Input/output error"),
}
USER_CODE = {
    "illegal address": accelerator_error(700, "an illegal memory access was encountered"),
    "assertion": accelerator_error(710, "device-side assert triggered"),
    "shape": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    "a service": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "no file": FileNotFoundError(errno.ENOENT, "No such file or directory"),
    "words": KeyError("unspecified launch failure"),
}


@pytest.mark.parametrize("name", MACHINE)
def test_what_the_device_did_is_the_machines(name: str) -> None:
    told = failure(MACHINE[name])
    assert told.kind is FailureKind.MACHINE
    assert not told.is_consequence


@pytest.mark.parametrize("name", USER_CODE)
def test_what_the_code_did_is_the_codes(name: str) -> None:
    told = failure(USER_CODE[name])
    assert (told.kind, told.has_traceback) == (FailureKind.USER_CODE, True)
    assert told.message.startswith("Traceback")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by"),
        RuntimeError("Connection reset by peer [127.0.0.1]:7"),
        distributed.DistBackendError(f"{NCCL}\nncclRemoteError: A call failed possibly due to"),
        distributed.DistBackendError("NCCL communicator was aborted on rank 1."),
        distributed.DistNetworkError("Failed to recv, got 0 bytes. Did the remote server shut"),
        distributed.DistStoreError("wait timeout after 1800000ms"),
        ProcessFailedError("a process is gone", FailureKind.LOST, is_consequence=True),
    ],
)
def test_a_lost_connection_to_another_rank_is_a_consequence(error: Exception) -> None:
    told = failure(error)
    assert (told.kind, told.is_consequence) == (FailureKind.LOST, True)
    assert "\n" not in told.message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_refusal(number: int) -> None:
    full = OSError(number, os.strerror(number))
    assert failure(full).kind is FailureKind.DISK
    assert failure(RuntimeError(f"the checkpoint: {full.strerror}")).kind is FailureKind.DISK
    sent = pickle.loads(pickle.dumps(FileError("state.pt: cannot be written", number)))
    assert failure(sent) == Failure(kind=FailureKind.DISK, message="state.pt: cannot be written")


def test_a_file_that_is_none_of_the_disks_fault_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError) as refused:
        replace_file(tmp_path / "none" / "file", "")
    assert failure(refused.value).kind is FailureKind.CONFIGURATION


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), FailureKind.MEMORY),
        (accelerator_error(2, "out of memory"), FailureKind.MEMORY),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), FailureKind.LOST),
        (ConfigError("optimizer.lr: found -1"), FailureKind.CONFIGURATION),
        (DataError("mnist: is missing"), FailureKind.CONFIGURATION),
        (StateError("state.pt: is damaged"), FailureKind.LOST),
        (DivergedError("rank 1 reported loss=nan"), FailureKind.DIVERGED),
        (TimedOutError("no evaluation in time"), FailureKind.TIMED_OUT),
    ],
)
def test_other_kinds_follow_from_the_type(error: Exception, kind: FailureKind) -> None:
    assert failure(error).kind is kind


@pytest.mark.parametrize(
    ("exit_code", "kind"),
    [
        (-signal.SIGKILL, FailureKind.LOST),
        (-signal.SIGTERM, FailureKind.LOST),
        (None, FailureKind.LOST),
        (-signal.SIGSEGV, FailureKind.USER_CODE),
        (1, FailureKind.USER_CODE),
        (0, FailureKind.USER_CODE),
    ],
)
def test_who_ended_a_process_follows_from_its_exit_code(
    exit_code: int | None, kind: FailureKind
) -> None:
    assert kind_of_exit(exit_code) is kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", FailureKind.MACHINE),
        ("OSError: [Errno 122] Disk quota exceeded: 'last.ckpt'", FailureKind.DISK),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", FailureKind.LOST),
        ("KeyError: 'lr'", None),
    ],
)
def test_a_commands_exception_is_known_by_its_line(line: str, kind: FailureKind | None) -> None:
    assert kind_of_text(line)[0] is kind
