"""How long a policy takes to decide, with 100 and with 2,000 trials behind it: on a recording that
is made up.

A policy over an Optuna study goes on from a study in which a random search with cap has finished so
many trials. One that pauses has begun so many itself, drawn by chance, and paused each at its
second evaluation; then it is left to its model. Any other has to finish them itself, within a limit
of time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from autotune.measurement import Evaluation, Target, TrialResult
from autotune.policy import Answer, Decision, Start
from autotune.recording import RecordedTrial, Recording
from autotune.search.points import RandomTrial
from autotune.search.scheduler import PointPlacement
from autotune.space import SearchSpace
from benchmarks.replay.simulation import replay
from benchmarks.search_peers.policies import POLICIES, MakePolicy, Policy

NUM_TRIALS = (100, 2000)
_NUM_MEASURED = 50
_MAX_SECONDS_MEASURED = 30.0
"""Of measuring, once so many trials are behind it; at least one suggestion is measured."""
_SPARE_TRIALS = 300


@dataclass(frozen=True, kw_only=True)
class DecisionTime:
    """Milliseconds of a policy's decisions with so many trials finished, or paused."""

    num_trials: int
    suggestion_milliseconds: float
    """Median, from the evaluation at which a trial left its worker to the next one handed out,
    all verbs in between."""
    evaluation_milliseconds: float | None
    """Median of a decision that a trial goes on; None where there was none."""
    longest_milliseconds: float
    """The longest decision of either kind."""
    num_suggestions: int
    num_evaluations: int


def decision_time(name: str, num_trials: int, *, limit_seconds: float) -> DecisionTime | None:
    """Measure a policy; None where it has not come to so many trials within ``limit_seconds``."""
    recording = made_up_recording(num_trials + _SPARE_TRIALS)
    kind, timed = (
        POLICIES[name],
        _Timed(num_trials, limit_seconds, counts_begun=POLICIES[name].make_with_paused is not None),
    )
    make = kind.make if kind.make_with_paused is None else kind.make_with_paused(num_trials)
    try:
        if kind.takes_study and kind.make_with_paused is None:
            _warm(recording, make, timed)
        else:
            # it has the verbs
            replay(
                recording,
                lambda place: timed.around(make(recording, seed=0, place=place)),
                within=None,
            )  # type: ignore[arg-type,return-value]
    except _MeasuredError:
        pass
    if not timed.suggestions:
        return None
    return DecisionTime(
        num_trials=num_trials,
        suggestion_milliseconds=1e3 * median(timed.suggestions),
        evaluation_milliseconds=1e3 * median(timed.evaluations) if timed.evaluations else None,
        longest_milliseconds=1e3 * max(timed.suggestions + timed.evaluations),
        num_suggestions=len(timed.suggestions),
        num_evaluations=len(timed.evaluations),
    )


def _warm(recording: Recording, make: MakePolicy, timed: "_Timed") -> None:
    """Finish the trials by a random search with cap, and hand its study over to the policy in
    the middle of the replay.
    """
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))

    def make_both(place: PointPlacement) -> "_Timed":
        before = POLICIES["random_cap"].make(recording, seed=0, place=place, study=study)
        return timed.around(before, then=lambda: make(recording, seed=0, place=place, study=study))

    replay(recording, make_both, within=None)  # type: ignore[arg-type]  # it has the verbs


class _MeasuredError(Exception):
    """Enough has been measured, or it takes too long: the replay is left."""


class _Timed:
    """A policy whose verbs are timed from a number of trials on: finished ones, or where it
    ``counts_begun`` those.
    """

    def __init__(self, num_trials: int, limit_seconds: float, *, counts_begun: bool) -> None:
        self._num_left = num_trials
        self._counts_begun = counts_begun
        self._limit = time.perf_counter() + limit_seconds
        self._waiting = 0.0
        self.suggestions: list[float] = []
        self.evaluations: list[float] = []

    def around(self, policy: Policy, then: Callable[[], Policy] | None = None) -> "_Timed":
        """Time this policy.

        ``then`` makes the one that takes its place when the trials are finished.
        """
        self._policy, self._then = policy, then
        return self

    def suggest(self) -> Answer:
        """The policy's, timed."""
        if self._num_left == 0 and self._then is not None:
            self._policy, self._then = self._then(), None
            self._waiting = 0.0
            self._limit = time.perf_counter() + _MAX_SECONDS_MEASURED
        elif time.perf_counter() > self._limit or len(self.suggestions) >= _NUM_MEASURED:
            raise _MeasuredError
        began = time.perf_counter()
        answer = self._policy.suggest()
        self._waiting += time.perf_counter() - began
        if self._num_left == 0:
            self.suggestions.append(self._waiting)
        self._waiting = 0.0
        if self._counts_begun and isinstance(answer, Start):
            self._count()
        return answer

    def observe(self, number: int, evaluation: Evaluation) -> Decision:
        """The policy's, timed."""
        began = time.perf_counter()
        decision = self._policy.observe(number, evaluation)
        seconds = time.perf_counter() - began
        if decision is not Decision.CONTINUE:
            self._waiting += seconds
        elif self._num_left == 0 and self._then is None:
            self.evaluations.append(seconds)
        return decision

    def finish(self, result: TrialResult) -> None:
        """The policy's, timed."""
        began = time.perf_counter()
        self._policy.finish(result)
        self._waiting += time.perf_counter() - began
        if not self._counts_begun:
            self._count()

    def _count(self) -> None:
        self._num_left = max(0, self._num_left - 1)


def made_up_recording(num_trials: int) -> Recording:
    """Trials drawn by chance in a space of seven parameters, of eight evaluations each.

    About a tenth reach the target.
    """
    rng = np.random.default_rng(0)
    numbers = {
        f"rate_{index}": {"type": "float", "low": 1e-5, "high": 1.0, "log": True}
        for index in range(4)
    }
    space = SearchSpace.from_mapping(
        {
            **numbers,
            "share": {"type": "float", "low": 0, "high": 1},
            "width": {"type": "int", "low": 16, "high": 512},
            "kind": ["a", "b"],
        },
        "made up",
    )
    trials = []
    for number in range(num_trials):
        suggestion = space.suggest(RandomTrial(rng))
        distances = [
            abs(np.log10(suggestion.values[f"rate_{index}"]) + 2.5) / 2.5 for index in range(4)
        ]
        quality = 1.0 - float(np.mean(distances)) + 0.05 * float(rng.standard_normal())
        seconds = (1.0 + suggestion.values["width"] / 256) * np.arange(1, 9)
        metrics = quality * (1 - 0.6 ** np.arange(1, 9))
        trials.append(
            RecordedTrial(
                number=number,
                suggestion=suggestion,
                steps=tuple(float(each) for each in range(1, 9)),
                train_seconds=tuple(float(each) for each in seconds),
                metrics=tuple(float(each) for each in metrics),
            )
        )
    value = float(np.quantile([max(each.metrics) for each in trials], 0.9))
    return Recording(
        target=Target(metric="quality", value=value, mode="max", max_train_seconds=30.0),
        space=space,
        trials=tuple(trials),
    )
