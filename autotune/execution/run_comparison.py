"""Running a whole comparison: two configurations in pairs of runs, one run at a time in fresh processes, then files, figures and tracker.

All results are written to disk after each run, so an interrupted comparison keeps its runs so far.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from autotune.execution.background_tracker import BackgroundTracker
from autotune.execution.comparison_plan import ComparisonPlan
from autotune.execution.interrupt import interruptible
from autotune.execution.sides_in_turns import Results, compared_sides, device_of, facts_of, make_runs, opened
from autotune.execution.study_folder import shown_path
from autotune.report.compared import Comparison
from autotune.report.comparison_files import write_comparison
from autotune.report.comparison_terminal import print_comparison


def run_comparison(plan: ComparisonPlan, *, command: Sequence[str], code_folders: Sequence[str], console: Console) -> Comparison:
    """Run a planned comparison, then write, track and print its result.

    The first Ctrl-C ends the comparison without a further run, and the runs so far are reported; see ``Comparison.is_complete``.

    Args:
        command: command-line arguments that started the comparison, kept in its files.
        code_folders: folders that may hold Python modules of the user's own.

    Raises:
        AutotuneError: the comparison cannot be run; the message is one line.
        WorkerError: several runs of a side in a row failed in the user's own code.
    """
    results: Results = {}
    facts = facts_of(command)

    def write() -> None:
        write_comparison(plan.folder, _comparison(plan, results), {**facts, "device": device_of(results)})

    with interruptible() as interrupt, opened(plan) as tracker:
        make_runs(plan, results, tracker, interrupt, write=write, code_folders=code_folders, console=console)
        comparison = _comparison(plan, results)
        _conclude(comparison, plan, {**facts, "device": device_of(results)}, tracker)
    print_comparison(console, comparison, folder=shown_path(plan.folder))
    return comparison


def _comparison(plan: ComparisonPlan, results: Results) -> Comparison:
    side_a, side_b = compared_sides(plan, results)
    return Comparison(name=plan.name, experiment=plan.experiment, target=plan.target, num_seeds=plan.num_seeds, sides=(side_a, side_b))


def _conclude(comparison: Comparison, plan: ComparisonPlan, facts: Mapping[str, Any], tracker: BackgroundTracker) -> None:
    """Write the comparison's files and figures, and close the tracker with them."""
    from autotune.report.comparison_figures import write_comparison_figures  # noqa: PLC0415  # imports matplotlib, needed only at the end

    files = write_comparison(plan.folder, comparison, facts)
    figures = write_comparison_figures(plan.folder / "figures", comparison)
    is_time = comparison.scale.is_time
    metrics = {f"{side.name}_mean_{'seconds' if is_time else 'score'}": side.arm.mean_spent or float("nan") for side in comparison.sides}
    for name, ratio in (
        ("time" if is_time else "score", comparison.score_ratio),
        ("steps", comparison.steps_ratio),
        ("step", comparison.step_ratio),
    ):
        if ratio is not None:
            metrics |= {f"{name}_ratio": ratio.ratio, f"{name}_ratio_low": ratio.low, f"{name}_ratio_high": ratio.high}
    metrics["num_pairs"] = comparison.num_pairs
    claim = {"autotune.claim": str(comparison.score_ratio.claim)} if comparison.score_ratio else {}
    status = "FINISHED" if comparison.is_complete else "KILLED"
    tracker.close(status=status, metrics=metrics, tags=claim, artifacts=[*files, *figures])
