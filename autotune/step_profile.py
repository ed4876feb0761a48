"""How the time of a training step divides into parts and operators, and what to try about it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PARTS = ("data", "augmentation", "forward", "backward", "graph", "optimizer")
"""Parts of a training step, in their order; ``graph`` is forward and backward in one CUDA graph."""
BETWEEN, WAITING, IDLE = "between", "waiting", "idle"
"""The host outside all parts, the host waiting for the GPU after the last step, and the GPU
without work."""


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """Mean time of an operator in a step: on the CPU its own, on a GPU that of the kernels it
    starts.
    """

    name: str
    calls: float
    seconds: float

    @property
    def is_convolution(self) -> bool:
        """Whether the operator is a convolution, forward or backward."""
        return "conv" in self.name

    @property
    def is_product(self) -> bool:
        """Whether the operator is a convolution or multiplies matrices."""
        return self.is_convolution or self.name.removeprefix("aten::") in {
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
        }


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Means over the profiled steps of one configuration, in seconds per step."""

    num_steps: int
    batch_size: int
    plain_step_seconds: float
    """Seconds of a step without the profiler, which makes every operator take longer."""
    step_seconds: float
    host_seconds: Mapping[str, float]
    """Host time by part; the times sum to ``step_seconds``."""
    device_seconds: Mapping[str, float]
    """GPU time by the part that started the kernels, and of IDLE; empty on the CPU."""
    operators: tuple[OperatorTime, ...]
    """Operators of the step, longest first."""
    num_kernels: float
    """Number of GPU kernels in a step."""
    waits: tuple[str, ...]
    """Lines of code (``file:line``) at which the host waits for the GPU within a step."""
    device_name: str
    compute_capability: tuple[int, int] | None
    """CUDA compute capability; None without a GPU of NVIDIA's."""
    num_threads: int
    peak_memory_bytes: int
    memory_limit_bytes: int | None
    """The GPU's memory; None on the CPU."""
    is_resident: bool
    """Whether the training split is kept on the device."""
    is_small: bool
    """Whether the training split would fit on the device."""
    optimizer_kernels: tuple[str, ...]
    """Those of ``fused`` and ``foreach`` that the optimizer accepts."""
    settings: Mapping[str, Any]
    """Values of the groups ``runtime``, ``data_path`` and ``precision``, by dotted key."""

    def share(self, seconds: float) -> float:
        """A time as a fraction of the step."""
        return seconds / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain nested data."""
        return asdict(self)


def advise(profile: StepProfile) -> list[str]:
    """What stands out in a profile, with the settings to try that are not made yet.

    Largest share first.

    A suggestion is worth a try, not known to help: ``autotune compare`` measures that.
    """
    host, device, settings = profile.host_seconds, profile.device_seconds, profile.settings
    on_gpu = bool(device)
    found: list[tuple[float, str, list[str]]] = [
        (0.0, f"the host waits for the GPU at {line}; what it reads can stay on the device", [])
        for line in profile.waits
    ]
    larger = f"batch_size={2 * profile.batch_size}"
    compiles = ["runtime.compile=default"] if settings["runtime.compile"] is None else []
    idle = device.get(IDLE, 0.0)
    data = 0.0 if profile.is_resident else host.get("data", 0.0)
    data = min(data, idle) if on_gpu else data
    if (share := profile.share(data)) >= 0.1:
        tries = ["data_path.on_device=true"] if profile.is_small else []
        tries.append(f"data_path.num_workers={2 * settings['data_path.num_workers'] or 2}")
        found.append((share, f"waiting for the next batch takes {share:.0%} of a step", tries))
    if on_gpu and (share := profile.share(idle - data)) >= 0.2:
        can_graph = (
            not settings["runtime.cuda_graph"]
            and settings["runtime.compile"] in (None, "default")
            and settings["precision.autocast_dtype"] != "float16"
        )
        graph = ["runtime.cuda_graph=true"] if can_graph else []
        finding = (
            f"the GPU is idle for {share:.0%} of a step: its {profile.num_kernels:.0f} kernels "
            "end before the host has started the next ones"
        )
        found.append((share, finding, [*graph, *compiles, larger]))
    computing = sum(operator.seconds for operator in profile.operators)
    python = profile.share(profile.step_seconds - host.get("data", 0.0) - computing)
    if not on_gpu and python >= 0.4:
        found.append(
            (python, f"{python:.0%} of a step is Python around its operators", [larger, *compiles])
        )
    products = profile.share(sum(each.seconds for each in profile.operators if each.is_product))
    is_float32 = (
        settings["precision.autocast_dtype"] is None
        and settings["precision.weights_dtype"] == "float32"
    )
    capability = profile.compute_capability or (0, 0)
    if products >= 0.3 and is_float32 and not settings["precision.float8"] and capability >= (7, 0):
        is_tf32 = settings["precision.float32_precision"] == "tf32"
        formats = ["bf16"] if is_tf32 else ["tf32", "bf16"]
        finding = (
            f"matrix products and convolutions in float32 take {products:.0%} of a step, and this"
            " GPU has tensor cores"
        )
        tries = [f"precision={name}" for name in (formats if capability >= (8, 0) else ["fp16"])]
        found.append((products, finding, tries))
    convolutions = profile.share(
        sum(each.seconds for each in profile.operators if each.is_convolution)
    )
    wanted = ["runtime.channels_last", *(["runtime.cudnn_benchmark"] if on_gpu else [])]
    tries = [f"{key}=true" for key in wanted if not settings[key]]
    if convolutions >= 0.2 and tries:
        found.append((convolutions, f"convolutions take {convolutions:.0%} of a step", tries))
    bounds = device if on_gpu and profile.share(idle) < 0.2 else host
    if (share := profile.share(bounds.get("optimizer", 0.0))) >= 0.15:
        chosen = settings["runtime.optimizer_kernels"]
        faster = {"for_loop": ("fused", "foreach"), "fused": ()}.get(chosen, ("fused",))
        kernels = [
            f"runtime.optimizer_kernels={name}"
            for name in faster
            if name in profile.optimizer_kernels
        ]
        found.append((share, f"the optimizer takes {share:.0%} of a step", kernels[:1] or [larger]))
    if (
        profile.memory_limit_bytes
        and (share := profile.peak_memory_bytes / profile.memory_limit_bytes) >= 0.85
    ):
        size = settings["runtime.micro_batch_size"] or profile.batch_size
        tries = (
            []
            if settings["runtime.activation_checkpointing"]
            else ["runtime.activation_checkpointing=true"]
        )
        tries += [f"runtime.micro_batch_size={size // 2}"] if size > 1 else []
        limit = f"{profile.memory_limit_bytes / 2**30:.0f} GiB"
        found.append((share, f"the peak memory is {share:.0%} of the GPU's {limit}", tries))
    found.sort(key=lambda entry: entry[0], reverse=True)
    return [
        f"{finding}: try {' or '.join(tries)}" if tries else finding for _, finding, tries in found
    ]
