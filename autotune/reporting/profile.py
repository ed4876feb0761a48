"""The result of a profile as terminal output that is readable in a log file too, and what to try
about where the time goes.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.reporting.scores import counted
from autotune.reporting.terminal import print_line
from autotune.training.profiling import BETWEEN, IDLE, PARTS, WAITING, StepProfile

_LABELS = {"graph": "forward, backward", BETWEEN: "Python between", WAITING: "waiting for the GPU"}
_NUM_OPERATORS = 10
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def print_profile(
    console: Console, profile: StepProfile, *, title: str, files: Mapping[str, str]
) -> None:
    """Print where a step's time goes, what to try, and where the files are, by a word that says
    what each is.
    """
    plain, num_threads = profile.plain_step_seconds, profile.num_threads
    lines = {
        "device": f"{profile.device_name}, {counted(num_threads, 'thread')}",
        "step": f"{1e3 * plain:.4g} ms, {profile.batch_size / plain:,.0f} samples/s"
        f" (mean of {profile.num_steps} steps)",
        "profiled": f"{1e3 * profile.step_seconds:.4g} ms under the profiler, which takes time"
        " too; what follows is of such a step",
        "memory": f"{profile.peak_memory_bytes / 2**20:,.0f} MiB at its peak",
    }
    columns = {"host": profile.host_seconds}
    if profile.device_seconds:
        columns["GPU"] = profile.device_seconds
    parts = _table(
        "part of a step", *(head for name in columns for head in (f"{name} ms", "share"))
    )
    for part in (*PARTS, BETWEEN, WAITING, IDLE):
        if any(part in seconds for seconds in columns.values()):
            cells = [_cells(profile, seconds.get(part, 0.0)) for seconds in columns.values()]
            parts.add_row(_LABELS.get(part, part), *(text for pair in cells for text in pair))
    operators = _table("operator", "calls", "ms", "share")
    for operator in profile.operators[:_NUM_OPERATORS]:
        operators.add_row(
            Text(operator.name), f"{operator.calls:g}", *_cells(profile, operator.seconds)
        )
    others = profile.operators[_NUM_OPERATORS:]
    seconds = sum(operator.seconds for operator in others)
    operators.add_row(f"{len(others)} others", "", *_cells(profile, seconds), style="dim")

    print_line(console, title)
    for name, line in lines.items():
        print_line(console, f"  {name:<10}{line}")
    console.print()
    console.print(parts)
    console.print()
    console.print(operators)
    console.print()
    for line in advise(profile) or ("none: nothing stands out",):
        print_line(console, f"advice  {line}")
    for name, path in files.items():
        print_line(console, f"{name:<8}{path}")


def _table(name: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(name, no_wrap=True, max_width=44)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _cells(profile: StepProfile, seconds: float) -> tuple[str, str]:
    return f"{1e3 * seconds:.3f}", f"{profile.share(seconds):.1%}"


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
    compiles = ["runtime.compile=default"] if settings["runtime.compile"] is None else []
    yield _Finding(idle - data, 0.2, text, [*graph, *compiles, larger])

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
