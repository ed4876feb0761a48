"""The figure of a scaling: time to target, seconds a step, efficiency and what a step goes to, over the number of workers."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from autotune.report.drawing import INK, add_title, target_label, write_png
from autotune.report.scaling import Mode, Scaling, ScalingPoint

_COLOURS = {Mode.STRONG: "#0072B2", Mode.WEAK: "#D55E00"}
_MARKERS = {Mode.STRONG: "o", Mode.WEAK: "s"}
_EXCHANGE = "#CCCCCC"


def write_scaling_figure(folder: Path, scaling: Scaling) -> list[Path]:
    """Draw it into ``folder`` and return its path."""
    return write_png({"scaling": lambda: draw_scaling(scaling)}, folder)


def draw_scaling(scaling: Scaling) -> Figure:
    """Four panels over the number of workers."""
    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    panels = [figure.add_subplot(2, 2, place) for place in (1, 2, 3, 4)]
    _draw_lines(panels[0], scaling, lambda point: point.seconds, "seconds to target", ideal=True)
    _draw_runs(panels[0], scaling)
    _draw_lines(panels[1], scaling, lambda point: point.step_seconds, "seconds a step", ideal=True)
    _draw_lines(panels[2], scaling, scaling.efficiency, "efficiency (fewest workers = 1)", label="{}, to target")
    _draw_lines(panels[2], scaling, lambda point: _ratio(scaling, point), None, label="{}, samples a second", dashed=True)
    panels[2].axhline(1, color=INK, linewidth=0.9, linestyle=":", zorder=1)
    panels[2].set_ylim(bottom=0)
    _draw_shares(panels[3], scaling)
    for axes in panels[:3]:
        _count_workers(axes, scaling)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
    headline = f"{scaling.experiment}: {scaling.strategy} on {', '.join(map(str, _workers(scaling)))} workers"
    detail = f"To {target_label(scaling.target)}; {scaling.num_seeds} seeds, in turns; dotted: what no exchange at all would give"
    return add_title(figure, headline, detail)


def _draw_lines(
    axes: Axes,
    scaling: Scaling,
    value: Callable[[ScalingPoint], float | None],
    name: str | None,
    *,
    ideal: bool = False,
    label: str = "{}",
    dashed: bool = False,
) -> None:
    """A line for each kind of scaling."""
    for mode, colour in _COLOURS.items():
        measured = [(each, found) for each in scaling.of(mode) if (found := value(each)) is not None]
        if not measured:
            continue
        numbers = [each.num_workers for each, _ in measured]
        axes.plot(
            numbers,
            [found for _, found in measured],
            color=colour,
            marker=_MARKERS[mode],
            markersize=6,
            linewidth=1.6,
            linestyle="--" if dashed else "-",
            label=label.format(mode),
            zorder=3,
        )
        if ideal and measured[0][0] is scaling.of(mode)[0]:
            first, found = measured[0]
            samples = [each.batch_size / first.batch_size * first.num_workers / each.num_workers for each in scaling.of(mode)]
            if name == "seconds to target" and mode is Mode.WEAK:
                continue  # how many larger steps a target takes is what is measured
            axes.plot(
                [each.num_workers for each in scaling.of(mode)],
                [found * each for each in samples],
                color=colour,
                linestyle=":",
                linewidth=1.2,
            )
    if name is not None:
        axes.set_ylabel(name)
    if ideal:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda each, _: f"{each:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_runs(axes: Axes, scaling: Scaling) -> None:
    """Each run that reached the target, as a small point."""
    for mode, colour in _COLOURS.items():
        spots = [(each.num_workers, run.score) for each in scaling.of(mode) for run in each.times.values() if run.reached and run.score]
        axes.scatter([x for x, _ in spots], [y for _, y in spots], s=14, color=colour, alpha=0.45, linewidths=0, zorder=2)


def _draw_shares(axes: Axes, scaling: Scaling) -> None:
    """What of a step is computation, as bars."""
    known = [(each, share) for each in scaling.points if (share := each.computation_share) is not None]
    for place, (point, share) in enumerate(known):
        axes.bar(place, share, color=_COLOURS[point.mode], width=0.7)
        axes.bar(place, 1 - share, bottom=share, color=_EXCHANGE, width=0.7)
        axes.text(place, share / 2, f"{share:.0%}", ha="center", va="center", color="white", fontsize=9)
    axes.set_xticks(range(len(known)), [f"{point.num_workers}\n{point.mode}" for point, _ in known])
    axes.set_ylabel("share of a step")
    axes.set_xlabel("computing (colour) · exchange, and waiting for others (grey)" if known else "not measured without one worker alone")
    axes.grid(visible=False, axis="x")


def _count_workers(axes: Axes, scaling: Scaling) -> None:
    numbers = _workers(scaling)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(each) for each in numbers]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda each, _: f"{each:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("workers")


def _workers(scaling: Scaling) -> list[int]:
    return sorted({each.num_workers for each in scaling.points})


def _ratio(scaling: Scaling, point: ScalingPoint) -> float | None:
    found = scaling.step_efficiency(point)
    return None if found is None else found.ratio
