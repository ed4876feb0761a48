"""Runtime: number formats, and the settings of the process and of the model's execution that change
speed and memory.

A precision also changes the numbers in which a training computes and keeps its weights, and the
scaling of its gradients; the other settings leave the result as it is.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.config.schema import PrecisionConfig, TrialConfig
from autotune.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """The configuration's ``precision`` applied to one device."""

    settings: PrecisionConfig
    device: torch.device

    @property
    def weights_dtype(self) -> torch.dtype:
        """Dtype of weights, buffers and floating-point inputs."""
        dtype: torch.dtype = getattr(torch, self.settings.weights_dtype)
        return dtype

    def apply(self) -> None:
        """Set how this process multiplies float32 numbers, whatever an earlier training set.

        Without a setting, torch's own holds: TensorFloat-32 in convolutions alone. They are set by
        ``allow_tf32``: if torch's newer ``conv.fp32_precision`` is set, any code that reads that
        flag raises.
        """
        wanted = self.settings.float32_precision
        # a value that others set for all operators would apply
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]  # missing in stubs
        torch.backends.cudnn.fp32_precision = "none"
        torch.set_float32_matmul_precision("high" if wanted == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = wanted != "ieee"

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Autocast context for forward pass and loss; it does nothing without an autocast dtype."""
        dtype = self.settings.autocast_dtype
        return (
            torch.autocast(self.device.type, getattr(torch, dtype))
            if dtype
            else contextlib.nullcontext()
        )

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """A new gradient scaler for float16 autocast; None if none is needed.

        A step whose scaled gradients overflow is skipped. Fused optimizers decide that on the
        device; others make the host wait for the device in each step.
        """
        if self.settings.autocast_dtype != "float16":
            return None
        # The scaler may skip the first steps until it finds the scale; the schedule advances all
        # the same.
        warnings.filterwarnings(
            "ignore", message="Detected call of `lr_scheduler.step", category=UserWarning
        )
        return torch.amp.GradScaler(self.device.type)

    def outputs(self, outputs: Tensor) -> Tensor:
        """A model's outputs as the loss takes them: converted to float32 if the weights have
        another dtype.
        """
        return (
            outputs
            if self.weights_dtype is torch.float32 or not isinstance(outputs, Tensor)
            else outputs.float()
        )

    def convert(self, model: nn.Module) -> nn.Module:
        """Convert the model to the precision's number formats.

        Raises:
            ConfigError: float8 is set, but torchao is not installed or the model has no linear
                layer that float8 can compute.
        """
        model = model.to(self.weights_dtype)
        return (
            _to_float8(model, emulate=self.device.type != "cuda") if self.settings.float8 else model
        )


def _to_float8(model: nn.Module, *, emulate: bool) -> nn.Module:
    """Replace the model's linear layers by torchao's float8 layers.

    ``emulate`` only rounds like float8, for devices other than GPUs. Batches of any size are padded
    to the multiples of 16 rows that float8 multiplies.
    """
    try:
        # optional extra
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"precision.float8: needs torchao ({error}): pip install 'autotune[fp8]'"
        ) from error

    def fits(module: nn.Module, name: str) -> bool:
        return (
            isinstance(module, nn.Linear)
            and module.in_features % 16 == module.out_features % 16 == 0
        )

    if not any(fits(module, name) for name, module in model.named_modules()):
        raise ConfigError(
            "precision.float8: the model has no linear layer whose sizes are multiples of 16, which"
            " float8 needs"
        )
    return convert_to_float8_training(  # type: ignore[no-any-return]  # torchao has no types
        model,
        module_filter_fn=fits,
        config=Float8LinearConfig(emulate=emulate, pad_inner_dim=True),
    )


def apply_runtime(config: TrialConfig, device: torch.device, num_threads: int) -> None:
    """Apply the configuration's runtime settings to this process, whatever an earlier training set.

    Args:
        config: configuration with the settings, in its ``runtime``.
        device: the device that trains.
        num_threads: number of CPU threads, unless the configuration sets one.
    """
    runtime = config.runtime
    torch.set_num_threads(runtime.num_threads or num_threads)
    torch.backends.cudnn.benchmark = runtime.cudnn_benchmark
    if device.type == "cuda":
        # no public one
        torch._C._accelerator_setAllocatorSettings(  # noqa: SLF001
            f"expandable_segments:{runtime.expandable_segments}"
        )
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # every training compiles for itself


def checkpoint_activations(model: nn.Module, *, recompute_statistics: bool) -> None:
    """Checkpoint a model's blocks: each block keeps only its inputs, and computes its activations
    again in the backward pass.

    The blocks are what ``model.blocks()`` returns, or else the children of every outermost
    Sequential and ModuleList. With ``recompute_statistics`` the second forward pass may update
    batch norm's running statistics again; a compiled pass does not anyway.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), as
    torch.utils.checkpoint.
    """
    for block in _blocks(model):
        settings: dict[str, Any] = {}
        if not recompute_statistics:
            settings["context_fn"] = functools.partial(_contexts, block)
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, **settings
        )


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a block's forward pass, and of the one that computes its activations again."""
    return contextlib.nullcontext(), _statistics_kept(block)


def _blocks(model: nn.Module) -> Sequence[nn.Module]:
    blocks_method = getattr(model, "blocks", None)
    return list(blocks_method() if callable(blocks_method) else _children_of_containers(model))


def _children_of_containers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of every outermost Sequential and ModuleList in a module."""
    for child in module.children():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            yield child
        else:
            yield from _children_of_containers(child)


@contextlib.contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Context in which a forward pass leaves the running statistics of batch norms unchanged."""
    batch_norm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001  # no public base class
    norms = [
        module
        for module in block.modules()
        if isinstance(module, batch_norm) and module.track_running_stats
    ]
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


Gradients = Callable[[Tensor, Tensor], None]
"""Puts the gradients of a batch, of inputs and targets, into the parameters' ``.grad``."""


class GraphedGradients:
    """Computes a batch's gradients by replaying a CUDA graph: one launch for the whole forward and
    backward pass.

    A graph reads and writes fixed addresses: inputs are copied into the graph's own tensors, and
    gradients stay where the capture put them, so the parameters' ``.grad`` must not be moved. There
    is one graph for each shape of inputs and each set of trainable parameters, because a technique
    may unfreeze parameters: a graph may be captured amid a training, whose running statistics the
    warm-ups leave as they were. Warm-ups and captures share one stream, because autograd adds up a
    parameter's gradient on the stream of its first use as long as anything keeps that part of the
    autograd graph, such as the masked weights of pruning.

    Source: the PyTorch documentation, "CUDA semantics: whole-network capture".
    """

    _NUM_WARM_UPS = 3

    def __init__(self, gradients: Gradients, model: nn.Module) -> None:
        self._gradients = gradients
        self._model = model
        self._parameters = list(model.parameters())
        # missing in torch's stubs
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._replays: dict[object, Gradients] = {}
        """What replays each graph with a batch."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Put the batch's gradients into the parameters' ``.grad``."""
        key = inputs.shape, tuple(parameter.requires_grad for parameter in self._parameters)
        if key not in self._replays:
            self._replays[key] = self._captured(inputs, targets)
        self._replays[key](inputs, targets)

    def _captured(self, inputs: Tensor, targets: Tensor) -> Gradients:
        """Capture a graph for batches of this shape, and return what replays it."""
        static_inputs, static_targets = inputs.clone(), targets.clone()
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self._NUM_WARM_UPS):
                self._model.zero_grad(set_to_none=True)
                self._gradients(static_inputs, static_targets)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on calling CUDA: one that gathers batches may pin memory meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._gradients(static_inputs, static_targets)
        for buffer, before in buffers:
            buffer.copy_(before)
        gradients = [parameter.grad for parameter in self._parameters]

        def replay(inputs: Tensor, targets: Tensor) -> None:
            static_inputs.copy_(inputs)
            static_targets.copy_(targets)
            graph.replay()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient

        return replay
