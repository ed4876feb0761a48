"""Does further search bring what ``search.expected_trainings`` expects? ``python -m
benchmarks.outlook --recordings DIR``.

Searches of 160 trials are replayed over recorded learning curves. After 20, 30, 40, 60, 80 and 110
trials, what 20 and 40 more are expected to bring (``autotune.search.outlook``) is compared with
what they brought. The two constants are fitted to each half of the recordings by quasi-likelihood
of Poisson's form, whose mean is unbiased whatever the distribution of gains; the package's were
chosen on the first half.

Then a search that ends when it is not worth more is compared with searches of 20, 40, 80 and 160
trials: what the search spent and what a number of trainings of what it found take, relative to the
best of these numbers of trials in hindsight.

Exit code 0: it ran; 2: no recordings.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from autotune.config.compose import Composer
from autotune.recording import read_recording
from autotune.search.outlook import FACTOR, FADE, NUM_AHEAD, expected_gain
from autotune.search.samplers import quiet_optuna
from benchmarks.measuring import circumstances, write_result
from benchmarks.replay.replayed_policy import replayed_policy
from benchmarks.replay.simulation import replay
from benchmarks.search import RECORDINGS_VARIABLE, one_thread_processes

SEARCHES = ("freeze_thaw", "tpe")
NUM_TRIALS = 160
JUDGED_AFTER = (20, 30, 40, 60, 80, 110)
FIXED = (20, 40, 80, 160)
TRAININGS = (10, 100, 1000)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Search:
    """One replayed search: what each trial spent, in the order of proposals from 1, and when
    which of them reached the target.
    """

    recording: str
    search: str
    seed: int
    spent: tuple[float, ...]
    reached: tuple[tuple[int, int, float], ...]
    """Of each trial that reached the target: its place, the number of trials proposed by then,
    and its seconds to target."""

    def best(self, num_trials: int) -> tuple[float, int, int] | None:
        """Best score after so many trials, its place and that of the first trial that had
        reached the target.
        """
        known = [(score, place) for place, when, score in self.reached if when <= num_trials]
        return None if not known else (*min(known), min(place for _, place in known))


def run_search(task: tuple[str, str, int]) -> Search:
    """Replay one search: folder of the recording, name of the search, and seed."""
    quiet_optuna()
    folder, search, seed = task
    recording = read_recording(Path(folder))
    composed = Composer(
        [f"search={search}", "stopping=cap", f"search.num_trials={NUM_TRIALS}"]
    ).compose()
    trace = replay(
        recording,
        lambda place: replayed_policy(recording, composed, seed=seed, place=place),
        within=None,
    )
    spent: dict[int, float] = {}
    reached: list[tuple[int, int, float]] = []
    began = sorted(
        {stretch.trial: stretch.started_seconds for stretch in reversed(trace.stretches)}.items(),
        key=lambda item: item[1],
    )
    places = {trial: place for place, (trial, _) in enumerate(began, 1)}
    for stretch in trace.stretches:
        spent[places[stretch.trial]] = stretch.train_seconds
        if stretch.outcome == "REACHED":
            when = sum(start <= stretch.stopped_seconds for _, start in began)
            reached.append((places[stretch.trial], when, stretch.train_seconds))
    return Search(
        Path(folder).name,
        search,
        seed,
        tuple(spent[place] for place in sorted(spent)),
        tuple(reached),
    )


def cases(searches: Sequence[Search]) -> Iterator[tuple[float, float, float]]:
    """``1 + log2(n / first)``, ``log2(1 + m / n)`` and the logarithm of the gain, wherever a
    search is judged.
    """
    for search in searches:
        for now in JUDGED_AFTER:
            known = search.best(now)
            for ahead in (NUM_AHEAD, 2 * NUM_AHEAD):
                later = search.best(now + ahead)
                if known is not None and later is not None and now + ahead <= len(search.spent):
                    yield (
                        1 + math.log2(now / known[2]),
                        math.log2(1 + ahead / now),
                        math.log(known[0] / later[0]),
                    )


def fitted(searches: Sequence[Search]) -> tuple[float, float]:
    """The factor and the fade that fit the searches."""
    doublings, ahead, gains = (np.array(column) for column in zip(*cases(searches), strict=True))

    def loss(point: Floats) -> float:
        logarithm = point[0] + point[1] * np.log(doublings) + np.log(ahead)
        return float(np.mean(np.exp(logarithm) - gains * logarithm))

    factor, fade = minimize(loss, np.array([-1.0, -1.0]), method="Nelder-Mead").x
    return math.exp(factor), float(fade)


def calibration(searches: Sequence[Search]) -> list[tuple[float, float, int]]:
    """Expected and true gain, as means of logarithms, in each quarter of the cases by what is
    expected, and their number.
    """
    doublings, ahead, gains = (np.array(column) for column in zip(*cases(searches), strict=True))
    expected = FACTOR * doublings**FADE * ahead
    quarters = np.array_split(np.argsort(expected, kind="stable"), 4)
    return [
        (float(expected[rows].mean()), float(gains[rows].mean()), len(rows)) for rows in quarters
    ]


def totals(search: Search, trainings: int) -> tuple[float, dict[int, float]] | None:
    """What search and trainings take together, if it ends when not worth more, and at fixed
    numbers of trials; None if none is found.
    """

    def total(num_trials: int) -> float:
        known = search.best(num_trials)
        return (
            math.inf
            if known is None
            else math.fsum(search.spent[:num_trials]) + trainings * known[0]
        )

    now = NUM_AHEAD
    while now < len(search.spent):
        known = search.best(now)
        if known is not None:
            gain = expected_gain(now, first=known[2], num_trials=NUM_AHEAD)
            if (
                trainings * known[0] * -math.expm1(-gain)
                < math.fsum(search.spent[:now]) / now * NUM_AHEAD
            ):
                break
        now += 1
    fixed = {number: total(number) for number in FIXED}
    return (
        (total(now), fixed)
        if math.isfinite(total(now)) and math.isfinite(min(fixed.values()))
        else None
    )


def main(command_line: Sequence[str] | None = None) -> int:
    """Replay, fit, and print how well the expectation holds on each half of the recordings."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.outlook",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--recordings",
        default=os.environ.get(RECORDINGS_VARIABLE),
        help="folder of recordings, one folder each",
    )
    parser.add_argument(
        "--seeds", type=int, default=2, help="searches of each kind over each recording"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(command_line)
    folders = sorted(path.parent for path in Path(options.recordings or ".").glob("*/study.yaml"))
    if not folders:
        print(f"--recordings: found no recording in {options.recordings}", file=sys.stderr)
        return 2
    started = circumstances()
    tasks = [
        (str(folder), search, seed)
        for seed in range(options.seeds)
        for folder in folders
        for search in SEARCHES
    ]
    searches = []
    with one_thread_processes(options.processes) as pool:
        for done, search in enumerate(pool.imap_unordered(run_search, tasks), 1):
            searches.append(search)
            print(f"\r{done} of {len(tasks)} searches", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    names = [folder.name for folder in folders]
    result: dict[str, object] = {"factor": FACTOR, "fade": FADE}
    for half in (0, 1):
        own = [search for search in searches if names.index(search.recording) % 2 == half]
        factor, fade = fitted(own)
        print(
            f"{'first' if half == 0 else 'second'} half of the recordings ({len(own)} searches):"
            f" fitted {factor:.2f}, {fade:.2f}"
        )
        found: dict[str, object] = {"fitted": [factor, fade]}
        for kind in SEARCHES:
            of_kind = [search for search in own if search.search == kind]
            found[kind] = calibration(of_kind)
            text = ", ".join(
                f"{math.expm1(told):.0%} / {math.expm1(true):.0%}"
                for told, true, _ in calibration(of_kind)
            )
            print(f"  {kind}: expected / true gain of more trials, by quarter: {text}")
            for trainings in TRAININGS:
                pairs = [
                    pair for search in of_kind if (pair := totals(search, trainings)) is not None
                ]
                ratios = {
                    "expected_trainings": [total / min(fixed.values()) for total, fixed in pairs]
                }
                for number in FIXED:
                    ratios[str(number)] = [
                        fixed[number] / min(fixed.values())
                        for _, fixed in pairs
                        if math.isfinite(fixed[number])
                    ]
                means = {
                    name: math.exp(fmean(map(math.log, values))) for name, values in ratios.items()
                }
                found[f"{kind} {trainings}"] = means
                text = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
                print(f"    {trainings:>5} trainings: {text}, n = {len(pairs)}")
        result["first" if half == 0 else "second"] = found
    result["searches"] = [json.loads(json.dumps(vars(search))) for search in searches]
    print(
        f"wrote {write_result('outlook', started=started, settings=vars(options), result=result)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
