"""The records of measuring, and the clock whose phases sum to the time that passed."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.measurement import Evaluation, Phase, PhaseClock, Target, TrialResult
from autotune.outcome import Outcome
from tests.support.records import make_result

JSON_VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.lists(st.integers(), max_size=3)
)
NAMED = st.dictionaries(st.text(), JSON_VALUES, max_size=3)
EVALUATIONS = st.lists(st.builds(Evaluation, outcome=..., build_joules=...), max_size=3)
RESULTS = st.builds(
    TrialResult,
    values=NAMED,
    evaluations=EVALUATIONS.map(tuple),
    fingerprint=NAMED,
    error=...,
    failure=...,
    output_path=...,
    device=...,
    test_metric=...,
)


class HandSetTime:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand_set_time(monkeypatch: pytest.MonkeyPatch) -> HandSetTime:
    clock = HandSetTime()
    monkeypatch.setattr("autotune.measurement.time.perf_counter", clock)
    return clock


@given(
    course=st.lists(st.tuples(st.sampled_from([*Phase, None]), st.integers(0, 10**6)), max_size=20)
)
def test_phases_and_standstill_sum_to_the_wall_time(course: list[tuple[Phase | None, int]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        time = HandSetTime()
        monkeypatch.setattr("autotune.measurement.time.perf_counter", time)
        clock = PhaseClock()
        spent = dict.fromkeys([*Phase, None], 0)
        for phase, seconds in course:
            clock.enter(phase)
            time.now += seconds
            spent[phase] += seconds
            assert clock.phase is phase
        assert {phase: clock.seconds(phase) for phase in Phase} == {
            phase: spent[phase] for phase in Phase
        }
        clock.enter(None)
        time.now += 7
        assert sum(clock.seconds(phase) for phase in Phase) + spent[None] == time.now - 1000.0 - 7


def test_joules_are_counted_into_phases_and_what_reading_takes_is_in_none(
    hand_set_time: HandSetTime,
) -> None:
    counter = 100.0

    def read() -> float:
        hand_set_time.now += 5.0
        return counter

    clock = PhaseClock()
    clock.attach(lambda: None, read)
    for phase, joules in (
        (None, 7.0),
        (Phase.PREPARE, 2.0),
        (Phase.TRAIN, 30.0),
        (Phase.EVALUATE, 4.0),
        (None, 9.0),
        (Phase.TRAIN, 10.0),
    ):
        clock.enter(phase)
        counter += joules
        hand_set_time.now += 1.0
    clock.enter(None)
    assert {phase: clock.joules(phase) for phase in Phase} == {
        "build": 0.0,
        "prepare": 2.0,
        "train": 40.0,
        "evaluate": 4.0,
    }
    assert clock.joules(Phase.PREPARE, Phase.TRAIN) == 42.0
    assert {phase: clock.seconds(phase) for phase in Phase} == {
        "build": 0.0,
        "prepare": 1.0,
        "train": 2.0,
        "evaluate": 1.0,
    }


def same(left: object, right: object) -> bool:
    """Equality in which a NaN equals a NaN."""
    return repr(left) == repr(right)


@given(result=RESULTS)
def test_a_result_survives_its_dict_and_json(result: TrialResult) -> None:
    assert same(TrialResult.from_dict(result.as_dict()), result)
    assert same(TrialResult.from_dict(json.loads(json.dumps(result.as_dict()))), result)


def test_a_record_of_another_version_is_read_by_the_fields_known_here() -> None:
    result = make_result(0, Outcome.MISSED, stopped_at=0.0)
    older = {
        key: value
        for key, value in result.as_dict().items()
        if key not in ("error", "failure", "output_path", "device", "test_metric")
    }
    assert TrialResult.from_dict({**older, "a_field_of_tomorrow": 1}) == result


@pytest.mark.parametrize(
    ("mode", "metric", "reached"),
    [
        ("max", 0.9, True),
        ("max", 0.8999, False),
        ("min", 0.9, True),
        ("min", 0.9001, False),
        ("max", math.inf, False),
        ("min", math.nan, False),
    ],
)
def test_target_is_reached_at_or_past_its_value_and_never_by_what_is_not_finite(
    mode: str, metric: float, reached: bool
) -> None:
    assert (
        Target(metric="accuracy", value=0.9, mode=mode, max_train_seconds=1.0).reached_by(metric)
        is reached
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("", ""),
        ("found 3\naccepted is 2", "found 3"),
        (
            "Traceback (most recent call last):\n  File 'a'\nValueError: one\nnote\n",
            "ValueError: one",
        ),
        (
            (
                "Traceback (most recent call last):\n  File 'a'\nKeyError: 1\n\nDuring\n\nTraceback"
                " (most recent call last):\n  b\nmy.Fault\n"
            ),
            "my.Fault",
        ),
        (
            (
                "Traceback (most recent call last):\n  a\nRuntimeError: torchrun ended with exit"
                " code 1\n[rank1]: Traceback (most recent call last):\n[rank1]:   File"
                " 't.py'\n[rank1]: ValueError: empty\nTraceback (most recent call last):\n "
                " b\nerrors.ChildFailedError: \n====\nFAILED"
            ),
            "[rank1]: ValueError: empty",
        ),
        *(
            (
                "Traceback (most recent call last):\n  a\nRuntimeError: it ended\n"
                f"{told}\nTraceback (most recent call last):\n  b\n"
                "errors.ChildFailedError: \n====\nFAILED",
                told,
            )
            for told in (
                "/bin/python3.11: can't open file 'trian.py': [Errno 2]",
                "t.py: error: unrecognized arguments: --lrr 1",
            )
        ),
    ],
)
def test_the_line_of_an_error_is_its_last_exception(error: str, line: str) -> None:
    result = make_result(0, Outcome.ERRORED, stopped_at=0.0, error=error)
    assert result.error_line == line
