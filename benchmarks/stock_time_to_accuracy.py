"""A search for time to accuracy as Ray Tune's users write it: Tuner, OptunaSearch and ASHA, over an
experiment of autotune's.

The other side of ``benchmarks.live_search``, which runs it in a process of its own and reads the
one JSON line it prints last. Training, search space and first point are autotune's own, worker
processes are reused; what is stock is who decides. OptunaSearch minimises the training seconds at
which a trial ended, ASHA stops trials by their accuracy, and of those that reached the target the
one with the least training seconds is the result.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from autotune.config.compose import Composer
from autotune.config.space_files import read_search_space
from autotune.outcome import Outcome
from autotune.space import SearchSpace


class Training(tune.Trainable):  # type: ignore[misc]  # ray has no types
    """One trial: a step is one evaluation."""

    def setup(self, config: Mapping[str, Any]) -> None:
        """Begin the training of a process's first trial."""
        from autotune.training.run import start_training  # in the worker: imports torch

        self._training = start_training(config["config"], num_threads=1)

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Begin the training of the next trial in the same process."""
        self._training.close()
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train to the next evaluation."""
        evaluation = next(self._training)
        return {
            "accuracy": evaluation.metric,
            "train_seconds": evaluation.warm_seconds,
            "reached": evaluation.outcome is Outcome.REACHED,
            "done": evaluation.outcome is not None,
        }


class Budget(tune.Callback, tune.Stopper):  # type: ignore[misc]  # ray has no types
    """Ends the search ``seconds`` after its first trial started, as autotune's own time budget
    does.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at: float | None = None

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Start the clock with the first trial."""
        self._ends_at = self._ends_at or time.monotonic() + self._seconds

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Whether a trial is to end: when the whole search is."""
        return self.stop_all()

    def stop_all(self) -> bool:
        """Whether the search is to end: when its time is over."""
        return self._ends_at is not None and time.monotonic() >= self._ends_at


class Space:
    """An experiment's search space as OptunaSearch takes it: a function of Optuna's trial, which
    Ray wants to pickle.
    """

    def __init__(self, composer: Composer, space: SearchSpace, seed: int) -> None:
        self._composer, self._space, self._seed = composer, space, seed

    def __call__(self, trial: optuna.Trial) -> dict[str, Any]:
        """The configuration of a trial."""
        suggestion = self._space.suggest(trial)
        return {
            "config": self._composer.compose_suggestion(suggestion, seed=self._seed).trial,
            "overrides": suggestion.as_overrides(),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray writes its experiment state with it, and nothing reads that

    @property
    def first(self) -> list[dict[str, Any]] | None:
        """The experiment's own configuration, as the first point to evaluate.

        None if it lies outside the space.
        """
        baseline = self._space.point_of(self._composer.compose().lookup)
        return None if baseline is None else [self._space.params_of(baseline)]


def search(
    space: Space, *, seed: int, seconds: float, num_at_once: int, folder: Path
) -> dict[str, Any]:
    """Run one search; return its numbers of trials, and seconds and overrides of its best trial."""
    budget = Budget(seconds)
    results = tune.Tuner(
        tune.with_resources(Training, {"cpu": 1}),
        tune_config=tune.TuneConfig(
            search_alg=OptunaSearch(
                space=space,
                metric="train_seconds",
                mode="min",
                seed=seed,
                points_to_evaluate=space.first,
            ),
            scheduler=ASHAScheduler(metric="accuracy", mode="max"),
            num_samples=-1,
            max_concurrent_trials=num_at_once,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="stock", storage_path=str(folder), callbacks=[budget], stop=budget, verbose=0
        ),
    ).fit()
    ended = [
        result.metrics for result in results if result.metrics and "train_seconds" in result.metrics
    ]
    reached = [metrics for metrics in ended if metrics["reached"]]
    best = min(reached, key=lambda metrics: metrics["train_seconds"], default=None)
    return {
        "num_trials": len(ended),
        "num_reached": len(reached),
        "seconds": None if best is None else best["train_seconds"],
        "overrides": None if best is None else best["config"]["overrides"],
    }


def main() -> None:
    """Run one search and print its result as a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stock_time_to_accuracy", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where Ray's files go")
    arguments = parser.parse_args()
    composer = Composer([f"experiment={arguments.experiment}", "device=cpu"])
    space = read_search_space(composer.compose().config.search_space, composer)
    ray.init(address="local", num_cpus=arguments.concurrency, include_dashboard=False)
    made = Space(composer, space, arguments.seed)
    found = search(
        made,
        seed=arguments.seed,
        seconds=arguments.seconds,
        num_at_once=arguments.concurrency,
        folder=arguments.folder,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
