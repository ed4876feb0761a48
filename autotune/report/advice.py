"""Advice on a profile: each line says what was measured and which setting to try; where nothing stands out there is none.

A setting that is made already is not named again. What is advised is worth a try, not known to help: ``autotune.compare`` tells.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune.step_profile import IDLE, OperatorTime, StepProfile, Synchronisation

DATA_SHARE = 0.1
"""Of a step: so much waiting for the next batch stands out."""
IDLE_SHARE = 0.2
"""Likewise a GPU that has nothing to do."""
PYTHON_SHARE = 0.4
"""Likewise a CPU that is in no operator."""
PRODUCTS_SHARE = 0.3
"""Likewise matrix products and convolutions in float32."""
CONVOLUTIONS_SHARE = 0.2
"""Likewise convolutions that could be computed in another way."""
OPTIMIZER_SHARE = 0.15
"""Likewise the optimizer."""
MEMORY_FRACTION = 0.85
"""Of a GPU's memory: a peak above it is near the end."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One line of advice."""

    share: float
    """The measured fraction that it is based on: of the step, or of the memory."""
    finding: str
    overrides: tuple[str, ...]
    """Settings to try, as they are typed; none where the code itself is to change."""

    @property
    def line(self) -> str:
        """Finding and settings in one sentence."""
        *others, last = self.overrides or ("",)
        if not last:
            return self.finding
        return f"{self.finding}: try {', '.join(others)}{' or ' if others else ''}{last}"


def advise(profile: StepProfile) -> tuple[Advice, ...]:
    """What a profile suggests, the largest share first."""
    found = [advice for rule in _RULES for advice in rule(profile)]
    return tuple(sorted(found, key=lambda advice: advice.share, reverse=True))


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
    """A GPU that waits for the host to launch, data apart."""
    times = profile.times
    waited = 0.0 if profile.is_resident else times.data_wait_seconds
    share = times.share(times.device_seconds.get(IDLE, 0.0) - waited)
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
    """A CPU that computes too little at once."""
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
    """Matrix products and convolutions in float32, where tensor cores would compute them in fewer bits."""
    capability = profile.compute_capability
    if capability is None or capability < (7, 0):
        return
    products = [each for each in profile.times.operators if each.is_convolution or each.is_matrix_product]
    share = profile.times.share(sum(each.float32_seconds for each in products))
    if share < PRODUCTS_SHARE:
        return
    is_rounded = profile.settings["precision.float32_precision"] == "tf32"
    if capability < (8, 0):
        overrides: tuple[str, ...] = ("precision=fp16",)
    else:
        overrides = ("precision=bf16",) if is_rounded else ("precision=tf32", "precision=bf16")
    kind = "TensorFloat-32" if is_rounded and capability >= (8, 0) else "float32"
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
    better = {None: ("fused",), "foreach": ("fused",), "for_loop": ("fused", "foreach"), "fused": ()}[chosen]
    kernels = [each for each in better if each in profile.optimizer_kernels]
    yield Advice(
        share=share,
        finding=f"the optimizer takes {share:.0%} of a step",
        overrides=(f"runtime.optimizer_kernels={kernels[0]}",) if kernels else (_larger_batch(profile),),
    )


def _memory_format(profile: StepProfile) -> Iterator[Advice]:
    share = profile.times.share(sum(each.contiguous_seconds for each in _convolutions(profile)))
    if share >= CONVOLUTIONS_SHARE and not profile.settings["runtime.channels_last"]:
        finding = f"convolutions in the contiguous memory format take {share:.0%} of a step"
        yield Advice(share=share, finding=finding, overrides=("runtime.channels_last=true",))


def _cudnn(profile: StepProfile) -> Iterator[Advice]:
    share = profile.times.share(sum(each.self_seconds for each in _convolutions(profile)))
    if profile.device == "cuda" and share >= CONVOLUTIONS_SHARE and not profile.settings["runtime.cudnn_benchmark"]:
        finding = f"convolutions take {share:.0%} of a step, by algorithms that cuDNN has chosen without timing them"
        yield Advice(share=share, finding=finding, overrides=("runtime.cudnn_benchmark=true",))


def _synchronisations(profile: StepProfile) -> Iterator[Advice]:
    """Whatever makes the host wait within the step: none should."""
    for each in profile.times.synchronisations:
        share = profile.times.share(each.seconds)
        does = (
            f"makes the host wait for the GPU for {share:.0%} of a step"
            if profile.device == "cuda"
            else "would make the host wait for a GPU"
        )
        by = f", called by {each.source}" if each.source else ""
        finding = f"{each.operator} in {each.part} {does}{by}"
        overrides = _without_scaler_waits(profile, each)
        if not overrides:
            finding += "; what it reads can stay on the device"
        yield Advice(share=share, finding=finding, overrides=overrides)


def _without_scaler_waits(profile: StepProfile, each: Synchronisation) -> tuple[str, ...]:
    """The setting that leaves it to the device whether scaled gradients overflowed."""
    scales = profile.settings["precision.autocast_dtype"] == "float16" and each.part == "optimizer"
    can = "fused" in profile.optimizer_kernels and profile.settings["runtime.optimizer_kernels"] != "fused"
    return ("runtime.optimizer_kernels=fused",) if scales and can else ()


def _memory(profile: StepProfile) -> Iterator[Advice]:
    if profile.memory_limit_bytes is None or profile.peak_memory_bytes < MEMORY_FRACTION * profile.memory_limit_bytes:
        return
    share = profile.peak_memory_bytes / profile.memory_limit_bytes
    at_once = profile.settings["runtime.micro_batch_size"] or profile.batch_size
    yield Advice(
        share=share,
        finding=f"the peak memory is {share:.0%} of the GPU's {profile.memory_limit_bytes / 2**30:.0f} GiB",
        overrides=(
            *(() if profile.settings["runtime.activation_checkpointing"] else ("runtime.activation_checkpointing=true",)),
            *((f"runtime.micro_batch_size={at_once // 2}",) if at_once > 1 else ()),
        ),
    )


def _convolutions(profile: StepProfile) -> Sequence[OperatorTime]:
    return [each for each in profile.times.operators if each.is_convolution]


def _part_share(profile: StepProfile, part: str) -> float:
    """The fraction of a step that a part takes of what bounds it: a GPU that is busy, else the host."""
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
