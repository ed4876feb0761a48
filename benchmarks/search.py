"""What does a search cost, in trainings of the best configuration? ``python -m benchmarks.search
--recordings DIR``.

Searches are replayed over recorded learning curves (``docs/recording.md``): recordings x policies x
seeds x numbers of workers, on all cores, one thread each. For all policies alike a suggested point
is taken as the nearest recorded trial not yet used, trials are charged the training seconds up to
where they were left, and workers are asynchronous (``benchmarks.replay``).

Reported is, first, the ratio: the best time found over the best recorded one after so many best
times, and after so many full trainings, for each group of recordings (real trainings whose
schedule's length is searched, other real ones, surrogates). Second, the cost multiple
(``benchmarks/search_peers/scores.py`` defines both, and what a search is charged that threw its
last winner away): per policy its geometric mean over recordings and seeds
with an interval by the bootstrap, its 90th percentile, the recording where it is worst relative to
random search with cap, the share of searches that threw their last winner away, the share of the
fastest trials that a stop threw away, regret over budget, and how long a decision takes. No claim
is checked.

Policies that need a library which is not installed (``pip install "autotune[peers]"``) are skipped,
and the output says so.

Exit code 0: it ran; 2: no recordings, a name that is none, or no time for one seed.
"""

import argparse
import dataclasses
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from autotune.errors import AutotuneError
from autotune.recording import Recording, read_recording
from autotune.search.samplers import quiet_optuna
from benchmarks.measuring import circumstances, write_result
from benchmarks.replay.simulation import Trace, best_seconds, replay
from benchmarks.search_peers.decision_times import NUM_TRIALS, DecisionTime, decision_time
from benchmarks.search_peers.figures import write_figures
from benchmarks.search_peers.policies import POLICIES, missing_library
from benchmarks.search_peers.scores import (
    BUDGETS,
    DECISION_SECONDS,
    FULL_BUDGETS,
    RESUME_SECONDS,
    TOLD_BUDGETS,
    WITHIN,
    PolicySummary,
    SearchScore,
    geometric_means,
    group_of,
    mean_ratios,
    score_trace,
    summarise,
)

REFERENCE = "random_cap"
"""The policy that others are compared with; it always runs."""
CHARGED = "random"
"""Policy whose seconds are added to the cost of a search that threw its last winner away."""
RECORDINGS_VARIABLE = "AUTOTUNE_RECORDINGS"
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "LOKY_MAX_CPU_COUNT",
)


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search to replay."""

    recording: Path
    policy: str
    seed: int
    num_workers: int
    keep: float = 1.0
    """Share of the recording's trials that are kept, drawn at random by the seed."""
    best_times: float = math.inf
    """After how many times the recording's best time to target the search ends."""
    is_told: bool = False
    """Whether the policy knows when the search ends, as in a study with a time budget."""
    resume_seconds: float = RESUME_SECONDS
    charged_decision_seconds: float = DECISION_SECONDS


def run_search(search: Search) -> SearchScore:
    """Replay a search and score it."""
    quiet_optuna()
    recording = _recording(search)
    began = time.perf_counter()
    trace = _trace(search)
    wall_seconds = time.perf_counter() - began
    charged, max_seconds = 0.0, _max_seconds(search)
    if trace.seconds_until(recording, WITHIN) is None and not trace.lasted(max_seconds):
        at_random = _trace(
            Search(
                recording=search.recording,
                policy=CHARGED,
                seed=search.seed,
                num_workers=search.num_workers,
                keep=search.keep,
            )
        )
        # random search ends only when it has found a winner
        charged = at_random.seconds_until(recording, WITHIN) or 0.0
    return SearchScore(
        recording=search.recording.name,
        policy=search.policy,
        seed=search.seed,
        num_workers=search.num_workers,
        wall_seconds=wall_seconds,
        group=group_of(search.recording.name, recording),
        **score_trace(
            recording,
            trace,
            charged,
            max_seconds=max_seconds,
            resume_seconds=search.resume_seconds,
            decision_seconds=search.charged_decision_seconds,
        ),
    )


def _trace(search: Search) -> Trace:
    recording, kind = _recording(search), POLICIES[search.policy]
    return replay(
        recording,
        # it has the verbs
        lambda place: kind.make(recording, seed=search.seed, place=place),  # type: ignore[arg-type,return-value]
        num_workers=search.num_workers,
        within=WITHIN,
        max_seconds=_max_seconds(search),
        is_told=search.is_told,
    )


def _max_seconds(search: Search) -> float:
    """Seconds on the clock after which a search ends."""
    best = best_seconds(_recording(search))
    return math.inf if best is None else search.best_times * best / search.num_workers


