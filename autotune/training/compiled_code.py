"""Compiled code that later trainings use again: what it depends on, its files on this machine, and
what compiling it took.

A training that finds its code compiled is charged what compiling took when it was done: else the
build seconds of equal trainings would depend on which came first. Each graph has a folder of its
own for the files of torch's compiler, so that none is cheaper to compile because of another.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from autotune.config.schema import TrialConfig
from autotune.files import replace_file
from autotune.measurement import Phase, PhaseClock
from autotune.remote import cache_folder
from autotune.training.capabilities import cpu_name, versions
from autotune.training.device import device_kind

_log = logging.getLogger(__name__)

_GRAPH_KEYS = (
    "model",
    "loss",
    "technique",
    "data",
    "batch_size",
    "precision",
    "runtime",
    "parallelism",
)
"""Keys of a configuration that compiled code and CUDA graphs depend on."""
FOLDER_VARIABLE, _THREADS_VARIABLE = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"


class Cost(NamedTuple):
    """What compiling or capturing took, with the passes that it needs."""

    seconds: float
    joules: float | None
    """None if energy was not measured."""

    def minus(self, other: "Cost") -> "Cost":
        """What is left of this cost without another one."""
        seconds = self.seconds - other.seconds
        if self.joules is None or other.joules is None:
            return Cost(seconds, None)
        return Cost(seconds, self.joules - other.joules)


def graph_of(config: TrialConfig, device: torch.device, num_threads: int) -> str:
    """What a configuration's compiled code and CUDA graphs depend on, as text.

    The shapes that its augmentation makes come besides.
    """
    values = config.as_dict()
    del values["runtime"]["optimizer_kernels"]
    graph = {key: values[key] for key in _GRAPH_KEYS}
    return json.dumps([graph, str(device), num_threads], sort_keys=True, default=str)


class CompiledCode:
    """The code of one graph as this process has it.

    Args:
        graph: what the code depends on, shapes included; None if it is not compiled, but only
            captured.
        num_threads: number of threads that compile, unless the user set
            ``TORCHINDUCTOR_COMPILE_THREADS``.
    """

    def __init__(self, graph: str | None, num_threads: int) -> None:
        self._graph, self._num_threads = graph, num_threads
        self._cost: Cost | None = None
        """Known once this process has the code."""

    @contextlib.contextmanager
    def first_passes(self, clock: PhaseClock) -> Iterator[None]:
        """Context of a training's first passes, which compile the code unless it is there.

        The clock's build phase is charged its cost.
        """
        before = _spent(clock)
        with (
            _files(self._graph, self._num_threads)
            if self._graph and self._cost is None
            else contextlib.nullcontext()
        ) as cost_of:
            yield
            spent = _spent(clock).minus(before)
            self._cost = self._cost or (cost_of(spent) if cost_of else spent)
        unspent = self._cost.minus(spent)
        if unspent.seconds > 0:
            clock.charge(*unspent)


def _spent(clock: PhaseClock) -> Cost:
    clock.enter(Phase.BUILD)  # waits for the device, and reads its energy
    return Cost(clock.seconds(Phase.BUILD), clock.joules(Phase.BUILD))


@contextlib.contextmanager
def _files(graph: str, num_threads: int) -> Iterator[Callable[[Cost], Cost]]:
    """Context in which torch's compiler keeps its files in the graph's folder.

    New files become those of the graph if all went well.

    The record of a graph says which folder has its files and what compiling took. A graph without
    one is compiled in an empty folder, also while another process does so: then the record that is
    written last counts. Yields a function that turns what the passes in this context took into what
    compiling took: by the record, if there was one.
    """
    # torch's compiler takes seconds to import
    from torch._inductor import config, utils  # noqa: PLC0415

    if _THREADS_VARIABLE not in os.environ:
        config.compile_threads = num_threads
    digest = hashlib.sha256(json.dumps([graph, _machine()]).encode()).hexdigest()[:24]
    utils.clear_caches()  # of the files that this process found elsewhere
    with tempfile.TemporaryDirectory() as unkept:
        record = (_root() or Path(unkept)) / f"{digest}.json"
        known, folder = _read(record)
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix=f"{digest}-", dir=record.parent))

        def cost_of(spent: Cost) -> Cost:
            if known:
                return known
            replace_file(record, json.dumps({"folder": folder.name, **spent._asdict()}))
            return spent

        try:
            # the compiler sets further variables itself, which later graphs are not to find
            with mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(folder)}):
                yield cost_of
        finally:
            if _read(record)[1] != folder:  # nothing names the folder
                shutil.rmtree(folder, ignore_errors=True)
            # Its processes would compute beside the training. The name is private to torch, which
            # may rename it: then they stay, idle.
            compiler = sys.modules.get("torch._inductor.async_compile")
            getattr(compiler, "shutdown_compile_workers", lambda: None)()


def _root() -> Path | None:
    """Folder for the compiled code of all graphs.

    None if it cannot be written.
    """
    # torch's compiler takes seconds to import
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen == default_cache_dir():  # torch's compiler sets its own choice too
        chosen = None
    folder = Path(chosen) if chosen else cache_folder() / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        fault = "cannot be written"
    except OSError as error:
        fault = f"cannot be made: {error.strerror or error}"
    _log.warning("%s: %s; compiled code is not kept for later processes", folder, fault)
    return None


def _read(record: Path) -> tuple[Cost | None, Path | None]:
    """A graph's cost and folder; None without a record that can be read."""
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        folder = record.with_name(values.pop("folder"))
        return Cost(**values), folder
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _machine() -> list[Any]:
    """What compiled code depends on besides its graph: processor, GPU and versions."""
    kind = device_kind(torch.device("cuda")) if torch.cuda.is_available() else None
    return [cpu_name(), kind, *(versions()[name] for name in ("python", "torch", "cuda"))]
