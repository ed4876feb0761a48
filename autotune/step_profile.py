"""Records of a profile: how the time of a training step divides into parts and operators.

Every number is a mean over the profiled steps, and every time is in seconds per step. The times of the parts sum to the time of the step,
on the host and, with a GPU, on the GPU too.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

BETWEEN = "between"
"""The part of a step outside all named parts: Python code between them."""
WAITING = "waiting"
"""The part in which the host waits for the GPU: when it reads a value back within the step, and at the step's end if it is ahead."""
IDLE = "idle"
"""The part in which the GPU has nothing to do."""

PARTS = ("data", "augmentation", "forward", "backward", "graph", "optimizer")
"""The named parts of a training step, in the order in which they run."""


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """Time of all calls of one operator or of one GPU kernel."""

    name: str
    calls: float
    self_seconds: float
    """Time on the device: of the operator itself on the CPU, of the kernels that it launches on a GPU."""
    shapes: str
    """Shapes of the inputs with which the operator takes longest; empty if unknown."""
    float32_seconds: float
    """Part of ``self_seconds`` on float32 inputs."""
    contiguous_seconds: float
    """Part of ``self_seconds`` on 4-D inputs in the contiguous memory format whose channels-last format would differ."""

    @property
    def short_name(self) -> str:
        """The name with the prefix of autograd's operators shortened to ``autograd:``."""
        return self.name.replace("autograd::engine::evaluate_function: ", "autograd: ")

    @property
    def is_convolution(self) -> bool:
        """Whether the operator is a convolution, forward or backward."""
        return "conv" in self.name

    @property
    def is_matrix_product(self) -> bool:
        """Whether the operator multiplies matrices."""
        return self.name.removeprefix("aten::") in {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_addmm_activation"}


@dataclass(frozen=True, kw_only=True)
class Synchronisation:
    """An operator in the step that makes the host wait for a GPU; on the CPU, one that would on a GPU."""

    operator: str
    part: str
    calls: float
    seconds: float
    source: str | None
    """The function that called the operator, as ``file(line): name`` with the function's first line; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of a training step, from the trace of a few steps."""

    step_seconds: float
    median_step_seconds: float
    """Median of the steps' times on the host; far below the mean if a few steps take much longer than the others."""
    host_seconds: Mapping[str, float]
    """Time on the host by part, including BETWEEN and WAITING; the times sum to ``step_seconds``."""
    device_seconds: Mapping[str, float]
    """Time of GPU kernels by the part that launched them, and of IDLE; the times sum to ``step_seconds``. Empty on the CPU."""
    data_wait_seconds: float
    """Time spent on the next batch while nothing else runs: all of ``data`` on the CPU; on a GPU its idle time during ``data``."""
    python_seconds: float
    """Time of the host outside all operators, without the parts ``data`` and WAITING."""
    operators: tuple[OperatorTime, ...]
    """Operators of the step, longest first."""
    kernels: tuple[OperatorTime, ...]
    """GPU kernels of the step, longest first; empty on the CPU."""
    num_operators: float
    num_kernels: float
    synchronisations: tuple[Synchronisation, ...]

    def share(self, seconds: float) -> float:
        """A time as a fraction of the step."""
        return seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def idle_share(self) -> float:
        """Fraction of a step in which the GPU has nothing to do; 0 on the CPU."""
        return self.share(self.device_seconds.get(IDLE, 0.0))


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The profile of one configuration's training steps."""

    times: StepTimes
    num_steps: int
    batch_size: int
    plain_step_seconds: float
    """Seconds of a step without the profiler, which makes every operator take longer."""
    device: str
    """``cpu`` or ``cuda``."""
    device_name: str
    compute_capability: tuple[int, int] | None
    num_threads: int
    peak_memory_bytes: int
    """Peak memory before the profiler started."""
    memory_limit_bytes: int | None
    """The GPU's memory; None on the CPU."""
    is_resident: bool
    """Whether the training split is kept on the device."""
    is_small: bool
    """Whether the training split would fit on the device."""
    optimizer_kernels: tuple[str, ...]
    """The names, of ``fused`` and ``foreach``, that ``runtime.optimizer_kernels`` accepts for the optimizer."""
    settings: Mapping[str, Any]
    """Values of the configuration's groups ``runtime``, ``data_path`` and ``precision``, by dotted key."""

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain nested data."""
        return asdict(self)