def _recording(search: Search) -> Recording:
    whole = _whole_recording(search.recording)
    if search.keep == 1:
        return whole
    rng = np.random.default_rng(search.seed)
    trials = tuple(trial for trial in whole.trials if rng.random() < search.keep)
    return dataclasses.replace(whole, trials=trials)


@lru_cache(maxsize=4)
def _whole_recording(folder: Path) -> Recording:
    return read_recording(folder)


def run_searches(searches: Sequence[Search], num_processes: int) -> Iterator[SearchScore]:
    """Yield scores as searches end.

    They run in this process with 0 processes, else in that many others with one thread each.
    """
    if num_processes == 0:
        yield from map(run_search, searches)
        return
    with one_thread_processes(num_processes) as pool:
        yield from pool.imap_unordered(run_search, searches)


def one_thread_processes(number: int) -> Pool:
    """A pool of new processes with one thread each: libraries read the variables for that when
    the processes import them.
    """
    with mock.patch.dict(os.environ, dict.fromkeys(_THREAD_VARIABLES, "1")):
        return multiprocessing.get_context("spawn").Pool(number)


def measure_decisions(
    policies: Sequence[str], limit_seconds: float
) -> dict[str, list[DecisionTime | None]]:
    """Decision times of each policy, at each of ``NUM_TRIALS``.

    After a number of trials that it does not reach, no larger one is tried.
    """
    quiet_optuna()
    found: dict[str, list[DecisionTime | None]] = {}
    for policy in policies:
        times: list[DecisionTime | None] = []
        for number in NUM_TRIALS:
            times.append(
                None
                if None in times
                else decision_time(policy, number, limit_seconds=limit_seconds)
            )
        found[policy] = times
    return found


def summaries_of(scores: Sequence[SearchScore]) -> list[PolicySummary]:
    """A summary for each policy and number of workers; random with cap must be among the scores."""
    found = []
    for num_workers in sorted({score.num_workers for score in scores}):
        own = [score for score in scores if score.num_workers == num_workers]
        reference = [score for score in own if score.policy == REFERENCE]
        found += [
            summarise([score for score in own if score.policy == name], reference)
            for name in dict.fromkeys(score.policy for score in own)
        ]
    return sorted(found, key=lambda summary: (summary.num_workers, summary.geometric_mean))


def print_ratios(console: Console, scores: Sequence[SearchScore], best_times: float) -> None:
    """Print a table of the policies' ratios for each number of workers and group of recordings,
    and for each real recording.

    Args:
        best_times: after how many best times the searches ended.
    """
    kinds = sorted({(score.num_workers, score.group, score.recording) for score in scores})
    for num_workers, group in dict.fromkeys((number, group) for number, group, _ in kinds):
        names = [name for *kind, name in kinds if kind == [num_workers, group]]
        own = [
            score for score in scores if (score.num_workers, score.group) == (num_workers, group)
        ]
        title = f"Best found / best possible, {num_workers} worker(s), {group}"
        console.print(_ratio_table(f"{title}: {', '.join(names)}", own, best_times))
        for name in names if len(names) > 1 and group.startswith("real") else []:
            of_name = [score for score in own if score.recording == name]
            console.print(_ratio_table(name, of_name, best_times))


def _ratio_table(title: str, scores: Sequence[SearchScore], best_times: float) -> Table:
    num_seeds = len({score.seed for score in scores})
    table = Table(title=f"{title}; {num_seeds} seed(s)", title_justify="left")
    told = [budget for budget in TOLD_BUDGETS if budget <= best_times]
    full = FULL_BUDGETS if math.isinf(best_times) else ()
    table.add_column("policy", no_wrap=True)
    for name in (*(f"{each} best" for each in told), *(f"{each} full" for each in full)):
        table.add_column(name, justify="right")
    table.add_column("last winner lost", justify="right")
    for policy in dict.fromkeys(score.policy for score in scores):
        of_policy = [score for score in scores if score.policy == policy]
        of_best, of_full = mean_ratios(of_policy)
        ratios = [*of_best[: len(told)], *of_full[: len(full)]]
        lost = sum(score.threw_last_winner_away for score in of_policy) / len(of_policy)
        table.add_row(policy, *(f"{ratio:.3g}" for ratio in ratios), f"{lost:.1%}")
    return table


