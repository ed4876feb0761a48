"""What an exception that ended a training says: the one place where its type, and error codes of
torch, CUDA, NVML and the operating system, become a ``Failure``.
"""

import traceback

import pynvml
import torch
from torch import distributed

from autotune.errors import (
    AutotuneError,
    DivergedError,
    FileError,
    StateError,
    TimedOutError,
    refusal_of,
)
from autotune.failure import (
    KIND_OF_CUDA_ERROR,
    KIND_OF_ERRNO,
    Failure,
    FailureKind,
    ProcessFailedError,
    causes,
    kind_of_text,
)
from autotune.training.device import is_out_of_memory


def failure_of(error: BaseException) -> Failure:
    """The failure that an exception is, told in a line where the trained code is not at fault,
    else with its traceback. Called while the exception is handled.
    """
    kind, is_consequence, cause = _kind_of(error)
    refusal = None
    if kind is None:
        refusal = refusal_of(error)
        kind = FailureKind.USER_CODE if refusal is None else FailureKind.CONFIGURATION
    elif isinstance(error, AutotuneError):
        refusal = str(error)
    elif kind is FailureKind.LOST:
        refusal = str(cause).partition("\n")[0].rstrip(". ") or type(cause).__name__
    return Failure(
        kind=kind,
        message=traceback.format_exc() if refusal is None else refusal,
        has_traceback=refusal is None,
        is_consequence=is_consequence,
    )


def _kind_of(error: BaseException) -> tuple[FailureKind | None, bool, BaseException]:
    """Kind of an exception's failure, None if that is its code's or a refusal; whether it is the
    consequence of another rank's end; and the exception among its causes that tells it.
    """
    for cause in causes(error):
        if isinstance(cause, ProcessFailedError) and cause.kind is not None:
            return cause.kind, cause.is_consequence, cause
    if is_out_of_memory(error):
        return FailureKind.MEMORY, False, error
    for cause in causes(error):
        kind, is_consequence = _kind_of_one(cause)
        if kind is not None:
            return kind, is_consequence, cause
    return _KIND_OF_AUTOTUNES.get(type(error)), False, error


_KIND_OF_AUTOTUNES: dict[type[BaseException], FailureKind] = {
    StateError: FailureKind.LOST,  # of a paused trial, which continues from an older state
    DivergedError: FailureKind.DIVERGED,
    TimedOutError: FailureKind.TIMED_OUT,
}


def _kind_of_one(error: BaseException) -> tuple[FailureKind | None, bool]:
    match error:
        case OSError() | FileError():
            return KIND_OF_ERRNO.get(error.errno or 0), False
        case torch.AcceleratorError() if isinstance(code := getattr(error, _CODE, None), int):
            return KIND_OF_CUDA_ERROR.get(code), False
        case distributed.QueueEmptyError() | ProcessFailedError():
            return None, False
        case distributed.DistNetworkError() | distributed.DistStoreError():
            return FailureKind.LOST, True
        case pynvml.NVMLError():
            is_lost = error.value == pynvml.NVML_ERROR_GPU_IS_LOST
            return FailureKind.MACHINE if is_lost else None, False
    told = kind_of_text(str(error))
    # the other names are words of any error
    is_told = isinstance(error, RuntimeError) or told[0] is FailureKind.DISK
    return told if is_told else (None, False)


_CODE = "error_code"
"""Attribute that torch gives an AcceleratorError; missing in its stubs."""
