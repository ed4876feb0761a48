"""What does each part of freeze-thaw bring? ``python -m benchmarks.search_parts --recordings DIR``.

The search is replayed over recordings with one part left out, or one number changed, at a time:
recordings x variants x seeds, with one worker. What is left out is overridden here, in a subclass;
the search itself has no switch for it. Reported is the cost multiple
(``benchmarks/search_peers/scores.py``) over that of the whole search on the same recordings and
seeds, with its interval by the bootstrap: above 1, the part pays. No claim is checked.

Exit code 0: it ran; 2: no recordings, or a name that is none.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autotune.errors import AutotuneError
from autotune.measurement import Evaluation
from autotune.policy import Decision
from autotune.recording import read_recording
from autotune.search.freeze_thaw import FreezeThawSampler
from autotune.search.samplers import quiet_optuna
from benchmarks.measuring import circumstances, write_result
from benchmarks.replay.simulation import replay
from benchmarks.search import RECORDINGS_VARIABLE, one_thread_processes, recording_folders
from benchmarks.search_peers.policies import from_groups
from benchmarks.search_peers.scores import (
    WITHIN,
    PolicySummary,
    SearchScore,
    group_of,
    score_trace,
    summarise,
)

WHOLE = "whole"
"""The search as it is; it always runs."""


class NoPausing(FreezeThawSampler):
    """Freeze-thaw without pausing: a trial runs until it reaches the target or is capped.

    The model only proposes new points.
    """

    def observe(
        self, number: int, evaluation: Evaluation, *, new: bool = True, may_pause: bool = True
    ) -> Decision:
        """Observe an evaluation without allowing a pause."""
        return super().observe(number, evaluation, new=new, may_pause=False)


def _class(kind: type[FreezeThawSampler]) -> tuple[str, ...]:
    return (
        f"search.sampler._target_=benchmarks.search_parts.{kind.__name__}",
        "allowed_targets=[benchmarks]",
    )


VARIANTS: dict[str, tuple[str, ...]] = {
    WHOLE: (),
    "no pausing": _class(NoPausing),
    "no cap": ("stopping=none",),
    "3 start-up trials": ("+search.sampler.num_startup_trials=3",),
    "12 start-up trials": ("+search.sampler.num_startup_trials=12",),
    "32 candidates": ("+search.sampler.num_candidates=32",),
    "512 candidates": ("+search.sampler.num_candidates=512",),
    "no promotion": ("+search.sampler.reduction_factor=1e9",),
    "half promoted": ("+search.sampler.reduction_factor=2",),
}
"""Each variant's overrides of ``search=freeze_thaw stopping=cap``."""


@dataclass(frozen=True, kw_only=True)
class PartSearch:
    """One search to replay."""

    recording: Path
    variant: str
    seed: int


def run_part(search: PartSearch) -> SearchScore:
    """Replay a search and score it."""
    quiet_optuna()
    recording = read_recording(search.recording)
    make = from_groups("freeze_thaw", "cap", *VARIANTS[search.variant])
    began = time.perf_counter()
    # it has the verbs
    trace = replay(
        recording, lambda place: make(recording, seed=search.seed, place=place), within=WITHIN
    )  # type: ignore[arg-type,return-value]
    score = score_trace(recording, trace, math.nan)
    assert not score["threw_last_winner_away"], "no variant ends a trial that could win"
    wall_seconds = time.perf_counter() - began
    name = search.recording.name
    return SearchScore(
        recording=name,
        policy=search.variant,
        seed=search.seed,
        num_workers=1,
        wall_seconds=wall_seconds,
        group=group_of(name, recording),
        **score,
    )


def run_parts(searches: Sequence[PartSearch], num_processes: int) -> Iterator[SearchScore]:
    """Yield scores as searches end.

    They run in this process with 0 processes, else in that many others with one thread each.
    """
    if num_processes == 0:
        yield from map(run_part, searches)
        return
    with one_thread_processes(num_processes) as pool:
        yield from pool.imap_unordered(run_part, searches)