def print_summaries(
    console: Console,
    summaries: Sequence[PolicySummary],
    scores: Sequence[SearchScore],
    decisions: dict[str, list[DecisionTime | None]],
) -> None:
    """Print a table of the policies and one of the recordings, for each number of workers."""
    for num_workers in sorted({summary.num_workers for summary in summaries}):
        own = [summary for summary in summaries if summary.num_workers == num_workers]
        first = own[0]
        title = (
            f"Cost multiple, {num_workers} worker(s), {first.num_recordings} recording(s),"
            f" {first.num_searches} searches a policy"
        )
        table = Table(title=title, title_justify="left")
        table.add_column("policy", no_wrap=True)
        for name in (
            "mean [95%]",
            "charged",
            "90th",
            "/ random_cap [95%]",
            "worst / random_cap",
            "last winner lost",
            "top 5% lost",
            "ms at 100 / 2,000",
            "longest",
            "wall s",
        ):
            table.add_column(name, justify="right")
        for summary in own:
            times = decisions.get(summary.policy, [])
            lost = (
                "-"
                if summary.lost_winners_fraction is None
                else f"{summary.lost_winners_fraction:.1%}"
            )
            table.add_row(
                summary.policy,
                f"{summary.geometric_mean:.4g} [{summary.low:.3g}, {summary.high:.3g}]",
                f"{summary.charged_geometric_mean:.4g}",
                f"{summary.ninetieth_percentile:.4g}",
                f"{summary.relative:.3g} [{summary.relative_low:.3g}, {summary.relative_high:.3g}]",
                f"{summary.worst_relative:.3g} {summary.worst_recording}",
                f"{summary.threw_last_winner_away_fraction:.1%}",
                lost,
                " / ".join(
                    "-" if decision is None else f"{decision.suggestion_milliseconds:.3g}"
                    for decision in times
                )
                or "-",
                " / ".join(
                    "-" if decision is None else f"{decision.longest_milliseconds:.3g}"
                    for decision in times
                )
                or "-",
                f"{summary.wall_seconds:.2g}",
            )
        console.print(table)
        rows = Table(
            title=f"Geometric mean over seeds, {num_workers} worker(s)", title_justify="left"
        )
        rows.add_column("recording", no_wrap=True)
        means = {
            summary.policy: geometric_means(_of(scores, summary.policy, num_workers))
            for summary in own
        }
        for name in means:
            rows.add_column(name, justify="right")
        for recording in means[REFERENCE]:
            rows.add_row(
                recording, *(f"{by_recording[recording]:.4g}" for by_recording in means.values())
            )
        console.print(rows)


def _of(scores: Sequence[SearchScore], policy: str, num_workers: int) -> list[SearchScore]:
    return [
        score for score in scores if score.policy == policy and score.num_workers == num_workers
    ]


