"""A search as Ray Tune's own documentation writes it: Tuner, OptunaSearch, a function trainable,
MLflowLoggerCallback.

The other side of ``benchmarks.overhead``, which runs it in a process of its own and reads the one
JSON line it prints last. Only what the comparison needs is set: the number of trials, how many run
at once, the CPUs of one, where files go.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.air.integrations.mlflow import MLflowLoggerCallback
from ray.tune.search.optuna import OptunaSearch

from autotune.workloads.images import digits
from benchmarks.plain_training import Settings, train_plain


def trainable(config: Mapping[str, Any]) -> None:
    """Run one trial: load the data, train, report each evaluation.

    ``training_seconds`` are the seconds of this function without its calls of ``tune.report``.
    """
    began, reporting_seconds = time.perf_counter(), 0.0

    def report(metric: float, loss: float) -> None:
        nonlocal reporting_seconds
        now = time.perf_counter()
        tune.report(
            {"accuracy": metric, "loss": loss, "training_seconds": now - began - reporting_seconds}
        )
        reporting_seconds += time.perf_counter() - now

    splits = digits()
    num_train = len(splits["train"][0])
    train_plain(
        Settings(**config, widths=(16, 32), evaluate_every_samples=num_train), splits, report
    )


class StampedSearch(OptunaSearch):  # type: ignore[misc]  # ray has no types
    """OptunaSearch that records when it was first asked for a point."""

    first_asked_at: float | None = None

    def suggest(self, trial_id: str) -> Any:
        """The point that OptunaSearch suggests."""
        if self.first_asked_at is None:
            self.first_asked_at = time.time()
        return super().suggest(trial_id)


class Ends(tune.Callback):  # type: ignore[misc]  # ray has no types
    """Callback that records when each trial ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record the time at which a trial ended."""
        self.times.append(time.time())


def main() -> None:
    """Run one search and print its times as a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stock_tune", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the results and the MLflow file go"
    )
    parser.add_argument(
        "--reuse-actors",
        action="store_true",
        help="with Tune's own reuse of actors, which is off unless asked for",
    )
    arguments = parser.parse_args()

    ray.init(address="local", num_cpus=arguments.concurrency)
    search, ends = StampedSearch(seed=arguments.seed), Ends()
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={
            "lr": tune.loguniform(1e-3, 0.3),
            "momentum": tune.uniform(0.8, 0.98),
            "weight_decay": tune.loguniform(1e-5, 1e-2),
            "lr_schedule": tune.choice(["constant", "cosine"]),
            "norm": tune.choice(["none", "batch"]),
            "batch_size": arguments.batch_size,
            "epochs": arguments.epochs,
            "seed": arguments.seed,
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            search_alg=search,
            num_samples=arguments.trials,
            max_concurrent_trials=arguments.concurrency,
            reuse_actors=arguments.reuse_actors,
        ),
        run_config=tune.RunConfig(
            name="stock",
            storage_path=str(arguments.folder),
            callbacks=[
                MLflowLoggerCallback(
                    tracking_uri=f"sqlite:///{arguments.folder}/mlflow.db", experiment_name="stock"
                ),
                ends,
            ],
        ),
    )
    results = tuner.fit()
    training_seconds = [result.metrics["training_seconds"] for result in results]
    if results.errors:
        raise SystemExit(f"{len(results.errors)} trials failed; the first: {results.errors[0]}")
    print(
        json.dumps(
            {
                "first_asked_at": search.first_asked_at,
                "ended_at": ends.times,
                "training_seconds": training_seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
