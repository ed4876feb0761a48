"""How the time of a training step divides into parts and operators, and what to try about it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

PARTS = ("data", "augmentation", "forward", "backward", "graph", "optimizer")
"""Parts of a training step, in their order; ``graph`` is forward and backward in one CUDA graph."""
BETWEEN, WAITING, IDLE = "between", "waiting", "idle"
"""The host outside all parts, the host waiting for the GPU after the last step, and the GPU
without work."""
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """Mean time of an operator in a step: on the CPU its own, on a GPU that of the kernels it
    starts.
    """

    name: str
    calls: float
    seconds: float


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


def advise(profile: StepProfile) -> list[str]:
    """What stands out in a profile, with the settings to try that are not made yet.

    Largest share first.

    A suggestion is worth a try, not known to help: ``autotune compare`` measures that.
    """
    waits = [
        f"the host waits for the GPU at {line}; what it reads can stay on the device"
        for line in profile.waits
    ]
    findings = sorted(_findings(profile), key=lambda finding: finding.share, reverse=True)
    return waits + [
        f"{finding.text.format(finding.share)}: try {' or '.join(finding.tries)}"
        for finding in findings
        if finding.share >= finding.least_share and finding.tries
    ]


class _Finding(NamedTuple):
    share: float
    """What takes this share of a step is worth a look from ``least_share`` on."""
    least_share: float
    text: str
    tries: list[str]
    """Settings to try."""


def _findings(profile: StepProfile) -> Iterator[_Finding]:
    """Everything that is looked at, whether it stands out or not."""
    host, settings, on_gpu = profile.host_seconds, profile.settings, bool(profile.device_seconds)
    idle = profile.share(profile.device_seconds.get(IDLE, 0.0))
    data = 0.0 if profile.is_resident else profile.share(host.get("data", 0.0))
    data = min(data, idle) if on_gpu else data
    larger = f"batch_size={2 * profile.batch_size}"
    compiles = ["runtime.compile=default"] if settings["runtime.compile"] is None else []

    on_device = ["data_path.on_device=true"] if profile.is_small else []
    num_workers = f"data_path.num_workers={2 * settings['data_path.num_workers'] or 2}"
    text = "waiting for the next batch takes {:.0%} of a step"
    yield _Finding(data, 0.1, text, [*on_device, num_workers])

    can_graph = (
        not settings["runtime.cuda_graph"]
        and settings["runtime.compile"] in (None, "default")
        and settings["precision.autocast_dtype"] != "float16"
    )
    text = (
        f"the GPU is idle for {{:.0%}} of a step: its {profile.num_kernels:.0f} kernels end before"
        " the host has started the next ones"
    )
    graph = ["runtime.cuda_graph=true"] if can_graph else []
    yield _Finding(idle - data, 0.2, text, [*graph, *compiles, larger])

    operators = sum(operator.seconds for operator in profile.operators)
    python = profile.share(profile.step_seconds - host.get("data", 0.0) - operators)
    text = "{:.0%} of a step is Python around its operators"
    yield _Finding(0.0 if on_gpu else python, 0.4, text, [larger, *compiles])

    convolutions = profile.share(
        sum(operator.seconds for operator in profile.operators if "conv" in operator.name)
    )
    wanted = ["runtime.channels_last", *(["runtime.cudnn_benchmark"] if on_gpu else [])]
    tries = [f"{key}=true" for key in wanted if not settings[key]]
    yield _Finding(convolutions, 0.2, "convolutions take {:.0%} of a step", tries)

    products = convolutions + profile.share(
        sum(operator.seconds for operator in profile.operators if operator.name in _PRODUCTS)
    )
    text = (
        "matrix products and convolutions in float32 take {:.0%} of a step, and this GPU has tensor"
        " cores"
    )
    yield _Finding(products, 0.3, text, _formats_to_try(profile))

    is_busy = on_gpu and idle < 0.2
    seconds = (profile.device_seconds if is_busy else host).get("optimizer", 0.0)
    kernels = {"for_loop": ("fused", "foreach"), "fused": ()}.get(
        settings["runtime.optimizer_kernels"], ("fused",)
    )
    tries = [
        f"runtime.optimizer_kernels={name}" for name in kernels if name in profile.optimizer_kernels
    ]
    text = "the optimizer takes {:.0%} of a step"
    yield _Finding(profile.share(seconds), 0.15, text, tries[:1] or [larger])

    if profile.memory_limit_bytes is not None:
        share = profile.peak_memory_bytes / profile.memory_limit_bytes
        size = settings["runtime.micro_batch_size"] or profile.batch_size
        tries = [f"runtime.micro_batch_size={size // 2}"] if size > 1 else []
        if not settings["runtime.activation_checkpointing"]:
            tries = ["runtime.activation_checkpointing=true", *tries]
        yield _Finding(share, 0.85, "the peak memory is {:.0%} of the GPU's", tries)


def _formats_to_try(profile: StepProfile) -> list[str]:
    """Number formats that the GPU's tensor cores multiply faster than the training's own."""
    settings, capability = profile.settings, profile.compute_capability or (0, 0)
    if (
        capability < (7, 0)
        or settings["precision.autocast_dtype"] is not None
        or settings["precision.weights_dtype"] != "float32"
        or settings["precision.float8"]
    ):
        return []
    if capability < (8, 0):
        return ["precision=fp16"]
    is_tf32 = settings["precision.float32_precision"] == "tf32"
    return [*([] if is_tf32 else ["precision=tf32"]), "precision=bf16"]
