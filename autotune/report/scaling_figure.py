"""The figure of a scaling measurement: time to target, step time, efficiency and share of computation by number of workers."""

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
    """Draw ``scaling.png`` into ``folder``, made if missing; returns a list with its path."""
    return write_png({"scaling": lambda: draw_scaling(scaling)}, folder)


def draw_scaling(scaling: Scaling) -> Figure:
    """Four panels by number of workers: time to target, step time, efficiency, and the share of computation in a step."""
    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    panels = [figure.add_subplot(2, 2, index) for index in (1, 2, 3, 4)]
    _draw_lines(panels[0], scaling, lambda point: point.seconds, "seconds to target", ideal=True)
    _draw_runs(panels[0], scaling)
    _draw_lines(panels[1], scaling, lambda point: point.step_seconds, "seconds a step", ideal=True)
    _draw_lines(panels[2], scaling, scaling.efficiency, "efficiency (fewest workers = 1)", label="{}, to target")
    _draw_lines(panels[2], scaling, lambda point: _step_efficiency(scaling, point), None, label="{}, samples a second", dashed=True)
    panels[2].axhline(1, color=INK, linewidth=0.9, linestyle=":", zorder=1)
    panels[2].set_ylim(bottom=0)
    _draw_shares(panels[3], scaling)
    for axes in panels[:3]:
        _set_worker_axis(axes, scaling)
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
    """Draw a line of ``value`` for each scaling mode; ``ideal`` adds a dotted line of what a step without exchange would give."""
    for mode, colour in _COLOURS.items():
        measured = [(point, measurement) for point in scaling.of(mode) if (measurement := value(point)) is not None]
        if not measured:
            continue
        axes.plot(
            [point.num_workers for point, _ in measured],
            [measurement for _, measurement in measured],
            color=colour,
            marker=_MARKERS[mode],
            markersize=6,
            linewidth=1.6,
            linestyle="--" if dashed else "-",
            label=label.format(mode),
            zorder=3,
        )
        if ideal and measured[0][0] is scaling.of(mode)[0]:
            base, base_value = measured[0]
            work = [point.batch_size / base.batch_size * base.num_workers / point.num_workers for point in scaling.of(mode)]
            if name == "seconds to target" and mode is Mode.WEAK:
                continue  # the number of larger steps to the target is not known beforehand
            axes.plot(
                [point.num_workers for point in scaling.of(mode)],
                [base_value * factor for factor in work],
                color=colour,
                linestyle=":",
                linewidth=1.2,
            )
    if name is not None:
        axes.set_ylabel(name)
    if ideal:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_runs(axes: Axes, scaling: Scaling) -> None:
    """Draw each run that reached the target as a small point."""
    for mode, colour in _COLOURS.items():
        spots = [(point.num_workers, run.score) for point in scaling.of(mode) for run in point.times.values() if run.reached and run.score]
        axes.scatter([x for x, _ in spots], [y for _, y in spots], s=14, color=colour, alpha=0.45, linewidths=0, zorder=2)


def _draw_shares(axes: Axes, scaling: Scaling) -> None:
    """Draw a bar for each point: the shares of a step in computation and in exchange."""
    known = [(point, share) for point in scaling.points if (share := point.computation_share) is not None]
    for column, (point, share) in enumerate(known):
        axes.bar(column, share, color=_COLOURS[point.mode], width=0.7)
        axes.bar(column, 1 - share, bottom=share, color=_EXCHANGE, width=0.7)
        axes.text(column, share / 2, f"{share:.0%}", ha="center", va="center", color="white", fontsize=9)
    axes.set_xticks(range(len(known)), [f"{point.num_workers}\n{point.mode}" for point, _ in known])
    axes.set_ylabel("share of a step")
    axes.set_xlabel("computing (colour) · exchange, and waiting for others (grey)" if known else "not measured without one worker alone")
    axes.grid(visible=False, axis="x")


def _set_worker_axis(axes: Axes, scaling: Scaling) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(number) for number in _workers(scaling)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("workers")


def _workers(scaling: Scaling) -> list[int]:
    return sorted({point.num_workers for point in scaling.points})


def _step_efficiency(scaling: Scaling, point: ScalingPoint) -> float | None:
    efficiency = scaling.step_efficiency(point)
    return None if efficiency is None else efficiency.ratio
