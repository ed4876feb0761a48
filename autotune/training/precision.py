"""Precision: the number formats in which a training computes and keeps its weights, and the scaling of its gradients."""

import contextlib
import warnings
from dataclasses import dataclass

import torch

from autotune.config.schema import PrecisionConfig
from autotune.errors import ConfigError

FLOAT8_ROWS = 16
"""Number of which a matrix's rows must be a multiple, so that float8 can multiply the matrix for a weight's gradient.

Source: torch._scaled_mm: the dimension that is summed over is divisible by 16.
"""


@dataclass(frozen=True)
class Precision:
    """The configuration's ``precision`` applied to one device."""

    settings: PrecisionConfig
    device: torch.device

    @property
    def weights_dtype(self) -> torch.dtype:
        """Dtype of weights, buffers and floating-point inputs."""
        dtype = getattr(torch, self.settings.weights_dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def apply(self) -> None:
        """Set how this process multiplies float32 numbers, whatever an earlier training set.

        Convolutions are set by ``allow_tf32``: if torch's newer ``conv.fp32_precision`` is set, any code that reads that flag raises.
        """
        tf32 = self.settings.float32_precision == "tf32"
        for backend in (torch.backends, torch.backends.cudnn):  # without TensorFloat-32, a value set by others would apply
            backend.fp32_precision = "none"  # type: ignore[attr-defined]  # missing in torch's stubs
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Autocast context for forward pass and loss; it does nothing without an autocast dtype."""
        dtype = self.settings.autocast_dtype
        return torch.autocast(self.device.type, getattr(torch, dtype)) if dtype else contextlib.nullcontext()

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """A new gradient scaler for float16 autocast; None if none is needed.

        A step whose scaled gradients overflow is skipped. Fused optimizers decide that on the device; others make the host wait
        for the device in each step.
        """
        if self.settings.autocast_dtype != "float16":
            return None
        # The scaler may skip the first steps until it finds the scale; the schedule advances all the same.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        return torch.amp.GradScaler(self.device.type)

    def outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        """A model's outputs as the loss takes them: converted to float32 if the weights have another dtype."""
        return outputs if self.weights_dtype is torch.float32 or not isinstance(outputs, torch.Tensor) else outputs.float()

    def float8_rows(self, model: torch.nn.Module, inputs: torch.Tensor) -> set[int]:
        """Numbers of rows of the matrices that the model's float8 layers receive for the given inputs; empty without such layers."""
        if not self.settings.float8:
            return set()
        from torchao.float8.float8_linear import Float8Linear  # noqa: PLC0415  # optional extra, installed if the model has float8 layers

        rows: set[int] = set()
        hooks = [
            layer.register_forward_pre_hook(lambda _, arguments: rows.add(arguments[0].numel() // arguments[0].shape[-1]))
            for layer in model.modules()
            if isinstance(layer, Float8Linear)
        ]
        in_training = [module for module in model.modules() if module.training]
        try:
            with torch.no_grad(), self.autocast():
                model.eval()(inputs)
        finally:
            for module in in_training:
                module.training = True
            for hook in hooks:
                hook.remove()
        return rows

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Convert the model to the precision's number formats.

        Raises:
            ConfigError: float8 is set, but torchao is not installed or the model has no linear layer that float8 can compute.
        """
        model = model.to(self.weights_dtype)
        return _to_float8(model, emulate=self.device.type != "cuda") if self.settings.float8 else model


def _to_float8(model: torch.nn.Module, *, emulate: bool) -> torch.nn.Module:
    """Replace the model's linear layers by torchao's float8 layers; ``emulate`` only rounds like float8, for devices other than GPUs."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  # optional extra
        from torchao.float8.float8_linear import Float8Linear  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"precision.float8: needs torchao ({error}); accepted after pip install 'autotune[fp8]'") from error

    def fits(module: torch.nn.Module, _: str) -> bool:
        return isinstance(module, torch.nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0

    converted = convert_to_float8_training(model, module_filter_fn=fits, config=Float8LinearConfig(emulate=emulate))
    if not any(isinstance(module, Float8Linear) for module in converted.modules()):
        raise ConfigError("precision.float8: the model has no linear layer whose sizes are multiples of 16, which float8 needs")
    return converted  # type: ignore[no-any-return]  # torchao has no types
