"""Prepares a process from which trainings are forked: it imports once what trainings import, and
runs nothing of a training.

A training imports torch's compiler with its first optimizer, and the modules of its model and data
set when these are made. A process that is forked after these imports need not repeat them. A fork
breaks threads, which do not exist in the forked process, and a CUDA context. So nothing is imported
here that starts a thread (pandas does, for CSV tables), and OpenBLAS, which starts its threads
when it is loaded, is loaded with one thread (``one_blas_thread``); a forked process then sets the
usual number (``usual_blas_threads``).
"""

import gc
import importlib
import os
import pkgutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from threadpoolctl import threadpool_limits

_PACKAGES = (
    "autotune.workloads",
    "autotune.training",
    "autotune.training.optimizers",
    "autotune.training.techniques",
)
_MODULES = ("torch._dynamo", "numpy.ma", "safetensors.torch", "pydoc_data.topics")
"""Further modules that trainings import: torch's compiler with its optimizers, ``numpy.ma`` with
tables, Python's topics with texts."""
_TASKS = Path("/proc/self/task")
_END_SECONDS = 1.0
"""Longest wait for the kernel to end a thread."""
_BLAS = "OPENBLAS_NUM_THREADS"
_ARROW = "JE_ARROW_MALLOC_CONF"
_WANTED_BLAS = "AUTOTUNE_OPENBLAS_NUM_THREADS"
"""Variable that keeps the user's value of ``OPENBLAS_NUM_THREADS`` for the forked processes;
empty if there was none."""


def preload() -> None:
    """Import what trainings import, so that forked processes need not.

    The garbage collector then ignores the imported objects.

    A thread does the imports, and has ended when this returns: the imports' memory is then in that
    thread's own part of the heap (a glibc arena), and the main thread's part stays as compact as in
    a new process. Otherwise a forked process would train in the gaps between the imports' blocks,
    which made steps of 4 ms 5% longer (``benchmarks/README.md``).
    """
    gc.disable()  # it would walk the imported objects again and again
    try:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(_import_all).result()
    finally:
        gc.enable()
    # else a collection in a forked process would copy every memory page of the imported objects
    gc.freeze()
    until = time.monotonic() + _END_SECONDS
    while len(list(_TASKS.iterdir())) > 1 and time.monotonic() < until:
        time.sleep(0.001)


def _import_all() -> None:
    packages = [importlib.import_module(package) for package in _PACKAGES]
    names = [
        module.name
        for package in packages
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    for name in (*_MODULES, *names):
        importlib.import_module(name)


def one_blas_thread(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment for a process that trainings will be forked from: OpenBLAS and pyarrow's
    memory allocator start no threads in it.
    """
    return {
        _ARROW: "background_thread:false",
        **environment,
        _BLAS: "1",
        _WANTED_BLAS: environment.get(_BLAS, ""),
    }


def usual_blas_threads() -> None:
    """Undo ``one_blas_thread`` in a forked process: restore its environment and give OpenBLAS
    the threads of a new process.
    """
    setting = os.environ.pop(_WANTED_BLAS, None)
    if setting is None:
        return
    if setting:
        os.environ[_BLAS] = setting
    else:
        os.environ.pop(_BLAS, None)
    settings = (setting, os.environ.get("OMP_NUM_THREADS", ""))
    num_threads = next(
        (int(text) for text in settings if text.isdigit() and int(text) > 0),
        len(os.sched_getaffinity(0)),
    )
    if num_threads > 1:
        threadpool_limits(num_threads, user_api="blas")
