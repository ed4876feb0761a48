"""The result of a profile, as terminal output that is readable in a log file too, and as a
chart.
"""

from collections.abc import Mapping, Sequence
from html import escape

from plotly.subplots import make_subplots
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.reporting.drawing import Chart, shorten
from autotune.step_profile import BETWEEN, IDLE, PARTS, WAITING, StepProfile

_LABELS = {"graph": "forward, backward", BETWEEN: "Python between", WAITING: "waiting for the GPU"}
# Source of the colours: Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color), which
# stay apart for every eye.
_COLOURS = dict(
    zip(
        (*PARTS, BETWEEN, WAITING, IDLE),
        (
            "#56B4E9",
            "#CC79A7",
            "#0072B2",
            "#D55E00",
            "#0072B2",
            "#009E73",
            "#BBBBBB",
            "#E0E0E0",
            "#F2F2F2",
        ),
        strict=True,
    )
)
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
    plain, profiled = profile.plain_step_seconds, profile.step_seconds
    threads = (
        ""
        if profile.device_seconds
        else f", {profile.num_threads} thread{'s' if profile.num_threads > 1 else ''}"
    )
    lines = [
        f"  device    {profile.device_name}{threads}",
        (
            f"  step      {1e3 * plain:.4g} ms, {profile.batch_size / plain:,.0f} samples/s (mean"
            f" of {profile.num_steps} steps)"
        ),
        (
            f"  profiled  {1e3 * profiled:.4g} ms under the profiler, which takes time too; what"
            " follows is of such a step"
        ),
        f"  memory    {profile.peak_memory_bytes / 2**20:,.0f} MiB at its peak",
    ]
    for line in (title, *lines):
        console.print(Text(line), soft_wrap=True)
    columns = {
        "host": profile.host_seconds,
        **({"GPU": profile.device_seconds} if profile.device_seconds else {}),
    }
    parts = _table(
        "part of a step", *(head for name in columns for head in (f"{name} ms", "share"))
    )
    for part in _COLOURS:
        if any(part in seconds for seconds in columns.values()):
            parts.add_row(
                _LABELS.get(part, part),
                *(
                    cell
                    for seconds in columns.values()
                    for cell in _cells(profile, seconds.get(part, 0.0))
                ),
            )
    operators = _table("operator", "calls", "ms", "share")
    for operator in profile.operators[:_NUM_OPERATORS]:
        operators.add_row(
            Text(shorten(operator.name, 44)),
            f"{operator.calls:g}",
            *_cells(profile, operator.seconds),
        )
    rest = profile.operators[_NUM_OPERATORS:]
    calls, seconds = (
        sum(operator.calls for operator in rest),
        sum(operator.seconds for operator in rest),
    )
    operators.add_row(f"{len(rest)} others", f"{calls:g}", *_cells(profile, seconds), style="dim")
    for table in (parts, operators):
        console.print()
        console.print(table)
    console.print()
    for line in advice or ("none: nothing stands out",):
        console.print(Text.assemble(("advice  ", "bold green"), line), soft_wrap=True)
    for name, path in files.items():
        console.print(Text.assemble((f"{name:<8}", "dim"), path), soft_wrap=True)


def _table(name: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(name, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _cells(profile: StepProfile, seconds: float) -> tuple[str, str]:
    return f"{1e3 * seconds:.3f}", f"{profile.share(seconds):.1%}"


def profile_chart(profile: StepProfile, title: str) -> Chart:
    """The parts of a step on the host, and on the GPU if there is one, above the operators that
    take longest.
    """
    bars = {
        "host": profile.host_seconds,
        **({"GPU": profile.device_seconds} if profile.device_seconds else {}),
    }
    operators = profile.operators[:_NUM_OPERATORS]
    heights = [len(bars) + 1, len(operators) + 1]
    figure = make_subplots(rows=2, cols=1, row_heights=heights, vertical_spacing=0.2)
    for part, colour in _COLOURS.items():
        if any(part in seconds for seconds in bars.values()):
            shares = [profile.share(seconds.get(part, 0.0)) for seconds in bars.values()]
            text = [f"{share:.0%}" for share in shares]
            figure.add_bar(
                x=shares,
                y=list(bars),
                orientation="h",
                name=_LABELS.get(part, part),
                marker={"color": colour},
                text=text,
                textposition="inside",
                row=1,
                col=1,
            )
    names = [escape(shorten(operator.name.removeprefix("aten::"), 34)) for operator in operators]
    longest = [profile.share(operator.seconds) for operator in operators]
    figure.add_bar(
        x=longest,
        y=names,
        orientation="h",
        marker={"color": "#888888"},
        showlegend=False,
        row=2,
        col=1,
    )
    figure.update_layout(barmode="stack", legend={"orientation": "h", "y": -0.2, "yanchor": "top"})
    figure.update_xaxes(tickformat=".0%", rangemode="tozero", title="Share of a step")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    description = f"Where a step's time goes: {title}, on {shorten(profile.device_name)}."
    return Chart(
        name="profile", description=description, figure=figure, height=260 + 34 * sum(heights)
    )
