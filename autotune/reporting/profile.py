"""The result of a profile as terminal output that is readable in a log file too."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.reporting.scores import counted
from autotune.reporting.terminal import print_line
from autotune.step_profile import BETWEEN, IDLE, PARTS, WAITING, StepProfile

_LABELS = {"graph": "forward, backward", BETWEEN: "Python between", WAITING: "waiting for the GPU"}
_NUM_OPERATORS = 10


def print_profile(
    console: Console,
    profile: StepProfile,
    advice: Sequence[str],
    *,
    title: str,
    files: Mapping[str, str],
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
    for line in advice or ("none: nothing stands out",):
        console.print(Text.assemble(("advice  ", "bold green"), line), soft_wrap=True)
    for name, path in files.items():
        console.print(Text.assemble((f"{name:<8}", "dim"), path), soft_wrap=True)


def _table(name: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(name, no_wrap=True, max_width=44)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _cells(profile: StepProfile, seconds: float) -> tuple[str, str]:
    return f"{1e3 * seconds:.3f}", f"{profile.share(seconds):.1%}"
