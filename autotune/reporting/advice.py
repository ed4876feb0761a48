"""Advice on a profile: each line says what was measured and which setting to try; there is no advice if nothing stands out.

Settings that are already made are not suggested. A suggestion is worth a try, not known to help: ``autotune.compare`` measures that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune.step_profile import IDLE, OperatorTime, StepProfile, Synchronisation

DATA_SHARE = 0.1
"""Advice is given if waiting for the next batch takes at least this share of a step."""
IDLE_SHARE = 0.2
"""Advice is given if the GPU is idle for at least this share of a step; a GPU that is idle for less counts as busy."""
PYTHON_SHARE = 0.4
"""Advice is given if the CPU runs no operator for at least this share of a step."""
PRODUCTS_SHARE = 0.3
"""Advice is given if float32 matrix products and convolutions take at least this share of a step."""
CONVOLUTIONS_SHARE = 0.2
"""Advice is given if convolutions that could be computed in another way take at least this share of a step."""
OPTIMIZER_SHARE = 0.15
"""Advice is given if the optimizer takes at least this share of a step."""
MEMORY_FRACTION = 0.85
"""Advice is given if the peak memory is at least this fraction of the GPU's memory, and so near its limit."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One piece of advice: a finding, and settings to try."""

    share: float
    """The measured fraction of the step, or of the memory, that the advice is based on."""
    finding: str
    overrides: tuple[str, ...]
    """Settings to try, as command-line overrides; empty if the code itself must change."""

    @property
    def line(self) -> str:
        """The finding and its settings in one sentence."""
        *others, last = self.overrides or ("",)
        if not last:
            return self.finding
        return f"{self.finding}: try {', '.join(others)}{' or ' if others else ''}{last}"


def advise(profile: StepProfile) -> tuple[Advice, ...]:
    """All advice on a profile, sorted by share, largest first."""
    matches = [advice for rule in _RULES for advice in rule(profile)]
    return tuple(sorted(matches, key=lambda advice: advice.share, reverse=True))


def _data(profile: StepProfile) -> Iterator[Advice]:
    share = profile.times.share(profile.times.data_wait_seconds)
    if profile.is_resident or share < DATA_SHARE:
        return
    workers = profile.settings["data_path.num_workers"]
    resident = ("data_path.on_device=true",) if profile.is_small else ()
    yield Advice(
        share=share,
        finding=f"waiting for the next batch takes {share:.0%} of a step",
        overrides=(*resident, f"data_path.num_workers={2 * workers or 2}"),
    )


def _launches(profile: StepProfile) -> Iterator[Advice]:
    """Advice if the GPU waits for the host to launch kernels; waiting for data is not counted."""
    times = profile.times
    data_wait = 0.0 if profile.is_resident else times.data_wait_seconds
    share = times.share(times.device_seconds.get(IDLE, 0.0) - data_wait)
    if not times.num_kernels or share < IDLE_SHARE:
        return
    compiles, graphs = profile.settings["runtime.compile"], profile.settings["runtime.cuda_graph"]
    can_graph = not graphs and compiles in (None, "default") and profile.settings["precision.autocast_dtype"] != "float16"
    busy = sum(times.device_seconds.values()) - times.device_seconds.get(IDLE, 0.0)
    yield Advice(
        share=share,
        finding=(
            f"the GPU is idle for {share:.0%} of a step: its {times.num_kernels:.0f} kernels of {1e6 * busy / times.num_kernels:.0f} µs on "
            "average end before the host has launched the next ones"
        ),
        overrides=(
            *(("runtime.cuda_graph=true",) if can_graph else ()),
            *(("runtime.compile=default",) if compiles is None else ()),
            _larger_batch(profile),
        ),
    )


def _python(profile: StepProfile) -> Iterator[Advice]:
    """Advice if a CPU spends much of the step in Python, since it computes too little at once."""
    times = profile.times
    share = times.share(times.python_seconds)
    if profile.device != "cpu" or share < PYTHON_SHARE:
        return
    compiled = ("runtime.compile=default",) if profile.settings["runtime.compile"] is None else ()
    yield Advice(
        share=share,
        finding=f"{share:.0%} of a step is Python around its {times.num_operators:.0f} operators",
        overrides=(_larger_batch(profile), *compiled),
    )


def _products(profile: StepProfile) -> Iterator[Advice]:
    """Advice on float32 matrix products and convolutions that tensor cores would compute in fewer bits."""
    capability = profile.compute_capability
    if capability is None or capability < (7, 0):
        return
    products = [operator for operator in profile.times.operators if operator.is_convolution or operator.is_matrix_product]
    share = profile.times.share(sum(operator.float32_seconds for operator in products))
    if share < PRODUCTS_SHARE:
        return
    is_tf32 = profile.settings["precision.float32_precision"] == "tf32"
    if capability < (8, 0):
        overrides: tuple[str, ...] = ("precision=fp16",)
    else:
        overrides = ("precision=bf16",) if is_tf32 else ("precision=tf32", "precision=bf16")
    kind = "TensorFloat-32" if is_tf32 and capability >= (8, 0) else "float32"
    yield Advice(
        share=share,
        finding=f"matrix products and convolutions in {kind} take {share:.0%} of a step, and this GPU has tensor cores",
        overrides=overrides,
    )


