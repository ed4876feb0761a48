"""Runtime: settings of the process and of the model's execution that change speed and memory, not what is computed."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autotune.config.schema import TrialConfig

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From inputs and targets of a batch to its loss."""


def apply_runtime(config: TrialConfig, device: torch.device, num_threads: int) -> None:
    """Give this process the configuration's settings, so that nothing is left of an earlier training's.

    Args:
        config: its ``runtime``.
        device: what is trained on.
        num_threads: CPU threads, where the configuration does not say a number.
    """
    runtime = config.runtime
    torch.set_num_threads(runtime.num_threads or num_threads)
    torch.backends.cudnn.benchmark = runtime.cudnn_benchmark
    if device.type == "cuda":
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{runtime.expandable_segments}")  # noqa: SLF001  # no public one
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # every training compiles for itself


def compiled(compute: Compute, mode: str | None) -> Compute:
    """The function compiled for fixed shapes, or as it is where there is no mode."""
    if mode is None:
        return compute
    return torch.compile(compute, mode=mode, dynamic=False)


def checkpoint_activations(model: torch.nn.Module, *, recompute_statistics: bool) -> None:
    """Let a model's blocks keep their inputs only and compute the rest anew in the backward pass.

    The blocks are what ``model.blocks()`` returns, else the children of every Sequential and ModuleList. ``recompute_statistics``
    lets a second forward pass move batch norm's running statistics again; a compiled one does not anyway.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), as torch.utils.checkpoint.
    """
    for block in _blocks(model):
        contexts = functools.partial(_contexts, block)
        settings: dict[str, Any] = {} if recompute_statistics else {"context_fn": contexts}
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **settings)


def _blocks(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    own = getattr(model, "blocks", None)
    if callable(own):
        return list(own())
    containers = [each for each in model.modules() if isinstance(each, torch.nn.Sequential | torch.nn.ModuleList)]
    nested = {id(inner) for outer in containers for inner in outer.modules() if inner is not outer}
    return [child for each in containers if id(each) not in nested for child in each.children()]


def _contexts(block: torch.nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return contextlib.nullcontext(), _statistics_kept(block)


@contextlib.contextmanager
def _statistics_kept(block: torch.nn.Module) -> Iterator[None]:
    """Batch norms leave their running statistics as they are."""
    norms = [each for each in block.modules() if isinstance(each, torch.nn.modules.batchnorm._BatchNorm) and each.track_running_stats]  # noqa: SLF001
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            if norm.training and norm.num_batches_tracked is not None:
                norm.num_batches_tracked -= 1


class GraphedGradients:
    """Gradients of a batch by replaying a CUDA graph: one launch for the whole forward and backward pass.

    A graph reads and writes fixed addresses: inputs are copied into its own, gradients lie where the capture put them, so the
    parameters' ``.grad`` must be left in place. One graph a shape of inputs and a set of parameters that train: a technique may let
    frozen ones go.

    Source: the PyTorch documentation, "CUDA semantics: whole-network capture".
    """

    _NUM_WARM_UPS = 3

    def __init__(self, gradients: Callable[[torch.Tensor, torch.Tensor], None], parameters: Sequence[torch.nn.Parameter]) -> None:
        self._gradients = gradients
        self._parameters = parameters
        self._graphs: dict[object, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, list[torch.Tensor | None]]] = {}

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Put the batch's gradients into the parameters' ``.grad``."""
        key = inputs.shape, tuple(each.requires_grad for each in self._parameters)
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs, targets)
        graph, own_inputs, own_targets, gradients = self._graphs[key]
        own_inputs.copy_(inputs)
        own_targets.copy_(targets)
        graph.replay()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _capture(
        self, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
        own_inputs, own_targets = inputs.clone(), targets.clone()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # missing in torch's stubs
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(self._NUM_WARM_UPS):
                self._forget()
                self._gradients(own_inputs, own_targets)
        torch.cuda.current_stream().wait_stream(aside)
        self._forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a thread that gathers batches may pin memory meanwhile
            self._gradients(own_inputs, own_targets)
        return graph, own_inputs, own_targets, [parameter.grad for parameter in self._parameters]

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
