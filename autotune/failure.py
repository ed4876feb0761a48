"""What ended a training that did not end by itself: one record, made where the error is met.

Whose fault a failure is follows from the type of an exception, an error code or an exit code.
Libraries that tell neither (NCCL and Gloo raise a RuntimeError, a command prints a line) are known
by the names in ``_TOLD``, the only texts that decide anything; what follows from a failure (an
outcome, another try, another device) reads its kind.
"""

import errno
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """Whose fault it is that a training failed."""

    CONFIGURATION = "configuration"
    """A component refused the configuration's values."""
    DIVERGED = "diverged"
    """A rank reported a metric or a loss that is not finite."""
    TIMED_OUT = "timed out"
    """The training took all of its time to its first evaluation."""
    USER_CODE = "user code"
    """The code that is trained raised an error or crashed."""
    MEMORY = "memory"
    """The device or the machine had too little memory."""
    MACHINE = "machine"
    """The device or its driver failed, or a connection of the machine."""
    DISK = "disk"
    """A disk or a quota is full."""
    LOST = "lost"
    """A process went with its machine, was killed from outside, or lost its connection to one."""
    DEADLINE = "deadline"
    """A hung process was ended at its deadline."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a training failed."""

    kind: FailureKind
    message: str
    """The reason in a line, or a traceback."""
    output_path: str | None = None
    """The file with all that the trained code printed; None if it printed nothing, or that is not
    known."""
    device: str | None = None
    """Host and GPU of the rank that failed, for people and to tell devices apart; None if
    unknown."""
    is_consequence: bool = False
    """Whether a rank only met the end of another one, which is the real failure."""
    is_tried_twice: bool = False
    """Whether the configuration is tried once more before the failure holds."""
    has_traceback: bool = False
    """Whether the message is a traceback."""
    memory_held_by_others_bytes: int = 0
    """Bytes of the device's memory that other programs held where there was too little; 0 if that
    was next to nothing, or is not known."""

    @property
    def is_of_device(self) -> bool:
        """Whether the same training may well succeed on another device."""
        is_of_machine = self.kind in (FailureKind.MACHINE, FailureKind.DISK)
        return is_of_machine or self.memory_held_by_others_bytes > 0


class ProcessFailedError(RuntimeError):
    """A process that a training has started failed, which is then the training's failure.

    Args:
        kind: whose fault it is; None if the message is all that is known.
    """

    def __init__(
        self, message: str, kind: FailureKind | None = None, *, is_consequence: bool = False
    ) -> None:
        super().__init__(message)
        self.kind, self.is_consequence = kind, is_consequence


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, then those that led to it: Inductor, Lightning and others wrap what they
    catch.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def kind_of_exit(exit_code: int | None) -> FailureKind:
    """Whose fault it is that a process ended, by its exit code as Python gives it (the negative
    signal number if a signal ended the process), or None if nobody saw it end.
    """
    return FailureKind.LOST if exit_code is None or -exit_code in _SENT else FailureKind.USER_CODE


_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which others end a process."""


KIND_OF_ERRNO = {
    errno.ENOSPC: FailureKind.DISK,
    errno.EDQUOT: FailureKind.DISK,
    errno.EIO: FailureKind.MACHINE,
    errno.ESTALE: FailureKind.MACHINE,
}
"""Whose fault an error of the operating system is, if it is none of the code that met it."""
KIND_OF_CUDA_ERROR = {
    2: FailureKind.MEMORY,
    46: FailureKind.MACHINE,  # devices unavailable: busy or unavailable
    100: FailureKind.MACHINE,  # no device
    214: FailureKind.MACHINE,  # uncorrectable ECC error
    220: FailureKind.MACHINE,  # uncorrectable NVLink error
    226: FailureKind.MACHINE,  # contained hardware error
    714: FailureKind.MACHINE,  # hardware stack error
    715: FailureKind.MACHINE,  # illegal instruction
    718: FailureKind.MACHINE,  # invalid program counter
    719: FailureKind.MACHINE,  # unspecified launch failure
    802: FailureKind.MACHINE,  # system not ready
    803: FailureKind.MACHINE,  # driver and library differ
    999: FailureKind.MACHINE,  # unknown
}
"""Whose fault an error of CUDA is, by its code (``cudaError_t``), if it is not the code's that ran:
an illegal address, a failed assertion. Source: the table of cudaError in CUDA's driver_types.h."""

_GONE = (
    r"[Cc]onnection (?:closed|reset) by peer|gloo/transport/|ncclRemoteError"
    r"|remote process exited|communicator was aborted|NCCL communicator .*abort"
    r"|Watchdog caught collective operation timeout|DistNetworkError|DistStoreError"
)
"""Names by which Gloo, NCCL and torch's store tell that another rank is gone."""
_TOLD = {
    r"No space left on device|[Dd]isk quota exceeded|StorageFull": FailureKind.DISK,
    r"uncorrectable (?:ECC|NVLink) error|\bXid\b|unspecified launch failure"
    r"|(?:device|GPU) is lost|fallen off the bus|busy or unavailable"
    r"|illegal instruction was encountered|hardware stack error|invalid program counter"
    r"|no CUDA-capable device|CUDA error: unknown error|system not yet initialized"
    r"|cudaError(?:ECCUncorrectable|NvlinkUncorrectable|DevicesUnavailable|LaunchFailure"
    r"|IllegalInstruction|HardwareStackError|InvalidPc)"
    r"|ncclSystemError": FailureKind.MACHINE,
    r"killed by signal: (?:Killed|Terminated)": FailureKind.LOST,
    _GONE: FailureKind.LOST,
}
"""Names by which RuntimeErrors of C++ libraries, and lines of a command's output, tell that a disk
is full, that the device failed (those of ``KIND_OF_CUDA_ERROR``, NVML's and the kernel's), that a
process was killed, and that another rank is gone."""


def kind_of_text(text: str) -> tuple[FailureKind | None, bool]:
    """Kind of the failure that a library's message tells, None if it tells none of these; and
    whether it is the consequence of another rank's end.
    """
    for names, kind in _TOLD.items():
        if re.search(names, text):
            return kind, names == _GONE
    return None, False


def is_lost_connection(text: str) -> bool:
    """Whether a line tells that a rank only met the end of another one, the real failure."""
    return kind_of_text(text)[1]
