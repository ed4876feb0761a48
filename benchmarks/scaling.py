"""What does a search cost with more workers? ``python -m benchmarks.scaling --recordings DIR``.

Searches are replayed over recorded learning curves (``docs/recording.md``) on a virtual clock, with
each number of workers. The driver of a replay is that of a study, so what its decisions cost is
measured.

Reported for each policy and number of workers: seconds of the clock until a trial within 10% of the
best has reached the target, in trainings of the best configuration (geometric mean over recordings
and seeds); the share of worker seconds in which nothing was trained; and what an answer of the
driver took (mean, median, 99th percentile). No claim is checked.

Exit code 0: it ran; 2: no recordings.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from autotune.config.compose import Composed, Composer
from autotune.errors import AutotuneError
from autotune.recording import Recording, read_recording
from autotune.search.samplers import quiet_optuna
from autotune.search.scheduler import Scheduler
from benchmarks.measuring import circumstances, write_result
from benchmarks.replay.replayed_policy import replayed_policy
from benchmarks.replay.simulation import Trace, best_seconds, replay
from benchmarks.search import RECORDINGS_VARIABLE, one_thread_processes, recordings_asked_for
from benchmarks.search_peers.scores import WITHIN

_DRIVER = ("suggest", "observe", "finish")
"""Methods of a policy for whose answer a worker waits."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search to replay."""

    recording: Path
    policy: str
    num_workers: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of one replayed search."""

    search: Search
    wall_multiple: float
    """Seconds of the virtual clock over the best time to target."""
    idle_share: float
    """Share of the worker seconds in which nothing was trained."""
    num_answers: int
    mean_answer_ms: float
    median_answer_ms: float
    late_answer_ms: float
    """The 99th percentile of the driver's answer times, in milliseconds."""
    answers_per_training: float
    """Number of answers of the driver while one worker trains for the best time to target."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Means over the searches by one policy with one number of workers."""

    policy: str
    num_workers: int
    num_searches: int
    wall_multiple: float
    """Geometric mean over the searches; all further fields are arithmetic means."""
    idle_share: float
    mean_answer_ms: float
    median_answer_ms: float
    late_answer_ms: float
    answers_per_training: float


def run_search(search: Search) -> Score:
    """Replay a search, and time its driver."""
    quiet_optuna()
    recording = _recording(search.recording)
    best = best_seconds(recording)
    assert best is not None
    answers: list[float] = []
    trace = replay(
        recording,
        lambda place: _timed(
            replayed_policy(recording, _composed(search.policy), seed=search.seed, place=place),
            answers,
        ),
        num_workers=search.num_workers,
        within=WITHIN,
    )
    return _score(search, trace, best, answers)


def _score(search: Search, trace: Trace, best: float, answers: Sequence[float]) -> Score:
    wall = max(stretch.stopped_seconds for stretch in trace.stretches)
    there = wall * search.num_workers
    return Score(
        search=search,
        wall_multiple=wall / best,
        idle_share=1
        - sum(stretch.stopped_seconds - stretch.started_seconds for stretch in trace.stretches)
        / there,
        num_answers=len(answers),
        mean_answer_ms=1e3 * float(np.mean(answers)),
        median_answer_ms=1e3 * float(np.median(answers)),
        late_answer_ms=1e3 * float(np.quantile(answers, 0.99)),
        answers_per_training=len(answers) * best / there,
    )


def _timed(policy: Scheduler, answers: list[float]) -> Scheduler:
    """Make a policy append the seconds of each of its answers to ``answers``."""

    def timed(answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            began = time.perf_counter()
            try:
                return answer(*arguments, **settings)
            finally:
                answers.append(time.perf_counter() - began)

        return call

    for name in _DRIVER:
        setattr(policy, name, timed(getattr(policy, name)))
    return policy


@lru_cache(maxsize=32)
def _recording(folder: Path) -> Recording:
    return read_recording(folder)


@lru_cache
def _composed(policy: str) -> Composed:
    return Composer([f"search={policy}", "stopping=cap", "search.num_trials=null"]).compose()


def rows_of(scores: Sequence[Score]) -> list[Row]:
    """A row for each policy, number of workers."""
    groups: dict[tuple[str, int], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.search.policy, score.search.num_workers), []).append(score)
    return [
        Row(
            policy=policy,
            num_workers=num_workers,
            num_searches=len(group),
            wall_multiple=math.exp(
                float(np.mean([math.log(score.wall_multiple) for score in group]))
            ),
            **{name: float(np.mean([getattr(score, name) for score in group])) for name in _MEANS},
        )
        for (policy, num_workers), group in groups.items()
    ]


_MEANS = (
    "idle_share",
    "mean_answer_ms",
    "median_answer_ms",
    "late_answer_ms",
    "answers_per_training",
)


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table(
        title="Searches until one within 10% of the best has reached the target",
        title_justify="left",
    )
    for name in (
        "policy",
        "workers",
        "n",
        "wall",
        "idle",
        "answer ms",
        "median",
        "99%",
        "answers a training",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy,
            str(row.num_workers),
            str(row.num_searches),
            f"{row.wall_multiple:.3g}",
            f"{row.idle_share:.1%}",
            f"{row.mean_answer_ms:.3g}",
            f"{row.median_answer_ms:.3g}",
            f"{row.late_answer_ms:.3g}",
            f"{row.answers_per_training:.3g}",
        )
    console.print(table)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Replay all searches, print and write the results, and return the exit code."""
    try:
        folders = recordings_asked_for(arguments)
    except AutotuneError as error:
        console.print(str(error), markup=False)
        return 2
    started = circumstances()
    searches = [
        Search(recording=folder, policy=policy, num_workers=num_workers, seed=seed)
        for policy in arguments.policies
        for num_workers in arguments.workers
        for folder in folders
        for seed in range(arguments.seeds)
    ]
    scores = []
    with one_thread_processes(arguments.processes) as pool:
        for number, score in enumerate(pool.imap(run_search, searches), 1):
            scores.append(score)
            if number % max(1, len(searches) // 20) == 0:
                console.print(f"{number} of {len(searches)} searches")
    rows = rows_of(scores)
    print_rows(console, rows)
    settings = {**vars(arguments), "recordings": [folder.name for folder in folders]}
    path = write_result(
        "scaling",
        started=started,
        settings=settings,
        result={"rows": rows, "searches": [*map(_plain, scores)]},
    )
    console.print(f"written to {path}", soft_wrap=True)
    return 0


def _plain(score: Score) -> dict[str, Any]:
    return {
        **vars(score),
        "search": {**vars(score.search), "recording": score.search.recording.name},
    }


def main(command_line: Sequence[str] | None = None) -> int:
    """Read the command line, run, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--recordings",
        help=f"folder of recordings, one folder each; else the variable {RECORDINGS_VARIABLE}",
    )
    parser.add_argument(
        "--names", type=_names, default=[], help="of recordings, with commas; else all"
    )
    parser.add_argument(
        "--policies", type=_names, default=["freeze_thaw", "tpe"], help="of search=, with commas"
    )
    parser.add_argument(
        "--workers", type=_numbers, default=[1, 8, 64, 512], help="numbers of workers, with commas"
    )
    parser.add_argument(
        "--seeds", type=int, default=2, help="searches of each kind over each recording"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="to replay with; more than one disturbs the times of answers",
    )
    return run(parser.parse_args(command_line), Console(width=None if sys.stdout.isatty() else 160))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in _names(text)]


if __name__ == "__main__":
    sys.exit(main())
