"""The figure of a profile: the parts of a step as stacked bars, and the operators that take longest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from autotune.report.drawing import INK, add_title, shorten, write_png
from autotune.step_profile import BETWEEN, IDLE, WAITING, StepProfile

_NUM_OPERATORS = 8
_MIN_LABELLED_SHARE = 0.06
"""Smallest share of a step whose stretch of the bar has room for a label."""
_WIDEST_NAME = 34
_MAX_KEY_COLUMNS = 6


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
    operators = times.operators[:_NUM_OPERATORS]
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
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
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
    shown = profile.times.operators[:_NUM_OPERATORS]
    shares = [profile.times.share(operator.self_seconds) for operator in shown]
    bars = axes.barh(range(len(shown)), shares, height=0.7, color="#888888")
    labels = [f"{share:.1%}  {operator.calls:g} calls" for share, operator in zip(shares, shown, strict=True)]
    axes.bar_label(bars, labels=labels, padding=4, fontsize=9)
    axes.set_yticks(range(len(shown)), [_short(operator.short_name) for operator in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * max([*shares, 1e-3]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"Share of a step: the longest of {len(profile.times.operators)} operators")


def _short(name: str) -> str:
    name = name.removeprefix("aten::")
    return name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"
