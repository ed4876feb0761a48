"""Are the importances of a study in the right order? ``python -m benchmarks.importances``.

Studies over synthetic trainings whose steps to target and seconds a step are formulas, so that each
parameter's share of their variance is known. A study's searched trials, most of which the search
stopped or paused, are what importances are computed from. Seconds are the formulas' own, so a study
takes none.

Exit code 0: in at least nine of ten studies the parameter that decides most is among the first two,
in both parts; 1: not so.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.config.compose import Composer
from autotune.measurement import Evaluation, Target
from autotune.policy import Start
from autotune.recording import RecordedTrial, Recording
from autotune.search.importances import time_importances
from autotune.search.points import RandomTrial
from autotune.search.scheduler import PointPlacement, Scheduler
from autotune.space import SearchSpace, Suggestion
from benchmarks.measuring import circumstances, write_result
from benchmarks.replay.replayed_policy import replayed_policy
from benchmarks.replay.simulation import replay

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=400.0)
SPACE = SearchSpace.from_mapping(
    {
        "optimizer": {
            "type": "choice",
            "choices": {
                "sgd": {"optimizer.momentum": {"type": "float", "low": 0.0, "high": 0.99}},
                "adamw": {},
            },
        },
        "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
        "batch_size": {"type": "power_of_two", "low": 16, "high": 1024},
        "precision": ["float32", "bfloat16"],
        "workers": {"type": "int", "low": 0, "high": 8},
        "dropout": {"type": "float", "low": 0.0, "high": 0.5},
    },
    "benchmarks/importances.py",
)
SEARCHES = ("freeze_thaw", "tpe", "random")
_NUM_POINTS = 2000
"""Number of trainings that the points of a study are placed at."""


def log_steps(values: Mapping[str, Any]) -> float:
    """Logarithm of the steps to target: the rate decides most, then the batch size, then the
    optimizer; other parameters do nothing.
    """
    rate = 0.9 * (math.log10(values["lr"]) + 1.5) ** 2
    return (
        math.log(100)
        + rate
        - 0.3 * math.log2(values["batch_size"] / 128)
        + (0.7 if values["optimizer"] == "sgd" else 0.0)
    )


def log_rate(values: Mapping[str, Any]) -> float:
    """Logarithm of the seconds a step: the batch size decides most, then the precision, then the
    workers; other parameters do nothing.
    """
    workers = -0.06 * values["workers"]
    return (
        math.log(0.02)
        + 0.4 * math.log2(values["batch_size"] / 128)
        + (0.8 if values["precision"] == "float32" else 0.0)
        + workers
    )


PARTS = {"steps to target": log_steps, "seconds a step": log_rate}


def true_shares(part: str, num_points: int = 20_000) -> dict[str, float]:
    """Each parameter's share of a part's variance, by Monte Carlo over the space.

    The parts are sums, so this is exact in the limit.
    """
    rng = np.random.default_rng(0)
    drawn = [SPACE.suggest(RandomTrial(rng)).values for _ in range(num_points)]
    shares = {}
    for key in ("optimizer", "lr", "batch_size", "precision", "workers", "dropout"):
        changed = [
            PARTS[part]({**point, key: other[key]}) - PARTS[part](point)
            for point, other in itertools.pairwise(drawn)
        ]
        shares[key] = float(np.mean(np.square(changed))) / 2
    total = sum(shares.values())
    return {key: share / total for key, share in sorted(shares.items(), key=lambda item: -item[1])}


def training(
    number: int, values: Mapping[str, Any], rng: np.random.Generator, noise: float
) -> RecordedTrial:
    """A training that reaches the target after about ``exp(log_steps)`` steps.

    ``noise`` is the deviation of that from run to run.
    """
    needed, seconds = (
        math.exp(log_steps(values) + rng.normal(0, noise)),
        math.exp(log_rate(values) + rng.normal(0, noise / 5)),
    )
    steps = np.arange(10.0, 2001.0, 10.0)
    metrics = (
        1
        - 0.9 * np.exp(-math.log(9) * (steps / needed) ** 0.6)
        + rng.normal(0, 0.01 * noise / 0.1, len(steps))
    )
    return RecordedTrial(
        number=number,
        suggestion=Suggestion(values),
        steps=tuple(steps.tolist()),
        train_seconds=tuple((steps * seconds).tolist()),
        metrics=tuple(metrics.tolist()),
    )


class _Watched:
    """A policy that remembers which trials it handed out and what it heard of them."""

    def __init__(self, policy: Scheduler) -> None:
        self._policy = policy
        self.points: dict[int, Suggestion] = {}
        self.curves: dict[int, list[Evaluation]] = {}

    def suggest(self) -> Any:
        answer = self._policy.suggest()
        if isinstance(answer, Start):
            self.points[answer.trial.number] = answer.trial.suggestion
        return answer

    def observe(self, number: int, evaluation: Evaluation) -> Any:
        self.curves.setdefault(number, []).append(evaluation)
        return self._policy.observe(number, evaluation)

    def finish(self, result: Any) -> None:
        self.curves[result.trial] = list(result.evaluations)
        self._policy.finish(result)


def study(search: str, seed: int, num_trials: int, noise: float) -> Recording:
    """The trials of one study, those among them that the search stopped or left paused."""
    rng = np.random.default_rng(seed)
    drawn = [SPACE.suggest(RandomTrial(rng)).values for _ in range(_NUM_POINTS)]
    trainings = Recording(
        target=TARGET,
        space=SPACE,
        trials=tuple(training(*point, rng, noise) for point in enumerate(drawn)),
    )
    composed = Composer(
        [f"search={search}", "stopping=cap", f"search.num_trials={num_trials}"]
    ).compose()
    watched: list[_Watched] = []

    def make(place: PointPlacement) -> Any:
        watched.append(_Watched(replayed_policy(trainings, composed, seed=seed, place=place)))
        return watched[-1]

    replay(trainings, make, within=None)
    trials = [
        RecordedTrial(
            number=number,
            suggestion=watched[0].points[number],
            steps=tuple(float(evaluation.step) for evaluation in curve),
            train_seconds=tuple(evaluation.warm_seconds for evaluation in curve),
            metrics=tuple(evaluation.metric for evaluation in curve),
        )
        for number, curve in watched[0].curves.items()
    ]
    return Recording(target=TARGET, space=SPACE, trials=tuple(trials))


def rank_of_first(shares: Mapping[str, float], true: Mapping[str, float]) -> int:
    """Place, from 1, that a study gives to the parameter that decides most."""
    found = sorted(shares, key=lambda name: -shares[name])
    return found.index(max(true, key=lambda name: true[name])) + 1


def main() -> int:
    """Run the benchmark; return exit code 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.importances", description=__doc__)
    parser.add_argument("--studies", type=int, default=10, help="studies of each search (10)")
    parser.add_argument("--trials", type=int, default=60, help="trials of each study (60)")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.1,
        help="deviation of the logarithm of steps from run to run (0.1)",
    )
    arguments = parser.parse_args()
    started, rows = circumstances(), []
    true = {part: true_shares(part) for part in PARTS}
    for part, shares in true.items():
        print(
            f"true shares, {part}: "
            + ", ".join(f"{key} {share:.3f}" for key, share in shares.items())
        )
    for search, seed in itertools.product(SEARCHES, range(arguments.studies)):
        recording = study(search, seed, arguments.trials, arguments.noise)
        importances = time_importances(recording)
        assert importances is not None
        _, steps, seconds = importances.shares.columns
        shares = {
            part: importances.shares[quantity].to_dict()
            for part, quantity in zip(PARTS, (steps, seconds), strict=True)
        }
        num_reached = sum(trial.index_of_target(TARGET) is not None for trial in recording.trials)
        ranks = {part: rank_of_first(shares[part], true[part]) for part in PARTS}
        rows.append(
            {
                "search": search,
                "seed": seed,
                "trials": len(recording.trials),
                "reached": num_reached,
                "ranks": ranks,
                "shares": shares,
            }
        )
        print(
            f"{search} {seed}: {num_reached} of {len(recording.trials)} trials reached the target,"
            f" place of the parameter that decides most: {ranks}",
            flush=True,
        )
    studies_with_rank = {
        rank: {
            search: sum(
                max(row["ranks"].values()) <= rank for row in rows if row["search"] == search
            )
            for search in SEARCHES
        }
        for rank in (1, 2)
    }
    print(f"studies whose places are at most 1 and 2 in both parts: {studies_with_rank}")
    settings = {"studies": arguments.studies, "trials": arguments.trials, "noise": arguments.noise}
    print(
        write_result(
            "importances",
            started=started,
            settings=settings,
            result={"studies_with_rank": studies_with_rank, "true": true, "studies": rows},
        )
    )
    counts = studies_with_rank[2].values()
    return 0 if all(count >= 0.9 * arguments.studies for count in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
