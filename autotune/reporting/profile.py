"""The result of a profile, as terminal output that is readable in a log file too, and as a figure."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from plotly.subplots import make_subplots
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.reporting.advice import Advice
from autotune.reporting.drawing import Chart, shorten
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
_NUM_BARS = 8
_MIN_LABELLED_SHARE = 0.06
"""Smallest share of a step whose stretch of the bar has room for a label."""
_WIDEST_NAME = 34


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


# Source of the colours: Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color), which stay apart for every eye.
_COLOURS: Mapping[str, str] = {
    "data": "#56B4E9",
    "augmentation": "#CC79A7",
    "forward": "#0072B2",
    "backward": "#D55E00",
    "graph": "#0072B2",
    "optimizer": "#009E73",
    BETWEEN: "#BBBBBB",
    WAITING: "#E0E0E0",
    IDLE: "#F2F2F2",
}


def profile_chart(profile: StepProfile, title: str) -> Chart:
    """The parts of a step on the host and on the GPU if there is one, and below them the operators that take longest."""
    times = profile.times
    bars = {"host": times.host_seconds, "GPU": times.device_seconds} if times.device_seconds else {"step": times.host_seconds}
    operators = times.operators[:_NUM_BARS]
    heights = [len(bars) + 1, len(operators) + 1]
    figure = make_subplots(rows=2, cols=1, row_heights=heights, vertical_spacing=0.2)
    for part, colour in _COLOURS.items():
        shares = [times.share(parts.get(part, 0.0)) for parts in bars.values()]
        if any(shares):
            figure.add_bar(
                x=shares, y=list(bars), orientation="h", name=_ROWS[part],
                marker={"color": colour, "line": {"color": "#888888", "width": 0.5}},
                text=[f"{share:.0%}" if share >= _MIN_LABELLED_SHARE else "" for share in shares], textposition="inside", row=1, col=1,
            )  # fmt: skip
    longest = [times.share(operator.self_seconds) for operator in operators]
    figure.add_bar(
        x=longest, y=[escape(shorten(operator.short_name.removeprefix("aten::"), _WIDEST_NAME)) for operator in operators],
        orientation="h", marker={"color": "#888888"}, showlegend=False,
        text=[f"{share:.1%}, {operator.calls:g} calls" for share, operator in zip(longest, operators, strict=True)],
        textposition="outside", cliponaxis=False, row=2, col=1,
    )  # fmt: skip
    figure.update_layout(barmode="stack", legend={"orientation": "h", "y": -0.2, "yanchor": "top"})
    figure.update_xaxes(tickformat=".0%", rangemode="tozero")
    figure.update_xaxes(title="Share of a step", range=[0, 1], row=1, col=1)
    figure.update_xaxes(title=f"Share of a step: the longest of {len(times.operators)} operators", row=2, col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    plain, profiled = 1e3 * profile.plain_step_seconds, 1e3 * times.step_seconds
    description = (
        f"Where a step's time goes: {title}. {plain:.3g} ms a step on {shorten(profile.device_name)}; shares are of a step under the "
        f"profiler, {profiled:.3g} ms."
    )
    return Chart(name="profile", description=description, figure=figure, height=260 + 34 * sum(heights))
