"""A process from which trainings are forked: all that they import is imported once, and nothing of a training is done.

A training imports torch's compiler with its first optimizer, its model and its data set when they are made; forked from a process that
has these, it finds them there. What must not be there is what a fork breaks: threads, which a forked process has not, and a CUDA context.
So no module is imported here that starts a thread (pyarrow does, with tables of CSV), and OpenBLAS, which starts its threads as it is
loaded, is loaded with one (``one_blas_thread``); a forked process gives it those that a new process has.
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

_PACKAGES = ("autotune.workloads", "autotune.training", "autotune.training.optimizers", "autotune.training.techniques")
_MODULES = ("torch._dynamo", "numpy.ma", "safetensors.torch", "pydoc_data.topics")
"""What trainings import beside those: with torch's optimizers its compiler, with tables ``numpy.ma``, with texts Python's topics."""
_WITH_THREADS = ("autotune.workloads.csv_table",)
_TASKS = Path("/proc/self/task")
_END_SECONDS = 1.0
"""What the kernel may take to end a thread."""
_BLAS = "OPENBLAS_NUM_THREADS"
_WANTED_BLAS = "AUTOTUNE_OPENBLAS_NUM_THREADS"
"""Keeps the user's own setting, empty where there was none, for the forked processes."""


def preload() -> None:
    """Import what trainings import, so that forked ones need not; objects made by that are left alone by the garbage collector.

    A thread imports it, and has ended when this returns: what imports allocate lies in the thread's own part of the heap (an arena
    of glibc's) then. The main thread's part stays as compact as a new process's, where a forked process would else train in what
    imports have left between their own blocks, which made steps of 4 ms 5% longer (``benchmarks/README.md``).
    """
    gc.disable()  # it would walk all that imports make, again and again
    try:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(_import_all).result()
    finally:
        gc.enable()
    gc.freeze()  # a collection in a forked process would else copy every page that they lie on
    until = time.monotonic() + _END_SECONDS
    while len(list(_TASKS.iterdir())) > 1 and time.monotonic() < until:  # the kernel may take a moment more to end the thread
        time.sleep(0.001)


def _import_all() -> None:
    for name in (*_MODULES, *_names_of_modules()):
        importlib.import_module(name)


def _names_of_modules() -> list[str]:
    packages = [importlib.import_module(each) for each in _PACKAGES]
    names = [module.name for package in packages for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    return [name for name in names if name not in _WITH_THREADS]


def fork_fault() -> str | None:
    """Why nothing can be trained in a fork of this process; None where it can."""
    threads = sorted(path.joinpath("comm").read_text(encoding="utf-8").strip() for path in _TASKS.iterdir())
    if len(threads) > 1:
        return f"it has {len(threads)} threads ({', '.join(threads)})"
    devices = sorted({target for target in _open_files() if target.startswith("/dev/nvidia")})
    return f"it holds {', '.join(devices)}" if devices else None


def _open_files() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(path.readlink()))
        except FileNotFoundError:  # what the folder itself was read by
            continue
    return found


def one_blas_thread(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is to be forked: OpenBLAS starts no threads in it."""
    return {**environment, _BLAS: "1", _WANTED_BLAS: environment.get(_BLAS, "")}


def usual_blas_threads() -> None:
    """Give a forked process the environment, and OpenBLAS the threads, that a new process has."""
    wanted = os.environ.pop(_WANTED_BLAS, None)
    if wanted is None:
        return
    if wanted:
        os.environ[_BLAS] = wanted
    else:
        os.environ.pop(_BLAS, None)
    number = next((int(each) for each in (wanted, os.environ.get("OMP_NUM_THREADS", "")) if each.isdigit() and int(each) > 0), None)
    number = number or len(os.sched_getaffinity(0))
    if number > 1:
        threadpool_limits(number, user_api="blas")
