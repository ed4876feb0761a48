"""Terminal output of a profile; it is readable in a log file, too."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.report.advice import Advice
from autotune.step_profile import BETWEEN, IDLE, PARTS, WAITING, OperatorTime, StepProfile

NUM_OPERATORS = 10
_MAX_NAME = 44
_NUMBERS_WIDTH = 28
"""Width in characters of the number columns beside a name."""
_UNEVEN = 1.5
"""Ratio of mean to median step time above which a few slow steps dominate the mean."""
_WIDE = 100
"""Minimum width in characters of a terminal that has room for a column of shapes."""
_ROWS: Mapping[str, str] = {
    **{part: part for part in PARTS},
    "graph": "forward, backward",
    BETWEEN: "Python between",
    WAITING: "waiting for the GPU",
    IDLE: "idle",
}
"""The table's label of each part of a step."""


def print_profile(console: Console, profile: StepProfile, advice: Sequence[Advice], *, title: str, files: Mapping[str, str]) -> None:
    """Print where a step's time goes, what to try, and where the files are.

    Args:
        title: headline that names the profiled configuration.
        files: path of each file, by a word that says what it is.
    """
    _say(console, Text(title, style="bold"))
    for name, value in _facts(profile):
        _say(console, Text.assemble((f"  {name:<10}", "dim"), value))
    console.print()
    console.print(_parts_table(profile))
    console.print()
    console.print(_operators_table(profile, profile.times.operators, "operator", console.width, has_shapes=console.width >= _WIDE))
    if profile.times.kernels:
        console.print()
        console.print(_operators_table(profile, profile.times.kernels, "kernel", console.width, has_shapes=False))
    console.print()
    for entry in advice:
        _say(console, Text.assemble(("advice  ", "bold green"), entry.line))
    if not advice:
        _say(console, Text("advice  none: nothing stands out"))
    console.print()
    for name, path in files.items():
        _say(console, Text.assemble((f"{name:<8}", "dim"), path))


def _facts(profile: StepProfile) -> list[tuple[str, str]]:
    plain, profiled = profile.plain_step_seconds, profile.times.step_seconds
    threads = f", {profile.num_threads} thread{'s' if profile.num_threads > 1 else ''}" if profile.device == "cpu" else ""
    facts = [
        ("device", f"{profile.device_name}{threads}"),
        ("step", f"{_milliseconds(plain)} ms, {profile.batch_size / plain:,.0f} samples/s (mean of {profile.num_steps} steps)"),
        ("profiled", f"{_milliseconds(profiled)} ms under the profiler, which takes time too; what follows is of such a step"),
        ("memory", f"{profile.peak_memory_bytes / 2**20:,.0f} MiB at its peak"),
    ]
    median = profile.times.median_step_seconds
    if profile.device == "cpu" and profiled > _UNEVEN * median:
        text = f"half of these steps took at most {_milliseconds(median)} ms: the machine was busy, or some steps do more than others"
        facts.append(("uneven", text))
    return facts


def _parts_table(profile: StepProfile) -> Table:
    times = profile.times
    columns = {"host": times.host_seconds, **({"GPU": times.device_seconds} if times.device_seconds else {})}
    table = _table()
    table.add_column("part of a step", no_wrap=True)
    for name in columns:
        table.add_column(f"{name} ms", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
    for part, label in _ROWS.items():
        if any(part in seconds for seconds in columns.values()):
            table.add_row(label, *(cell for seconds in columns.values() for cell in _cells(times.share, seconds.get(part))))
    table.add_row("step", *(cell for seconds in columns.values() for cell in _cells(times.share, sum(seconds.values()))), style="bold")
    return table


def _cells(share: Callable[[float], float], seconds: float | None) -> tuple[str, str]:
    return ("-", "-") if seconds is None else (_milliseconds(seconds), f"{share(seconds):.1%}")


def _operators_table(profile: StepProfile, operators: Sequence[OperatorTime], kind: str, width: int, *, has_shapes: bool) -> Table:
    """A table of the operators or kernels that take longest, with one row for all others."""
    table = _table()
    table.add_column(Text(kind), no_wrap=True, overflow="ellipsis", max_width=min(_MAX_NAME, width - _NUMBERS_WIDTH))
    for name in ("calls", "ms", "share"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    if has_shapes:
        table.add_column("shapes, where it takes longest", no_wrap=True, overflow="ellipsis")
    for operator in operators[:NUM_OPERATORS]:
        cells = (f"{operator.calls:g}", *_cells(profile.times.share, operator.self_seconds))
        table.add_row(Text(operator.short_name), *cells, *((Text(operator.shapes),) if has_shapes else ()))
    rest = operators[NUM_OPERATORS:]
    if rest:
        seconds, calls = sum(operator.self_seconds for operator in rest), sum(operator.calls for operator in rest)
        table.add_row(f"{len(rest)} others", f"{calls:g}", *_cells(profile.times.share, seconds), style="dim")
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="bold")


def _milliseconds(seconds: float) -> str:
    """Seconds as milliseconds: with three decimals below 1 ms, two below 100 ms, else none."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.3f}" if milliseconds < 1 else f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def _say(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True)
