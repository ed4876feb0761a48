"""The record of a profile: where the time of a training step goes.

Every number is a mean over the profiled steps, and every time is seconds a step. The parts of a step add up to the step, on the host
and, where there is a GPU, on it too.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

BETWEEN = "between"
"""The part of a step that has no name of its own: Python between the others."""
WAITING = "waiting"
"""The host waits for the GPU: in the step, where something is read back, and at its end, where the host was ahead."""
IDLE = "idle"
"""The GPU has nothing to do."""

PARTS = ("data", "augmentation", "forward", "backward", "graph", "optimizer")
"""The parts of a step that the training names, in their order."""


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """One kind of operator, or of GPU kernel."""

    name: str
    calls: float
    self_seconds: float
    """On the device: of the operator itself on the CPU, of the kernels that it launches on a GPU."""
    shapes: str
    """Of its inputs where it takes longest; empty where that is unknown."""
    float32_seconds: float
    """Of these, on float32 inputs."""
    contiguous_seconds: float
    """Of these, on 4-D inputs in the usual memory format, where channels-last would be another one."""

    @property
    def short_name(self) -> str:
        """The name without what stands before all of autograd's."""
        return self.name.replace("autograd::engine::evaluate_function: ", "autograd: ")

    @property
    def is_convolution(self) -> bool:
        """Whether it convolves, forward or backward."""
        return "conv" in self.name

    @property
    def is_matrix_product(self) -> bool:
        """Whether it multiplies matrices."""
        return self.name.removeprefix("aten::") in {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_addmm_activation"}


@dataclass(frozen=True, kw_only=True)
class Synchronisation:
    """An operator in the step that makes the host wait for a GPU; on the CPU, one that would."""

    operator: str
    part: str
    calls: float
    seconds: float
    source: str | None
    """The function that called it, as ``file(line): name`` with the line where it begins; None where that is unknown."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What the trace of a few steps says."""

    step_seconds: float
    median_step_seconds: float
    """Of the host's; far below the mean where a few steps take much longer than the others."""
    host_seconds: Mapping[str, float]
    """By part, BETWEEN and WAITING among them; they sum to the step."""
    device_seconds: Mapping[str, float]
    """Of a GPU's kernels, by the part that launched them, and IDLE; they sum to the step. Empty on the CPU."""
    data_wait_seconds: float
    """Spent on the next batch while nothing else was done: on the CPU all of ``data``, on a GPU the idle time during it."""
    python_seconds: float
    """Of the host in no operator, data and waiting apart."""
    operators: tuple[OperatorTime, ...]
    """Longest first."""
    kernels: tuple[OperatorTime, ...]
    """Likewise; empty on the CPU."""
    num_operators: float
    num_kernels: float
    synchronisations: tuple[Synchronisation, ...]

    def share(self, seconds: float) -> float:
        """A time as a fraction of the step."""
        return seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def idle_share(self) -> float:
        """The fraction of a step in which a GPU has nothing to do; 0 on the CPU."""
        return self.share(self.device_seconds.get(IDLE, 0.0))


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The profile of one configuration's training steps."""

    times: StepTimes
    num_steps: int
    batch_size: int
    plain_step_seconds: float
    """Without the profiler, which makes every operator take longer."""
    device: str
    """``cpu`` or ``cuda``."""
    device_name: str
    compute_capability: tuple[int, int] | None
    num_threads: int
    peak_memory_bytes: int
    """Before the profiler started."""
    memory_limit_bytes: int | None
    """The GPU's memory; None on the CPU."""
    is_resident: bool
    """Whether the training split lies on the device."""
    is_small: bool
    """Whether it would fit there."""
    optimizer_kernels: tuple[str, ...]
    """What ``runtime.optimizer_kernels`` may name for the optimizer: of fused and foreach."""
    settings: Mapping[str, Any]
    """The configuration's values by dotted key, of ``runtime``, ``data_path`` and ``precision``."""

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain nested data."""
        return asdict(self)
