"""Replaying: what is charged, how workers share the clock, and what holds of every policy."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import optuna
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.measurement import PAUSED, Target
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.recording import RecordedTrial, Recording
from autotune.search.freeze_thaw import FreezeThawSampler
from autotune.search.scheduler import PointPlacement, Scheduler
from autotune.search.stopping import CapAtIncumbent, NeverStop, StoppingRule
from autotune.space import SearchSpace, Suggestion
from benchmarks.replay.nearest_recorded import RecordedPoints
from benchmarks.replay.simulation import Trace, replay, replayed_evaluation
from tests.support.pausing import PausesAtFirst
from tests.support.policies import policy_over

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=40.0)
OBJECTIVE = AmortisedTime(num_trainings=1)
SPACE = SearchSpace.from_mapping({"x": {"type": "float", "low": 0.0, "high": 1.0}}, "space.yaml")


def recorded(number: int, x: float, *curve: tuple[float, float]) -> RecordedTrial:
    """A trial of pairs of train seconds and metric."""
    seconds, metrics = zip(*curve, strict=True)
    steps = tuple(float(each) for each in range(1, len(curve) + 1))
    return RecordedTrial(
        number=number,
        suggestion=Suggestion({"x": x}),
        steps=steps,
        train_seconds=seconds,
        metrics=metrics,
    )


def recording(*trials: RecordedTrial) -> Recording:
    return Recording(target=TARGET, space=SPACE, trials=trials)


def policy(
    place: PointPlacement,
    *,
    first: Sequence[float] = (),
    stopping: StoppingRule | None = None,
    pausing: Any = None,
    seed: int = 0,
) -> Scheduler:
    """A policy that tries ``first`` values of ``x``, and then others at random."""
    return policy_over(
        SPACE,
        TARGET,
        seed=seed,
        first=[Suggestion({"x": x}) for x in first],
        stopping=stopping or NeverStop(),
        sampler=pausing,
        place=place,
    )


def cap() -> CapAtIncumbent:
    return CapAtIncumbent(objective=OBJECTIVE, cap_margin=1.0)


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    return [
        (each.trial, each.worker, each.started_seconds, each.stopped_seconds, each.outcome)
        for each in trace.stretches
    ]


THREE = recording(
    recorded(10, 0.1, (10.0, 0.5), (20.0, 0.95)),
    recorded(11, 0.5, (5.0, 0.6), (30.0, 0.7), (60.0, 0.99)),
    recorded(12, 0.9, (4.0, 0.8), (8.0, 0.92)),
)


def test_a_trial_is_charged_up_to_the_target_its_cap_or_the_most_seconds() -> None:
    trace = replay(THREE, lambda place: policy(place, first=[0.5, 0.1, 0.9]), within=None)
    assert rows(trace) == [
        # the target's most seconds come before its evaluation at 60
        (11, 0, 0.0, 40.0, "TIMED_OUT"),
        (10, 0, 40.0, 60.0, "REACHED"),
        (12, 0, 60.0, 68.0, "REACHED"),
    ]
    capped = replay(
        THREE,
        lambda place: policy(place, first=[0.9, 0.1, 0.5], stopping=cap()),
        within=None,
    )
    assert rows(capped) == [
        (12, 0, 0.0, 8.0, "REACHED"),
        (10, 0, 8.0, 16.0, "CAPPED"),  # before its first evaluation
        (11, 0, 16.0, 24.0, "CAPPED"),
    ]


def test_a_point_is_the_nearest_recorded_one_not_yet_used_and_the_sampler_is_told_that_one() -> (
    None
):
    study = None

    def made(place: PointPlacement) -> Scheduler:
        nonlocal study
        found = policy(place, first=[0.12, 0.12, 0.2])
        study = found.study
        return found

    trace = replay(THREE, made, within=None)
    assert [each.trial for each in trace.stretches] == [10, 11, 12]
    assert study is not None
    told = [
        trial.params["x"]
        for trial in study.trials
        if trial.state is not optuna.trial.TrialState.FAIL
    ]
    assert told == [0.1, 0.5, 0.9]


def test_a_configuration_that_was_recorded_several_times_is_had_again_by_its_own_point_only() -> (
    None
):
    trials = [recorded(number, x, (1.0, 0.5)) for number, x in enumerate((0.2, 0.2, 0.6, 0.2, 0.9))]
    points = RecordedPoints(SPACE, trials)

    def taken(x: float) -> int | None:
        return None if points(Suggestion({"x": x})) is None else points.last.number

    assert [points.can_repeat(Suggestion({"x": x})) for x in (0.2, 0.3)] == [True, False]
    assert RecordedPoints(SPACE, trials, repeats_any=True).can_repeat(Suggestion({"x": 0.3})), (
        "as in a study"
    )
    assert [taken(0.25), taken(0.25), taken(0.2)] == [
        0,
        2,
        1,
    ], "a neighbour gets another configuration, the point itself its next run"
    assert [taken(0.2), points.can_repeat(Suggestion({"x": 0.2}))] == [3, False]


def test_a_paused_trial_goes_on_from_where_it_stood() -> None:
    trace = replay(
        THREE,
        lambda place: policy(
            place,
            pausing=PausesAtFirst([Suggestion({"x": value}) for value in (0.1, 0.5, 0.9)]),
            stopping=cap(),
        ),
        within=None,
    )
    assert [
        (each.trial, each.from_train_seconds, each.train_seconds, each.outcome)
        for each in trace.stretches
    ] == [
        (10, 0.0, 10.0, PAUSED),
        (11, 0.0, 5.0, PAUSED),
        (12, 0.0, 4.0, PAUSED),
        (10, 10.0, 20.0, "REACHED"),
        (11, 5.0, 20.0, "CAPPED"),
        (12, 4.0, 8.0, "REACHED"),
    ]
    assert trace.train_seconds == 20 + 20 + 8


# What holds of every search.

metrics = st.one_of(st.floats(0, 1), st.just(math.nan))


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    count = draw(st.integers(1, 12))
    trials = []
    for number in range(count):
        gaps = draw(st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
        seconds = list(itertools.accumulate(gaps))
        trials.append(
            recorded(number, draw(st.floats(0, 1)), *((each, draw(metrics)) for each in seconds))
        )
    return recording(*trials)


@pytest.mark.parametrize("kind", ["random", "pausing"])
@given(made=recordings(), num_workers=st.integers(1, 3), seed=st.integers(0, 3))
@example(
    made=recording(
        recorded(0, 1.0, (1.5, 0.9)),
        recorded(1, 1.0, (1, 0.5), (2, 0.5), (3, 0.5)),
        recorded(2, 0.0, (1, 0.5)),
        recorded(3, 0.0, (1, 0.5), (2, 0.5)),
    ),
    num_workers=1,
    seed=0,
).via("a configuration trained twice, capped once between two evaluations")
@settings(max_examples=40)
def test_no_training_is_skipped_or_charged_twice(
    kind: str, made: Recording, num_workers: int, seed: int
) -> None:
    def make(place: PointPlacement) -> Scheduler:
        sampler = FreezeThawSampler(
            space=SPACE,
            target=TARGET,
            objective=OBJECTIVE,
            seed=seed,
            num_startup_trials=2,
            num_candidates=4,
            least_chance=0,
        )
        return policy(
            place, stopping=cap(), pausing=sampler if kind == "pausing" else None, seed=seed
        )

    trace = replay(made, make, num_workers=num_workers, within=None)
    by_number = {each.number: each for each in made.trials}
    ended = {each.trial: each for each in trace.stretches if each.outcome != PAUSED}
    assert set(ended) == set(by_number), "a search without a budget ends every trial"
    # A worker evaluates a trial past its cap. A recording may lack that evaluation, and then a
    # configuration's expected running time counts its capped run only to the one before.
    is_repeated = len({each.suggestion.key for each in made.trials}) < len(made.trials)
    best_at: list[tuple[float, float]] = []
    for each in sorted(trace.stretches, key=lambda each: each.stopped_seconds):
        curve = by_number[each.trial]
        assert each.train_seconds <= min(curve.train_seconds[-1], TARGET.max_train_seconds)
        assert each.stopped_seconds - each.started_seconds == pytest.approx(
            each.train_seconds - each.from_train_seconds
        )
        if each.outcome == Outcome.REACHED:
            assert each.train_seconds == curve.time_to_target(TARGET)
            best_at.append((each.stopped_seconds, each.train_seconds))
        if each.outcome == Outcome.CAPPED:
            known = [seconds for at, seconds in best_at if at <= each.stopped_seconds]
            assert known
            assert is_repeated or each.train_seconds >= min(known) - 1e-9
    for number in by_number:
        stretches = sorted(
            (each for each in trace.stretches if each.trial == number),
            key=lambda each: each.started_seconds,
        )
        stood = 0.0
        for each in stretches:
            assert each.from_train_seconds == stood
            stood = each.train_seconds
    for worker in range(num_workers):
        busy = sorted(
            (each.started_seconds, each.stopped_seconds)
            for each in trace.stretches
            if each.worker == worker
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(busy))


@pytest.mark.parametrize(("steps", "epochs"), [((1, 2, 4), (1, 2, 4)), ((250, 1000), (1, 4))])
def test_epochs_that_are_not_recorded_are_steps_or_shares_of_the_trials_own(
    steps: tuple[int, ...], epochs: tuple[float, ...]
) -> None:
    trial = RecordedTrial(
        number=0,
        suggestion=Suggestion({"epochs": 4}),
        steps=steps,
        train_seconds=tuple(float(step) for step in steps),
        metrics=(0.5,) * len(steps),
    )
    assert [replayed_evaluation(trial, index).epoch for index in range(len(steps))] == list(epochs)


def test_a_replay_ends_at_its_most_seconds_in_the_midst_of_a_training() -> None:
    trials = [recorded(number, number / 9, *((t, 0.5) for t in (4.0, 8.0))) for number in range(9)]
    trace = replay(
        Recording(target=TARGET, space=SPACE, trials=tuple(trials)),
        lambda place: policy_over(SPACE, TARGET, seed=0, stopping=NeverStop(), place=place),
        max_seconds=18.0,
    )
    assert trace.train_seconds == 18.0
    assert trace.stretches[-1].outcome == Outcome.STOPPED
