"""The result of a profile, as terminal output that is readable in a log file too, and as a figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.reporting.advice import Advice
from autotune.reporting.drawing import INK, add_title, set_rows, shorten, write_png
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
_MAX_KEY_COLUMNS = 6


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


@dataclass(frozen=True)
class _Look:
    label: str
    colour: str
    ink: str = "white"
    hatch: str | None = None

    @property
    def edge(self) -> str:
        return "#888888" if self.hatch else "white"


# Source of the colours: Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color), which stay apart for every eye.
_LOOKS: Mapping[str, _Look] = {
    "data": _Look("data", "#56B4E9", INK),
    "augmentation": _Look("augmentation", "#CC79A7", INK),
    "forward": _Look("forward", "#0072B2"),
    "backward": _Look("backward", "#D55E00"),
    "graph": _Look("forward, backward", "#0072B2"),
    "optimizer": _Look("optimizer", "#009E73"),
    BETWEEN: _Look("Python between", "#BBBBBB", INK),
    WAITING: _Look("waiting for the GPU", "white", INK, "////"),
    IDLE: _Look("idle", "white", INK, "...."),
}


def write_profile_figure(folder: Path, profile: StepProfile, title: str) -> Path:
    """Write ``profile.png`` into ``folder``, made if missing, and return its path."""
    (path,) = write_png({"profile": lambda: draw_profile(profile, title)}, folder)
    return path


def draw_profile(profile: StepProfile, title: str) -> Figure:
    """Two panels: the parts of a step on the host and on the GPU if there is one, and below them the operators that take longest."""
    times = profile.times
    bars = {"host": times.host_seconds, "GPU": times.device_seconds} if times.device_seconds else {"step": times.host_seconds}
    operators = times.operators[:_NUM_BARS]
    looks = [look for part, look in _LOOKS.items() if any(parts.get(part, 0.0) > 0 for parts in bars.values())]
    heights = [0.25 * _key_rows(looks), 0.5 * len(bars) + 0.6, 0.27 * len(operators) + 0.6]
    figure = Figure(figsize=(9, sum(heights) + 0.9), layout="constrained")
    key_room, above, below = figure.subplots(3, 1, height_ratios=heights)
    key_room.set_axis_off()
    _draw_parts(above, bars, profile)
    _draw_operators(below, profile)
    detail = (
        f"{1e3 * profile.plain_step_seconds:.3g} ms a step on {shorten(profile.device_name)}; shares are of a step under the profiler, "
        f"{1e3 * times.step_seconds:.3g} ms"
    )
    add_title(figure, f"Where a step's time goes: {title}", detail)
    layout = figure.get_layout_engine()
    assert layout is not None
    _add_key(figure, looks, layout.get()["rect"][3])
    return figure


def _draw_parts(axes: Axes, bars: Mapping[str, Mapping[str, float]], profile: StepProfile) -> None:
    share = profile.times.share
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for part, look in _LOOKS.items():
            width = share(parts.get(part, 0.0))
            axes.barh(row, width, left=left, height=0.7, color=look.colour, edgecolor=look.edge, hatch=look.hatch)
            if width >= _MIN_LABELLED_SHARE:
                label = axes.text(left + width / 2, row, f"{width:.0%}", ha="center", va="center", color=look.ink, fontsize=10)
                label.set_bbox({"facecolor": "white", "linewidth": 0, "pad": 1.5} if look.hatch else {"alpha": 0, "pad": 0})
            left += width
    set_rows(axes, list(bars), room=0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("Share of a step")


def _add_key(figure: Figure, looks: Sequence[_Look], top: float) -> None:
    """Add the key of the colours across the figure's whole width, beneath its title."""
    handles = [Patch(facecolor=look.colour, hatch=look.hatch, edgecolor=look.edge, label=look.label) for look in looks]
    columns = ceil(len(handles) / _key_rows(looks))
    key = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.012, top), ncols=columns, columnspacing=1.5, handlelength=1.2)
    key.set_in_layout(False)


def _key_rows(looks: Sequence[_Look]) -> int:
    return ceil(len(looks) / _MAX_KEY_COLUMNS)


def _draw_operators(axes: Axes, profile: StepProfile) -> None:
    shown = profile.times.operators[:_NUM_BARS]
    shares = [profile.times.share(operator.self_seconds) for operator in shown]
    bars = axes.barh(range(len(shown)), shares, height=0.7, color="#888888")
    labels = [f"{share:.1%}  {operator.calls:g} calls" for share, operator in zip(shares, shown, strict=True)]
    axes.bar_label(bars, labels=labels, padding=4, fontsize=9)
    set_rows(axes, [_short_name(operator.short_name) for operator in shown], room=0.6)
    axes.set_xlim(0, 1.3 * max([*shares, 1e-3]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(f"Share of a step: the longest of {len(profile.times.operators)} operators")


def _short_name(name: str) -> str:
    name = name.removeprefix("aten::")
    return name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"