def summaries_of(scores: Sequence[SearchScore]) -> list[PolicySummary]:
    """A summary of each variant that has all its searches, relative to the search with all
    parts.
    """
    by_variant = {name: [score for score in scores if score.policy == name] for name in VARIANTS}
    whole = by_variant[WHOLE]
    return [summarise(own, whole) for own in by_variant.values() if own and len(own) == len(whole)]


def print_summaries(console: Console, summaries: Sequence[PolicySummary]) -> None:
    """Print the summaries as a table."""
    first = summaries[0]
    table = Table(
        title=(
            f"{first.num_recordings} recording(s), {first.num_searches} searches a variant, 1"
            " worker"
        ),
        title_justify="left",
    )
    table.add_column("variant", no_wrap=True)
    for name in ("cost multiple", "/ whole [95%]", "90th", "worst / whole", "wall s"):
        table.add_column(name, justify="right")
    for summary in summaries:
        table.add_row(
            summary.policy,
            f"{summary.geometric_mean:.4g}",
            f"{summary.relative:.3g} [{summary.relative_low:.3g}, {summary.relative_high:.3g}]",
            f"{summary.ninetieth_percentile:.4g}",
            f"{summary.worst_relative:.3g} {summary.worst_recording}",
            f"{summary.wall_seconds:.2g}",
        )
    console.print(table)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Replay all searches, print and write the results of complete variants, and return the exit
    code.
    """
    root = arguments.recordings or os.environ.get(RECORDINGS_VARIABLE)
    unknown = [name for name in arguments.variants if name not in VARIANTS]
    if unknown or not root:
        console.print(
            f"--variants: found {unknown[0]}; use {', '.join(VARIANTS)}"
            if unknown
            else (
                f"no recordings: give --recordings DIR or set {RECORDINGS_VARIABLE}, a folder of"
                " recordings as docs/recording.md says"
            )
        )
        return 2
    try:
        folders = recording_folders(Path(root).expanduser(), arguments.names)
    except AutotuneError as error:
        console.print(str(error), markup=False)
        return 2
    variants = list(dict.fromkeys([WHOLE, *(arguments.variants or VARIANTS)]))
    started = circumstances()
    searches = [
        PartSearch(recording=folder, variant=variant, seed=seed)
        for variant in variants
        for seed in range(arguments.seeds)
        for folder in folders
    ]
    began, scores = time.monotonic(), []
    for score in run_parts(searches, arguments.processes):
        scores.append(score)
        if len(scores) % (arguments.seeds * len(folders)) == 0:
            console.print(
                f"{len(scores)} of {len(searches)} searches, {time.monotonic() - began:.0f} s"
            )
        if time.monotonic() - began > arguments.search_seconds:
            break
    summaries = summaries_of(scores)
    if not summaries:
        console.print("the time ended before the whole search had been made everywhere")
        return 2
    print_summaries(console, summaries)
    complete = {summary.policy for summary in summaries}
    settings = {
        **vars(arguments),
        "recordings": [folder.name for folder in folders],
        "variants": variants,
    }
    result = {
        "variants": summaries,
        "searches": [score for score in scores if score.policy in complete],
    }
    console.print(
        "written to"
        f" {write_result('search_parts', started=started, settings=settings, result=result)}",
        soft_wrap=True,
    )
    return 0


def main(command_line: Sequence[str] | None = None) -> int:
    """Read the command line, run, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search_parts", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--recordings",
        help=f"folder of recordings, one folder each; else the variable {RECORDINGS_VARIABLE}",
    )
    parser.add_argument(
        "--names", type=_names, default=[], help="of recordings, with commas; else all"
    )
    parser.add_argument(
        "--variants",
        type=_names,
        default=[],
        help=f"with commas; else all of {', '.join(VARIANTS)}",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="searches of each variant over each recording"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="to replay with; 0: in this one"
    )
    parser.add_argument(
        "--search-seconds",
        type=float,
        default=math.inf,
        help="most seconds to replay for; only whole variants count",
    )
    return run(parser.parse_args(command_line), Console(width=None if sys.stdout.isatty() else 160))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
