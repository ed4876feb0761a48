"""What does an earlier study save a search, or cost it? ``python -m benchmarks.warm_start
--recordings DIR``.

Freeze-thaw searches are replayed over recorded learning curves (``docs/recording.md``), each
without earlier studies and with some, for the same seeds. Earlier studies are the recordings of the
same search space that come next in order of their names:

* ``whole``: as they are. Recordings of one benchmark hold the same configurations, so the best one
  here has mostly been tried there.
* ``thinned``: a hundred trials of each, drawn by chance, and none of the winners here (within 10%
  of the best time to target).
* ``shuffled``: each trial with the curve of another, drawn by chance: nothing in them is true.
* ``inverted``: the best trial with the curve of the worst, and so on: everything in them is false.

Reported is the cost multiple without earlier studies over that with them, as the geometric mean
over recordings and seeds with its interval by the bootstrap. No claim is checked.

Exit code 0: it ran; 2: no recordings, or no time for one seed.
"""

import argparse
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from autotune.config.compose import Composed, Composer
from autotune.errors import AutotuneError
from autotune.recording import RecordedTrial, Recording, read_recording
from autotune.search.samplers import quiet_optuna
from autotune.search.warm_start import EarlierStudy, earlier_study
from benchmarks.measuring import circumstances, write_result
from benchmarks.replay.replayed_policy import replayed_policy
from benchmarks.replay.simulation import best_seconds, replay
from benchmarks.search import RECORDINGS_VARIABLE, one_thread_processes, recordings_asked_for
from benchmarks.search_peers.scores import WITHIN, interval

COLD = "cold"
KINDS = ("whole", "thinned", "shuffled", "inverted")
_NUM_THINNED = 100


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search to replay."""

    recording: Path
    earlier: tuple[Path, ...]
    kind: str
    """``COLD`` for no earlier studies, or one of ``KINDS``."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """The cost of one search."""

    recording: str
    kind: str
    seed: int
    cost_multiple: float
    num_trials: int
    wall_seconds: float
    """Seconds that the replay itself took."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Cost without earlier studies over that with them: geometric mean over recordings and
    seeds, 95% interval; above 1, they helped.
    """

    kind: str
    group: str
    """Beginning of the recordings' names, or ``all``."""
    num_searches: int
    ratio: float
    low: float
    high: float
    worst_recording: str
    worst_ratio: float


def run_search(search: Search) -> Score:
    """Replay a search and score it."""
    quiet_optuna()
    recording = _recording(search.recording)
    rng = np.random.default_rng(search.seed)
    earlier = [_earlier(folder, search.kind, recording, rng) for folder in search.earlier]
    began = time.perf_counter()
    trace = replay(
        recording,
        lambda place: replayed_policy(
            recording, _composed(), seed=search.seed, place=place, earlier=earlier
        ),
        within=WITHIN,
    )
    seconds, best = trace.seconds_until(recording, WITHIN), best_seconds(recording)
    assert seconds is not None, "freeze-thaw with a cap throws no winner away"
    assert best is not None
    return Score(
        recording=search.recording.name,
        kind=search.kind,
        seed=search.seed,
        cost_multiple=seconds / best,
        num_trials=len({stretch.trial for stretch in trace.stretches}),
        wall_seconds=time.perf_counter() - began,
    )


def _earlier(
    folder: Path, kind: str, recording: Recording, rng: np.random.Generator
) -> EarlierStudy:
    found = _recording(folder)
    return earlier_study(
        folder.name,
        replace(found, trials=tuple(changed(found, kind, recording, rng))),
        recording.space,
    )


