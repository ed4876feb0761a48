"""A study, replayed from its own recording, takes the decisions that it took, whether it repeated configurations or could have."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.measurement import PAUSED, Evaluation, Target, TrialResult
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.recording import read_recording, write_recording
from autotune.search.freeze_thaw import FreezeThawSampler
from autotune.search.policy import PointPlacement, SearchPolicy, Trial
from autotune.search.stopping import CapAtIncumbent, Decision
from autotune.space import SearchSpace, Suggestion
from benchmarks.replay.simulation import replay
from tests.policies import evaluation, policy_over

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60.0)
OBJECTIVE = AmortisedTime(num_trainings=1)
OTHERS = {"width": [8, 16, 32], "epochs": {"type": "int", "low": 4, "high": 8}}
FEW_POINTS = {"lr": [0.001, 0.01, 0.1], **OTHERS}
MANY_POINTS = {"lr": {"type": "float", "low": 0.001, "high": 0.1, "log": True}, **OTHERS}


def policy(domains: dict[str, Any], num_trials: int, place: PointPlacement | None = None) -> SearchPolicy:
    space = SearchSpace.from_mapping(domains, "space.yaml")
    return policy_over(
        space,
        TARGET,
        stopping=CapAtIncumbent(objective=OBJECTIVE, cap_margin=1.0),
        num_trials=num_trials,
        pausing=FreezeThawSampler(space=space, target=TARGET, objective=OBJECTIVE, seed=0),
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


def lived(domains: dict[str, Any], num_trials: int, folder: Path) -> tuple[Worker, SearchPolicy]:
    """A study to its end, and its recording in the folder."""
    worker, searched = Worker(), policy(domains, num_trials)
    while (trial := searched.suggest()) is not None:
        worker.train(searched, trial)
    left = [worker.result(trial, Outcome.STOPPED) for trial in searched._handed_out.values()]
    results = [*searched.results.values(), *left]
    write_recording(folder, results=results, target=TARGET, space=domains, source="made up")
    return worker, searched


@pytest.mark.parametrize(
    ("domains", "num_trials", "least_repeated"), [(FEW_POINTS, 60, 3), (MANY_POINTS, 15, 0)], ids=["repeated", "could have repeated"]
)
def test_a_study_is_replayed_as_it_was_lived(domains: dict[str, Any], num_trials: int, least_repeated: int, tmp_path: Path) -> None:
    worker, searched = lived(domains, num_trials, tmp_path / "own")
    keys = [Suggestion(each.values).key for each in searched.results.values()]
    assert len(keys) - len(set(keys)) >= least_repeated
    trace = replay(read_recording(tmp_path / "own"), partial(policy, domains, num_trials), within=None, repeats_any=True)
    assert [(each.trial, each.outcome) for each in trace.stretches] == [(number, outcome) for number, _, outcome in worker.stretches]
    assert [each.train_seconds for each in trace.stretches] == pytest.approx([seconds for _, seconds, _ in worker.stretches])
