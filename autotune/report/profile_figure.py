"""The figure of a profile: the parts of a step as one bar, and the operators that take longest."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from autotune.report.drawing import INK, add_title, shorten, write_png
from autotune.step_profile import BETWEEN, IDLE, WAITING, StepProfile

_NUM_OPERATORS = 8
_MIN_LABELLED_SHARE = 0.06
"""A narrower stretch of the bar has no room for its share."""
_WIDEST_NAME = 40


@dataclass(frozen=True)
class _Look:
    label: str
    colour: str
    ink: str = "white"
    hatch: str | None = None


# Source of the colours: Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color), which stay apart for every eye.
_LOOKS: Mapping[str, _Look] = {
    "data": _Look("data", "#56B4E9", INK),
    "augmentation": _Look("augmentation", "#CC79A7", INK),
    "forward": _Look("forward", "#0072B2"),
    "backward": _Look("backward", "#D55E00"),
    "graph": _Look("forward and backward (graph)", "#0072B2"),
    "optimizer": _Look("optimizer", "#009E73"),
    BETWEEN: _Look("Python between", "#BBBBBB", INK),
    WAITING: _Look("waiting for the GPU", "white", INK, "////"),
    IDLE: _Look("idle", "white", INK, "...."),
}


def write_profile_figure(folder: Path, profile: StepProfile, title: str) -> Path:
    """Write ``profile.png`` into a folder, made where missing, and return its path."""
    (path,) = write_png({"profile": lambda: draw_profile(profile, title)}, folder)
    return path


def draw_profile(profile: StepProfile, title: str) -> Figure:
    """The parts of a step, on the host and on a GPU where there is one, above the operators that take longest."""
    times = profile.times
    bars = {"host": times.host_seconds, "GPU": times.device_seconds} if times.device_seconds else {"step": times.host_seconds}
    operators = times.operators[:_NUM_OPERATORS]
    heights = [0.5 * len(bars) + 0.85, 0.27 * len(operators) + 0.6]
    figure = Figure(figsize=(9, sum(heights) + 0.9), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _draw_parts(above, bars, profile)
    _draw_operators(below, profile)
    detail = (
        f"{1e3 * profile.plain_step_seconds:.3g} ms a step on {shorten(profile.device_name)}; shares are of a step under the profiler, "
        f"{1e3 * times.step_seconds:.3g} ms"
    )
    return add_title(figure, f"Where a step's time goes: {title}", detail)


def _draw_parts(axes: Axes, bars: Mapping[str, Mapping[str, float]], profile: StepProfile) -> None:
    share = profile.times.share
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for part, look in _LOOKS.items():
            width = share(parts.get(part, 0.0))
            axes.barh(
                row, width, left=left, height=0.7, color=look.colour, edgecolor="#888888" if look.hatch else "white", hatch=look.hatch
            )
            if width >= _MIN_LABELLED_SHARE:
                said = axes.text(left + width / 2, row, f"{width:.0%}", ha="center", va="center", color=look.ink, fontsize=10)
                said.set_bbox({"facecolor": "white", "linewidth": 0, "pad": 1.5} if look.hatch else {"alpha": 0, "pad": 0})
            left += width
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("Share of a step")
    drawn = [look for part, look in _LOOKS.items() if any(parts.get(part, 0.0) > 0 for parts in bars.values())]
    handles = [
        Patch(facecolor=each.colour, hatch=each.hatch, edgecolor="#888888" if each.hatch else "white", label=each.label) for each in drawn
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.02), ncols=6, columnspacing=1.2, handlelength=1.2, borderpad=0.0)


def _draw_operators(axes: Axes, profile: StepProfile) -> None:
    shown = profile.times.operators[:_NUM_OPERATORS]
    shares = [profile.times.share(each.self_seconds) for each in shown]
    bars = axes.barh(range(len(shown)), shares, height=0.7, color="#888888")
    axes.bar_label(
        bars, labels=[f"{share:.1%}  {each.calls:g} calls" for share, each in zip(shares, shown, strict=True)], padding=4, fontsize=9
    )
    axes.set_yticks(range(len(shown)), [_short(each.name) for each in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * max([*shares, 1e-3]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"Share of a step: the longest of {len(profile.times.operators)} operators")


def _short(name: str) -> str:
    name = name.removeprefix("aten::")
    return name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"