def _optimizer(profile: StepProfile) -> Iterator[Advice]:
    share = _part_share(profile, "optimizer")
    if share < OPTIMIZER_SHARE:
        return
    chosen = profile.settings["runtime.optimizer_kernels"]
    faster = {None: ("fused",), "foreach": ("fused",), "for_loop": ("fused", "foreach"), "fused": ()}[chosen]
    kernels = [kernel for kernel in faster if kernel in profile.optimizer_kernels]
    yield Advice(
        share=share,
        finding=f"the optimizer takes {share:.0%} of a step",
        overrides=(f"runtime.optimizer_kernels={kernels[0]}",) if kernels else (_larger_batch(profile),),
    )


def _memory_format(profile: StepProfile) -> Iterator[Advice]:
    share = profile.times.share(sum(operator.contiguous_seconds for operator in _convolutions(profile)))
    if share >= CONVOLUTIONS_SHARE and not profile.settings["runtime.channels_last"]:
        finding = f"convolutions in the contiguous memory format take {share:.0%} of a step"
        yield Advice(share=share, finding=finding, overrides=("runtime.channels_last=true",))


def _cudnn(profile: StepProfile) -> Iterator[Advice]:
    share = profile.times.share(sum(operator.self_seconds for operator in _convolutions(profile)))
    if profile.device == "cuda" and share >= CONVOLUTIONS_SHARE and not profile.settings["runtime.cudnn_benchmark"]:
        finding = f"convolutions take {share:.0%} of a step, by algorithms that cuDNN has chosen without timing them"
        yield Advice(share=share, finding=finding, overrides=("runtime.cudnn_benchmark=true",))


def _synchronisations(profile: StepProfile) -> Iterator[Advice]:
    """Advice on each operator that makes the host wait for the GPU within a step: none should."""
    for wait in profile.times.synchronisations:
        share = profile.times.share(wait.seconds)
        effect = (
            f"makes the host wait for the GPU for {share:.0%} of a step"
            if profile.device == "cuda"
            else "would make the host wait for a GPU"
        )
        caller = f", called by {wait.source}" if wait.source else ""
        finding = f"{wait.operator} in {wait.part} {effect}{caller}"
        overrides = _without_scaler_waits(profile, wait)
        if not overrides:
            finding += "; what it reads can stay on the device"
        yield Advice(share=share, finding=finding, overrides=overrides)


def _without_scaler_waits(profile: StepProfile, wait: Synchronisation) -> tuple[str, ...]:
    """The setting that lets the device itself check scaled gradients for overflow; empty if it does not apply."""
    is_scaler = profile.settings["precision.autocast_dtype"] == "float16" and wait.part == "optimizer"
    can_fuse = "fused" in profile.optimizer_kernels and profile.settings["runtime.optimizer_kernels"] != "fused"
    return ("runtime.optimizer_kernels=fused",) if is_scaler and can_fuse else ()


def _memory(profile: StepProfile) -> Iterator[Advice]:
    if profile.memory_limit_bytes is None or profile.peak_memory_bytes < MEMORY_FRACTION * profile.memory_limit_bytes:
        return
    share = profile.peak_memory_bytes / profile.memory_limit_bytes
    micro_batch_size = profile.settings["runtime.micro_batch_size"] or profile.batch_size
    yield Advice(
        share=share,
        finding=f"the peak memory is {share:.0%} of the GPU's {profile.memory_limit_bytes / 2**30:.0f} GiB",
        overrides=(
            *(() if profile.settings["runtime.activation_checkpointing"] else ("runtime.activation_checkpointing=true",)),
            *((f"runtime.micro_batch_size={micro_batch_size // 2}",) if micro_batch_size > 1 else ()),
        ),
    )


def _convolutions(profile: StepProfile) -> Sequence[OperatorTime]:
    return [operator for operator in profile.times.operators if operator.is_convolution]


def _part_share(profile: StepProfile, part: str) -> float:
    """A part's fraction of the step on whatever bounds the step: the GPU if it is busy, else the host."""
    times = profile.times
    bounds = times.device_seconds if times.device_seconds and times.idle_share < IDLE_SHARE else times.host_seconds
    return times.share(bounds.get(part, 0.0))


def _larger_batch(profile: StepProfile) -> str:
    return f"batch_size={2 * profile.batch_size}"


_RULES: tuple[Callable[[StepProfile], Iterator[Advice]], ...] = (
    _data,
    _launches,
    _python,
    _products,
    _optimizer,
    _memory_format,
    _cudnn,
    _synchronisations,
    _memory,
)