def _watched(
    searches: Sequence[Search], arguments: argparse.Namespace, console: Console
) -> list[SearchScore]:
    """The scores of all searches, or of those that end in time; progress is printed."""
    began = time.monotonic()
    scores: list[SearchScore] = []
    for score in run_searches(searches, arguments.processes):
        scores.append(score)
        if len(scores) % max(1, len(searches) // 20) == 0:
            console.print(
                f"{len(scores)} of {len(searches)} searches, {time.monotonic() - began:.0f} s"
            )
        if time.monotonic() - began > arguments.search_seconds:
            break
    return scores


def complete_seeds(scores: Sequence[SearchScore], num_searches: int) -> list[SearchScore]:
    """The scores of the seeds that have ``num_searches`` scores: those of every policy over
    every recording.
    """
    numbers = Counter(score.seed for score in scores)
    return [score for score in scores if numbers[score.seed] == num_searches]


def recording_folders(root: Path, names: Sequence[str]) -> list[Path]:
    """The folders of all recordings in a folder in order of their names, or of those with the given
    names.

    Raises:
        AutotuneError: there is no recording, or none of a given name.
    """
    found = {path.parent.name: path.parent for path in sorted(root.glob("*/study.yaml"))}
    missing = [name for name in names if name not in found]
    if missing or not found:
        raise AutotuneError(
            f"{root}: has no recording {missing[0] if missing else ''}; found are"
            f" {', '.join(found) or 'none'}"
        )
    return [found[name] for name in names or found]


def recordings_asked_for(arguments: argparse.Namespace) -> list[Path]:
    """The folders of the recordings that ``--recordings`` and ``--names`` select.

    Raises:
        AutotuneError: no folder is given, or a recording is missing.
    """
    root = arguments.recordings or os.environ.get(RECORDINGS_VARIABLE)
    if not root:
        raise AutotuneError(f"no recordings: give --recordings DIR or set {RECORDINGS_VARIABLE}")
    return recording_folders(Path(root).expanduser(), arguments.names)


def policies_to_run(asked: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The policies to run, always with random search with cap, and the policies to skip with the
    library that they lack.

    Raises:
        AutotuneError: an unknown policy was asked for.
    """
    unknown = [name for name in asked if name not in POLICIES]
    if unknown:
        raise AutotuneError(f"--policies: found {unknown[0]}; use {', '.join(POLICIES)}")
    names = list(dict.fromkeys([*(asked or POLICIES), REFERENCE]))
    skipped = {name: library for name in names if (library := missing_library(name)) is not None}
    return [name for name in names if name not in skipped], skipped


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Replay all searches, print and write the results, and return the exit code."""
    root = arguments.recordings or os.environ.get(RECORDINGS_VARIABLE)
    if not root:
        console.print(
            f"no recordings: give --recordings DIR or set {RECORDINGS_VARIABLE}, a folder of"
            " recordings as docs/recording.md says"
        )
        return 2
    try:
        folders = recording_folders(Path(root).expanduser(), arguments.names)
        policies, skipped = policies_to_run(arguments.policies)
    except AutotuneError as error:
        console.print(str(error), markup=False)
        return 2
    for name, library in skipped.items():
        console.print(
            f"skipped: {name}, because {library} is not installed (the extra peers holds it)",
            markup=False,
        )
    started = circumstances()
    searches = [
        Search(
            recording=folder,
            policy=policy,
            seed=seed,
            num_workers=num_workers,
            keep=arguments.keep,
            best_times=arguments.best_times,
            is_told=arguments.told,
            resume_seconds=arguments.charge_resume_seconds,
            charged_decision_seconds=arguments.charge_decision_seconds,
        )
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for num_workers in arguments.workers
        for folder in folders
        for policy in policies
    ]
    console.print(f"{len(searches)} searches: {len(folders)} recordings, {', '.join(policies)}")
    scores = complete_seeds(
        _watched(searches, arguments, console), len(searches) // arguments.seeds
    )
    if not scores:
        console.print("the time ended before every policy had made its first search everywhere")
        return 2
    decisions = {}
    if arguments.decision_seconds > 0:
        with one_thread_processes(1) as pool:
            decisions = pool.apply(measure_decisions, (policies, arguments.decision_seconds))
    summaries = summaries_of(scores)
    print_ratios(console, scores, arguments.best_times)
    print_summaries(console, summaries, scores, decisions)
    settings: dict[str, Any] = {
        **vars(arguments),
        "recordings": [folder.name for folder in folders],
        "policies": policies,
    }
    result = {
        "skipped": skipped,
        "policies": summaries,
        "budgets": BUDGETS,
        "decision_times": decisions,
        "searches": sorted(
            scores, key=lambda score: (score.num_workers, score.recording, score.policy, score.seed)
        ),
    }
    path = write_result("search", started=started, settings=settings, result=result)
    paths = [path, *write_figures(path.parent, path.stem.removeprefix("search-"), summaries)]
    console.print("written to " + ", ".join(str(path) for path in paths), soft_wrap=True)
    return 0


def main(command_line: Sequence[str] | None = None) -> int:
    """Read the command line, run, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--recordings",
        help=f"folder of recordings, one folder each; else the variable {RECORDINGS_VARIABLE}",
    )
    parser.add_argument(
        "--names", type=_names, default=[], help="of recordings, with commas; else all"
    )
    parser.add_argument(
        "--policies",
        type=_names,
        default=[],
        help=f"with commas; else all of {', '.join(POLICIES)}",
    )
    parser.add_argument(
        "--seeds", type=int, default=10, help="searches of each policy over each recording"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first of them")
    parser.add_argument(
        "--keep",
        type=_share,
        default=1.0,
        help="share of each recording's trials to keep, drawn anew for each seed",
    )
    parser.add_argument(
        "--best-times",
        type=float,
        default=math.inf,
        help="end each search after so many times the recording's best time to target",
    )
    parser.add_argument(
        "--told",
        action="store_true",
        help="let the searches know when they end, as with search.time_budget_seconds",
    )
    parser.add_argument(
        "--workers", type=_numbers, default=[1, 8], help="numbers of virtual workers, with commas"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="to replay with; 0: in this one"
    )
    parser.add_argument(
        "--search-seconds",
        type=float,
        default=math.inf,
        help="most seconds to replay for; only whole seeds count",
    )
    parser.add_argument(
        "--charge-resume-seconds",
        type=float,
        default=RESUME_SECONDS,
        help="of taking up a paused trial, in *charged*",
    )
    parser.add_argument(
        "--charge-decision-seconds",
        type=float,
        default=DECISION_SECONDS,
        help="of each decision, in *charged*",
    )
    parser.add_argument(
        "--decision-seconds",
        type=float,
        default=300,
        help="most seconds to bring a policy to 2,000 trials; 0: time no decisions",
    )
    return run(parser.parse_args(command_line), Console(width=None if sys.stdout.isatty() else 200))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"found {text}; use a number above 0, at most 1")
    return share


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
