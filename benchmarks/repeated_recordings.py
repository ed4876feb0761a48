"""Recordings in which every configuration was trained several times, and whole studies over them:
search and confirmation together.

``python -m benchmarks.repeated_recordings --record cnn --output DIR`` trains points of an
experiment's space, drawn by chance, and its baseline on several seeds, one training at a time in
one process, and writes them as a recording. What was trained is kept as it comes, and the same
command goes on where it was ended. ``--studies DIR`` replays whole studies with default settings
over the recordings of a folder: the search meets one draw of a configuration after the other, and
each confirmation run is a draw of it, too.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.config.compose import Composer
from autotune.config.space_files import read_search_space
from autotune.confirm.confirmation import plan_race
from autotune.confirm.race import RaceLimits
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.recording import Recording, read_recording, write_recording
from autotune.search.points import RandomTrial
from autotune.search.scheduler import Scheduler
from autotune.space import SearchSpace, Suggestion
from autotune.training.run import start_training
from benchmarks.measuring import circumstances, write_result
from benchmarks.noise import OBJECTIVE, Repeats, Training, by_former_rule, expected_seconds, raced
from benchmarks.replay.replayed_policy import replayed_policy
from benchmarks.replay.simulation import replay

RECORDINGS = Path(__file__).parent / "recordings"
_FIRST_SEED = 1000
"""First of the seeds of the trainings that are recorded."""


def record(
    experiment: str, folder: Path, *, num_configurations: int, num_seeds: int, minutes: float
) -> None:
    """Train every configuration on every seed, seed by seed, until all are trained or the
    minutes are over, and write a recording.
    """
    composer = Composer([f"experiment={experiment}", "device=cpu"])
    composed = composer.compose()
    space = read_search_space(composed.config.search_space, composer)
    points = _points(space, space.point_of(composed.lookup), num_configurations)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "trainings.jsonl"
    known = (
        [
            TrialResult.from_dict(json.loads(line))
            for line in log.read_text(encoding="utf-8").splitlines()
        ]
        if log.is_file()
        else []
    )
    results = {result.trial: result for result in known}
    ends_at = time.monotonic() + 60 * minutes
    with log.open("a", encoding="utf-8") as file:
        for trial, (seed, point) in enumerate(
            (seed, point) for seed in range(num_seeds) for point in points
        ):
            if trial not in results and time.monotonic() < ends_at:
                results[trial] = _trained(composer, trial, point, _FIRST_SEED + seed)
                file.write(json.dumps(results[trial].as_dict()) + "\n")
                file.flush()
            if trial % len(points) == len(points) - 1:
                print(
                    f"{experiment}: {len(results)} of {num_seeds * len(points)} trainings",
                    flush=True,
                )
    # leaves out a seed that not every configuration has
    whole = len(results) // len(points) * len(points)
    write_recording(
        folder,
        results=[result for trial, result in results.items() if trial < whole],
        target=composed.trial.target,
        space=space.as_mapping(),
        source=(
            f"benchmarks.repeated_recordings, experiment={experiment}: {len(points)} configurations"
            f" on {whole // len(points)} seeds"
        ),
        baseline=0,
    )


def _points(space: SearchSpace, baseline: Suggestion | None, count: int) -> list[Suggestion]:
    if baseline is None:
        raise SystemExit(
            "the experiment's baseline lies outside its search space; use one that lies within"
        )
    by_chance = RandomTrial(np.random.default_rng(0))
    return [baseline, *(space.suggest(by_chance) for _ in range(count - 1))]


def _trained(composer: Composer, trial: int, point: Suggestion, seed: int) -> TrialResult:
    started_at = time.time()
    evaluations: list[Evaluation] = list(
        start_training(composer.compose_suggestion(point, seed=seed).trial, num_threads=1)
    )
    return TrialResult(
        trial=trial,
        values=point.values,
        overrides=tuple(point.as_overrides()),
        seed=seed,
        outcome=(evaluations[-1].outcome if evaluations else None) or Outcome.MISSED,
        evaluations=tuple(evaluations),
        started_at=started_at,
        stopped_at=time.time(),
        fingerprint={},
    )


class Study:
    """Replays of whole studies over one recording."""

    def __init__(self, folder: Path, experiment: str) -> None:
        self.name = folder.name
        self.recording: Recording = read_recording(folder)
        self.composed = Composer([f"experiment={experiment}", "device=cpu"]).compose()
        self._numbers: dict[tuple[str, ...], int] = {}
        """Number of each configuration, by its overrides."""
        trainings: dict[int, list[Training]] = {}
        for trial in self.recording.trials:
            seconds = trial.time_to_target(self.recording.target)
            spent = trial.train_seconds[-1] if trial.train_seconds else 0.0
            own = trainings.setdefault(self._number(trial.suggestion), [])
            own.append(Training(spent if seconds is None else seconds, seconds is not None))
        self.repeats: Repeats = trainings
        self.truth = {number: expected_seconds(own) for number, own in trainings.items()}
        self.best_seconds = min(self.truth.values())

    def exported(self, seed: int) -> tuple[int, int]:
        """Numbers of the configurations that a study exports: by the race, and by the former
        rule that the race replaced.
        """
        rng = np.random.default_rng(seed)
        # each study meets the draws of a configuration in an order of its own
        order = rng.permutation(len(self.recording.trials))
        recording = replace(
            self.recording, trials=tuple(self.recording.trials[place] for place in order)
        )
        made: list[Scheduler] = []

        def make_policy(place: Any) -> Scheduler:
            made.append(replayed_policy(recording, self.composed, seed=seed, place=place))
            return made[-1]

        trace = replay(recording, make_policy, within=None, seed=seed)
        (policy,) = made
        numbers = {
            trial: self._number(Suggestion(result.values))
            for trial, result in policy.results.items()
        }

        def draw(number: int) -> Training:
            return self.repeats[number][int(rng.integers(len(self.repeats[number])))]

        confirm = self.composed.config.confirm
        limits = RaceLimits(
            max_runs=confirm.max_runs,
            max_seconds=(confirm.budget_fraction or math.inf) * trace.train_seconds,
        )
        baseline = self._number(self.recording.trials[0].suggestion)
        race = plan_race(
            baseline_trial=next(trial for trial, number in numbers.items() if number == baseline),
            baseline=self.recording.trials[0].suggestion,
            results=policy.results,
            expected_scores=policy.expected_scores,
            objective=OBJECTIVE,
            num_candidates=confirm.num_candidates,
        )
        best = raced(race, limits, lambda trial: draw(numbers[trial])).best
        assert best is not None, "the baseline reaches the target"
        drawn: dict[int, Training] = {}
        for trial, score in policy.scores.items():
            drawn[numbers[trial]] = min(
                Training(score, reached=True),
                drawn.get(numbers[trial], Training(math.inf, reached=True)),
            )
        former = by_former_rule({baseline: draw(baseline), **drawn}, baseline, draw, 2, 8)
        return numbers[best.trial], former.exported

    def _number(self, suggestion: Suggestion) -> int:
        return self._numbers.setdefault(tuple(suggestion.as_overrides()), len(self._numbers))


def studies(folders: Sequence[Path], num_seeds: int) -> Iterator[dict[str, Any]]:
    """Replay whole studies over each recording, whose folder has the experiment's name, and
    yield the regrets.
    """
    for folder in folders:
        study = Study(folder, folder.name)
        regrets: dict[str, list[float]] = {"race": [], "former rule": []}
        for seed in range(num_seeds):
            for name, number in zip(regrets, study.exported(seed), strict=True):
                regrets[name].append(math.log(study.truth[number] / study.best_seconds))
        told = {name: math.exp(statistics.fmean(own)) for name, own in regrets.items()}
        high, worst = (
            math.exp(float(np.quantile(regrets["race"], share))) for share in (0.95, 1.0)
        )
        means = ", ".join(f"{name} {regret:.3f}" for name, regret in told.items())
        print(
            f"{folder.name}: {means}; race: 95th percentile {high:.2f}, worst {worst:.2f}"
            f" (n={num_seeds})",
            flush=True,
        )
        yield {
            "name": folder.name,
            "studies": num_seeds,
            "configurations": len(study.truth),
            "regret": told,
            "logarithms": regrets,
        }


def main() -> int:
    """Record, or replay whole studies over recordings.

    Return exit code 1 if the regret of their exports is too high.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.repeated_recordings", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--record", metavar="EXPERIMENT", help="train the configurations of an experiment's space"
    )
    parser.add_argument(
        "--configurations", type=int, default=200, help="points, the baseline among them (200)"
    )
    parser.add_argument("--seeds", type=int, default=8, help="trainings of each configuration (8)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end recording then")
    parser.add_argument(
        "--output", type=Path, help="folder of the recording; its name is the experiment's"
    )
    parser.add_argument(
        "--studies",
        type=Path,
        metavar="DIR",
        help="run whole studies over the recordings of this folder",
    )
    parser.add_argument(
        "--study-seeds", type=int, default=20, help="studies over each recording (20)"
    )
    arguments = parser.parse_args()
    if arguments.record is not None:
        output = arguments.output or RECORDINGS / arguments.record
        record(
            arguments.record,
            output,
            num_configurations=arguments.configurations,
            num_seeds=arguments.seeds,
            minutes=arguments.minutes,
        )
        return 0
    if arguments.studies is None:
        parser.error("nothing to do; use --record EXPERIMENT or --studies DIR")
    started = circumstances()
    folders = sorted(path.parent for path in arguments.studies.glob("*/study.yaml"))
    if not folders:
        parser.error(
            f"--studies {arguments.studies}: holds no recording; use a folder of them, such"
            " as benchmarks/recordings"
        )
    found = list(studies(folders, arguments.study_seeds))
    regret = math.exp(
        statistics.fmean(logarithm for study in found for logarithm in study["logarithms"]["race"])
    )
    print(f"all: {regret:.3f}")
    print(
        write_result(
            "whole_studies",
            started=started,
            settings={"studies": arguments.study_seeds},
            result={"regret": regret, "recordings": found},
        )
    )
    return 0 if regret <= 1.15 else 1


if __name__ == "__main__":
    sys.exit(main())