def changed(
    found: Recording, kind: str, recording: Recording, rng: np.random.Generator
) -> list[RecordedTrial]:
    """The trials of the earlier study ``found``, changed as ``kind`` says for a search over
    ``recording``.
    """
    trials = list(found.trials)
    if kind == "thinned":
        winners = _winners(recording)
        others = [trial for trial in trials if trial.suggestion not in winners]
        return [
            others[place]
            for place in sorted(
                rng.choice(len(others), min(_NUM_THINNED, len(others)), replace=False)
            )
        ]
    if kind == "shuffled":
        return [
            _with_curve(trial, trials[place])
            for trial, place in zip(trials, rng.permutation(len(trials)), strict=True)
        ]
    if kind == "inverted":
        ranked = sorted(trials, key=lambda trial: _rank(trial, found))
        return [
            _with_curve(trial, other) for trial, other in zip(ranked, reversed(ranked), strict=True)
        ]
    return trials


def _winners(recording: Recording) -> list[Any]:
    times = {trial.number: trial.time_to_target(recording.target) for trial in recording.trials}
    enough = (1 + WITHIN) * (best_seconds(recording) or math.inf)
    return [
        trial.suggestion
        for trial in recording.trials
        if (seconds := times[trial.number]) is not None and seconds <= enough
    ]


def _rank(trial: RecordedTrial, recording: Recording) -> tuple[float, float]:
    seconds = trial.time_to_target(recording.target)
    least = min(
        (recording.target.shortfall(metric) for metric in trial.metrics if math.isfinite(metric)),
        default=math.inf,
    )
    return (math.inf if seconds is None else seconds, least)


def _with_curve(trial: RecordedTrial, other: RecordedTrial) -> RecordedTrial:
    return replace(other, number=trial.number, suggestion=trial.suggestion)


@lru_cache(maxsize=32)
def _recording(folder: Path) -> Recording:
    return read_recording(folder)


@lru_cache
def _composed() -> Composed:
    return Composer(["search=freeze_thaw", "stopping=cap", "search.num_trials=null"]).compose()


def searches_over(
    folders: Sequence[Path], kinds: Sequence[str], num_earlier: int, num_seeds: int
) -> list[Search]:
    """All searches, seed by seed.

    None for a recording whose search space no other recording has.
    """
    searches = []
    for seed in range(num_seeds):
        for folder in folders:
            alike = [
                other for other in folders if _recording(other).space == _recording(folder).space
            ]
            place = alike.index(folder)
            others = tuple((alike[place + 1 :] + alike[:place])[:num_earlier])
            searches += [
                Search(
                    recording=folder, earlier=() if kind == COLD else others, kind=kind, seed=seed
                )
                for kind in ((COLD, *kinds) if others else ())
            ]
    return searches


def ratios_of(scores: Sequence[Score]) -> list[Ratio]:
    """Ratios of cost for each kind of earlier studies: over all recordings, and over those whose
    names begin alike.
    """
    costs = {
        (score.kind, score.recording, score.seed): math.log(score.cost_multiple) for score in scores
    }
    names, seeds = (
        sorted({score.recording for score in scores}),
        sorted({score.seed for score in scores}),
    )
    groups = {"all": names} | {
        begin: [name for name in names if name.startswith(begin)]
        for name in names
        for begin in [name.split("_")[0]]
    }
    found = []
    for kind in dict.fromkeys(score.kind for score in scores if score.kind != COLD):
        for group, members in groups.items():
            logs = np.array(
                [
                    [costs[COLD, name, seed] - costs[kind, name, seed] for seed in seeds]
                    for name in members
                ]
            )
            low, high = interval(logs)
            worst = int(logs.mean(axis=1).argmin())
            found.append(
                Ratio(
                    kind=kind,
                    group=group,
                    num_searches=logs.size,
                    ratio=float(np.exp(logs.mean())),
                    low=low,
                    high=high,
                    worst_recording=members[worst],
                    worst_ratio=float(np.exp(logs.mean(axis=1)[worst])),
                )
            )
    return found


