"""Is autotune better than twenty lines of Optuna in the same time? ``python -m
benchmarks.plain_optuna``.

Studies in turns: ``python -m autotune experiment=cnn``, from the command to the prompt, start and
confirmation included; then one that runs Optuna's TPE over the same space with the same training
code for as many wall seconds, its own start included. A trial there is capped at the best time so
far and told as pruned, with what it lacked of the target; the best trial is the result.

What each study found is trained again on fresh seeds that both sides share, in turns, and counted
with what a success costs: all seconds that its runs took over the number that reached the target.
The ratio is the geometric mean over pairs of studies, its interval Student's.

Exit code 0: the interval lies above 1 and the ratio is at least ``--claim``; 1: it is not so.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from scipy.special import stdtrit

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.config.space_files import read_search_space
from autotune.confirm.statistics import RunScore, expected_score, in_turns
from autotune.outcome import Outcome
from autotune.training.run import start_training
from benchmarks.measuring import circumstances, write_result

OWN, PLAIN = "autotune", "plain_optuna"
REPOSITORY = Path(__file__).parent.parent
_FIRST_SEED = 10_000
"""Seed of the first run that counts; no study uses it."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The configuration that one study found, and its runs on fresh seeds."""

    side: str
    seed: int
    wall_seconds: float
    """Wall-clock seconds from the command to the prompt."""
    claimed_seconds: float | None
    """Time to target that the study itself reports; None if it found nothing."""
    overrides: tuple[str, ...] | None
    """The configuration found; None if the study found nothing, and the experiment's own
    configuration takes its place."""
    runs: tuple[RunScore, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds that a success costs on fresh seeds; infinite if no run reached the target."""
        expected = expected_score(self.runs)
        return math.inf if expected is None else expected


def search(overrides: Sequence[str], *, seed: int, ends_at: float) -> dict[str, Any]:
    """Search with plain Optuna: TPE in one process, with each trial capped at the best time so
    far and then told as pruned.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    composer = Composer(overrides)
    composed = composer.compose()
    space = read_search_space(composed.config.search_space, composer)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    baseline = space.point_of(composed.lookup)
    if baseline is not None:
        study.enqueue_trial(space.params_of(baseline))
    best, found = math.inf, None

    def objective(trial: optuna.Trial) -> float:
        nonlocal best, found
        suggestion = space.suggest(trial)
        config = composer.compose_suggestion(suggestion, seed=1000 * seed + trial.number).trial
        for evaluation in start_training(config, cap_seconds=best, num_threads=1):
            if evaluation.outcome is Outcome.REACHED:
                if evaluation.warm_seconds < best:
                    best, found = evaluation.warm_seconds, suggestion.as_overrides()
                return evaluation.warm_seconds
            if time.time() > ends_at:
                study.stop()
                break
        trial.report(
            config.target.shortfall(evaluation.metric) if math.isfinite(evaluation.metric) else 1e9,
            1,
        )
        raise optuna.TrialPruned

    study.optimize(objective, timeout=ends_at - time.time(), catch=(Exception,))
    return {
        "seconds": None if found is None else best,
        "overrides": found,
        "num_trials": len(study.trials),
    }


def _setting(arguments: argparse.Namespace) -> list[str]:
    """The overrides that both sides compose."""
    return [f"experiment={arguments.experiment}", "device=cpu", *arguments.overrides]


def run_own(arguments: argparse.Namespace, seed: int) -> Study:
    """Run a whole study of autotune.

    Raises:
        RuntimeError: the study's process failed.
    """
    with tempfile.TemporaryDirectory(
        prefix="autotune-plain-", ignore_cleanup_errors=True
    ) as folder:
        command = [
            sys.executable,
            "-m",
            "autotune",
            *_setting(arguments),
            "study.name=study",
            f"study.folder={folder}",
            f"study.seed={seed}",
            f"tracking.uri=sqlite:///{folder}/mlflow.db",
        ]
        began = time.monotonic()
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        wall_seconds = time.monotonic() - began
        if done.returncode not in (0, 3):
            raise RuntimeError(
                "autotune ended with"
                f" {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        path = Path(folder) / "study" / "best.json"
        best = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return Study(
        side=OWN,
        seed=seed,
        wall_seconds=wall_seconds,
        claimed_seconds=None if best is None else best["best"]["expected_seconds"],
        overrides=None if best is None else tuple(best["overrides"]),
    )


def run_plain(arguments: argparse.Namespace, seed: int, seconds: float) -> Study:
    """Run plain Optuna in a process of its own for ``seconds`` of wall clock.

    Raises:
        RuntimeError: the process failed.
    """
    began = time.time()
    command = [
        sys.executable,
        "-m",
        "benchmarks.plain_optuna",
        f"--experiment={arguments.experiment}",
        f"--search-seed={seed}",
        f"--ends-at={began + seconds}",
        *arguments.overrides,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"plain Optuna ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    overrides = found["overrides"]
    return Study(
        side=PLAIN,
        seed=seed,
        wall_seconds=time.time() - began,
        claimed_seconds=found["seconds"],
        overrides=None if overrides is None else tuple(overrides),
    )


def on_fresh_seeds(studies: Sequence[Study], composer: Composer, num_runs: int) -> list[Study]:
    """Train the configuration that each study found on fresh seeds, one run after the other, the
    studies in turns.
    """
    configs = [composer.compose(study.overrides or ()).trial for study in studies]
    runs: list[list[RunScore]] = [[] for _ in studies]
    for config in configs:  # not counted: they have the work that a process does only once
        _train(config, _FIRST_SEED - 1)
    for place, number in in_turns(len(studies), num_runs):
        runs[place].append(_train(configs[place], _FIRST_SEED + number))
    return [replace(study, runs=tuple(own)) for study, own in zip(studies, runs, strict=True)]


def _train(config: TrialConfig, seed: int) -> RunScore:
    *_, last = start_training(replace(config, seed=seed), num_threads=1)
    return RunScore(last.warm_seconds, last.outcome is Outcome.REACHED)


def ratio(
    studies: Sequence[Study], own: str = OWN, other: str = PLAIN
) -> tuple[float, float, float]:
    """The other side's expected time over the own one's: the geometric mean over pairs of
    studies, with a 95% interval.
    """
    by_side = {
        side: np.log([study.seconds for study in studies if study.side == side])
        for side in (own, other)
    }
    differences = by_side[other] - by_side[own]
    count, mean = len(differences), float(differences.mean())
    reach = (
        float(stdtrit(count - 1, 0.975)) * float(differences.std(ddof=1)) / math.sqrt(count)
        if count > 1
        else math.inf
    )
    return (
        math.exp(mean),
        math.exp(mean - reach),
        math.exp(mean + reach) if reach < math.inf else math.inf,
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plain_optuna", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--experiment", default="cnn")
    parser.add_argument("--studies", type=int, default=10, help="pairs of studies (10)")
    parser.add_argument(
        "--runs", type=int, default=6, help="on fresh seeds, of what a study found (6)"
    )
    parser.add_argument("--claim", type=float, default=1.3, help="the ratio that is claimed (1.3)")
    parser.add_argument("--search-seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ends-at", type=float, help=argparse.SUPPRESS)
    parser.add_argument(
        "overrides",
        nargs="*",
        help="of both sides, such as data.root=DIR; plain Optuna reads none of search",
    )
    arguments = parser.parse_args()
    if arguments.search_seed is not None:
        print(
            json.dumps(
                search(_setting(arguments), seed=arguments.search_seed, ends_at=arguments.ends_at)
            )
        )
        return 0
    started = circumstances()
    studies: list[Study] = []
    composer = Composer(_setting(arguments))
    for seed in range(1, arguments.studies + 1):
        own = run_own(arguments, seed)
        pair = on_fresh_seeds(
            [own, run_plain(arguments, seed, own.wall_seconds)], composer, arguments.runs
        )
        studies += pair
        for study in pair:
            told = "nothing" if study.claimed_seconds is None else f"{study.claimed_seconds:.3g} s"
            print(
                f"seed {seed}: {study.side}: {study.seconds:.3g} s on fresh seeds, told {told},"
                f" {study.wall_seconds:.0f} s of wall clock",
                flush=True,
            )
        mean, low, high = ratio(studies)
        result = {"ratio": mean, "low": low, "high": high, "num_pairs": seed, "studies": studies}
        path = write_result(
            f"plain_optuna_{arguments.experiment}",
            started=started,
            settings=vars(arguments),
            result=result,
        )
    print(
        f"plain Optuna / autotune: {mean:.3g} [{low:.3g}, {high:.3g}] (n={arguments.studies} pairs"
        f" of studies)\nwrote {path}"
    )
    return 0 if low > 1 and mean >= arguments.claim else 1


if __name__ == "__main__":
    sys.exit(main())
