"""A study that repeated configurations, replayed from its own recording, takes the decisions that it took."""

import math
from pathlib import Path

import numpy as np
import pytest

from autotune.measurement import PAUSED, Evaluation, Target, TrialResult
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.recording import read_recording, write_recording
from autotune.replay.simulation import replay
from autotune.search.freeze_thaw import FreezeThawSampler
from autotune.search.policy import PointPlacement, SearchPolicy, Trial
from autotune.search.stopping import CapAtIncumbent, Decision
from autotune.space import SearchSpace, Suggestion
from tests.policies import evaluation, policy_over

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60.0)
OBJECTIVE = AmortisedTime(num_trainings=1)
DOMAINS = {"lr": [0.001, 0.01, 0.1], "width": [8, 16, 32], "epochs": {"type": "int", "low": 4, "high": 8}}
SPACE = SearchSpace.from_mapping(DOMAINS, "space.yaml")
NUM_TRIALS = 60


def policy(place: PointPlacement | None = None) -> SearchPolicy:
    return policy_over(
        SPACE,
        TARGET,
        stopping=CapAtIncumbent(objective=OBJECTIVE, cap_margin=1.0),
        num_trials=NUM_TRIALS,
        pausing=FreezeThawSampler(space=SPACE, target=TARGET, objective=OBJECTIVE, seed=0),
        place=place,
    )


class Worker:
    """Trains by a formula: a trial's own seed says how fast it is, and it is evaluated once more where it meets its cap."""

    def __init__(self) -> None:
        self.evaluations: dict[int, list[Evaluation]] = {}
        self.stretches: list[tuple[int, float, str]] = []

    def train(self, searched: SearchPolicy, trial: Trial) -> None:
        """Until the trial ends or is paused."""
        own = self.evaluations.setdefault(trial.number, [])
        epochs = trial.suggestion.values["epochs"]
        while True:
            at = self._evaluated(trial, len(own) + 1, None)
            if at.train_seconds > trial.cap_seconds:
                at, outcome = self._evaluated(trial, len(own) + 1, trial.cap_seconds), Outcome.CAPPED
            elif TARGET.reached_by(at.metric):
                outcome = Outcome.REACHED
            else:
                outcome = Outcome.MISSED if len(own) + 1 == epochs else None
            own.append(Evaluation(**{**vars(at), "outcome": outcome}))
            if outcome is None:
                decision = searched.observe(trial.number, own[-1])
                if decision is Decision.CONTINUE:
                    continue
                outcome = Outcome.CAPPED if decision is Decision.CAP else None
            self.stretches.append((trial.number, own[-1].train_seconds, str(outcome or PAUSED)))
            if outcome is not None:
                searched.finish(self.result(trial, outcome))
            return

    def result(self, trial: Trial, outcome: Outcome) -> TrialResult:
        return TrialResult(
            trial=trial.number, values=trial.suggestion.values, overrides=(), seed=trial.seed, outcome=outcome,
            evaluations=tuple(self.evaluations[trial.number]), started_at=0.0, stopped_at=1.0, fingerprint={},
            cap_seconds=trial.cap_seconds if math.isfinite(trial.cap_seconds) else None,
        )  # fmt: skip

    def _evaluated(self, trial: Trial, epoch: int, cut: float | None) -> Evaluation:
        values = trial.suggestion.values
        speed = math.exp(0.5 * np.random.default_rng(trial.seed).standard_normal())
        seconds = speed * epoch * values["width"] / 8
        miss = abs(math.log10(values["lr"]) + 2) + 0.1 * abs(values["epochs"] - 6)
        reached = epoch if cut is None else epoch * cut / seconds
        metric = (1.0 - 0.15 * miss) * (1 - math.exp(-1.1 * reached))
        own = seconds if cut is None else cut
        return evaluation(own, step=epoch * 10, epoch=float(epoch), samples=epoch * 100, build_seconds=0.1, metric=metric)


@pytest.fixture
def lived(tmp_path: Path) -> tuple[Worker, SearchPolicy]:
    """A study to its end, and its recording."""
    worker, searched = Worker(), policy()
    while (trial := searched.suggest()) is not None:
        worker.train(searched, trial)
    left = [worker.result(trial, Outcome.STOPPED) for trial in searched._handed_out.values()]
    results = [*searched.results.values(), *left]
    write_recording(tmp_path / "own", results=results, target=TARGET, space=DOMAINS, source="made up")
    return worker, searched


def test_repeats_are_replayed_as_they_were_lived(lived: tuple[Worker, SearchPolicy], tmp_path: Path) -> None:
    worker, searched = lived
    keys = [Suggestion(each.values).key for each in searched.results.values()]
    assert len(keys) - len(set(keys)) >= 3, "the study repeated some configurations"
    trace = replay(read_recording(tmp_path / "own"), policy, within=None)
    assert [(each.trial, each.outcome) for each in trace.stretches] == [(number, outcome) for number, _, outcome in worker.stretches]
    assert [each.train_seconds for each in trace.stretches] == pytest.approx([seconds for _, seconds, _ in worker.stretches])