def print_ratios(console: Console, ratios: Sequence[Ratio], scores: Sequence[Score]) -> None:
    """Print a table of the ratios, and one of the recordings."""
    table = Table(
        title="Cost multiple without earlier studies over that with them", title_justify="left"
    )
    for name in ("earlier studies", "recordings"):
        table.add_column(name, no_wrap=True)
    for name in ("ratio [95%]", "n", "worst recording"):
        table.add_column(name, justify="right")
    for ratio in ratios:
        worst = f"{ratio.worst_ratio:.2f} {ratio.worst_recording}"
        table.add_row(
            ratio.kind,
            ratio.group,
            f"{ratio.ratio:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
            str(ratio.num_searches),
            worst,
        )
    console.print(table)
    kinds = list(dict.fromkeys(score.kind for score in scores))
    rows = Table(title="Cost multiple, geometric mean over seeds", title_justify="left")
    rows.add_column("recording", no_wrap=True)
    for kind in kinds:
        rows.add_column(kind, justify="right")
    for name in sorted({score.recording for score in scores}):
        own = [score for score in scores if score.recording == name]
        costs = {
            kind: [math.log(score.cost_multiple) for score in own if score.kind == kind]
            for kind in kinds
        }
        rows.add_row(name, *(f"{math.exp(float(np.mean(logs))):.4g}" for logs in costs.values()))
    console.print(rows)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Replay all searches, print and write the results, and return the exit code."""
    try:
        folders = recordings_asked_for(arguments)
    except AutotuneError as error:
        console.print(str(error), markup=False)
        return 2
    started = circumstances()
    searches = searches_over(folders, arguments.kinds, arguments.earlier, arguments.seeds)
    console.print(f"{len(searches)} searches")
    scores = _whole_seeds(
        list(_watched(searches, arguments, console)), len(searches) // max(1, arguments.seeds)
    )
    if not scores:
        console.print(
            "no search: no two recordings have one search space, or the time ended before the first"
            " seed was done"
        )
        return 2
    ratios = ratios_of(scores)
    print_ratios(console, ratios, scores)
    settings = {**vars(arguments), "recordings": [folder.name for folder in folders]}
    ordered = sorted(scores, key=lambda score: (score.recording, score.kind, score.seed))
    path = write_result(
        "warm_start",
        started=started,
        settings=settings,
        result={"ratios": ratios, "searches": ordered},
    )
    console.print(f"written to {path}", soft_wrap=True)
    return 0


def _watched(
    searches: Sequence[Search], arguments: argparse.Namespace, console: Console
) -> Iterator[Score]:
    """Yield scores as searches end, until the time is over; print progress."""
    began = time.monotonic()
    with one_thread_processes(arguments.processes) as pool:
        for number, score in enumerate(pool.imap(run_search, searches), 1):
            yield score
            if number % max(1, len(searches) // 20) == 0:
                console.print(
                    f"{number} of {len(searches)} searches, {time.monotonic() - began:.0f} s"
                )
            if time.monotonic() - began > arguments.search_seconds:
                return


def _whole_seeds(scores: Sequence[Score], num_searches: int) -> list[Score]:
    """The scores of the seeds for which all ``num_searches`` searches were made."""
    numbers = Counter(score.seed for score in scores)
    return [score for score in scores if numbers[score.seed] == num_searches]


def main(command_line: Sequence[str] | None = None) -> int:
    """Read the command line, run, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.warm_start", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--recordings",
        help=f"folder of recordings, one folder each; else the variable {RECORDINGS_VARIABLE}",
    )
    parser.add_argument(
        "--names", type=_names, default=[], help="of recordings, with commas; else all"
    )
    parser.add_argument(
        "--kinds",
        type=_names,
        default=list(KINDS),
        help=f"of earlier studies, with commas; else {', '.join(KINDS)}",
    )
    parser.add_argument("--earlier", type=int, default=5, help="earlier studies of each search")
    parser.add_argument(
        "--seeds", type=int, default=5, help="searches of each kind over each recording"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="to replay with")
    parser.add_argument(
        "--search-seconds",
        type=float,
        default=math.inf,
        help="most seconds to replay for; only whole seeds count",
    )
    return run(parser.parse_args(command_line), Console(width=None if sys.stdout.isatty() else 160))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
