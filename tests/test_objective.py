"""The objective: what of a result is minimised."""

import pytest

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Outcome, TrialResult
from autotune.objective import AmortisedTime, BoundedObjective


def evaluation(**changes: object) -> Evaluation:
    values: dict[str, object] = {
        "step": 10, "epoch": 1.0, "samples": 640, "build_seconds": 8.0, "prepare_seconds": 1.0, "train_seconds": 4.0,
        "evaluate_seconds": 100.0, "metric": 0.9, "loss": 0.1, "samples_per_second": 160.0, "peak_memory_bytes": None,
        "energy_joules": None,
    }  # fmt: skip
    return Evaluation(**{**values, **changes})  # type: ignore[arg-type]


def result(outcome: Outcome, *evaluations: Evaluation) -> TrialResult:
    return TrialResult(
        trial=3, values={}, overrides=(), seed=0, outcome=outcome, evaluations=evaluations, started_at=0.0, stopped_at=1.0,
        fingerprint={},
    )  # fmt: skip


@pytest.mark.parametrize(("num_trainings", "seconds"), [(1, 13.0), (4, 7.0), (10**9, 5.000000008)])
def test_build_time_is_shared_among_the_trainings_of_a_process(num_trainings: int, seconds: float) -> None:
    assert AmortisedTime(num_trainings=num_trainings).score(result(Outcome.REACHED, evaluation())) == pytest.approx(seconds, rel=1e-12)


def test_the_score_is_taken_at_the_last_evaluation() -> None:
    reached = result(Outcome.REACHED, evaluation(train_seconds=1.0), evaluation(train_seconds=2.0))
    assert AmortisedTime(num_trainings=1).score(reached) == 11.0


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.REACHED])
def test_a_trial_that_did_not_reach_the_target_has_no_score(outcome: Outcome) -> None:
    with pytest.raises(ValueError, match=f"trial 3 ended {outcome}: only a trial that REACHED has a time to target"):
        AmortisedTime(num_trainings=1).score(result(outcome, evaluation()))


def test_the_lower_bound_grows_with_training_and_ends_at_the_score() -> None:
    objective = AmortisedTime(num_trainings=2)
    assert isinstance(objective, BoundedObjective)
    course = [evaluation(train_seconds=seconds) for seconds in (0.5, 1.0, 4.0)]
    bounds = [objective.lower_bound(each) for each in course]
    assert bounds == sorted(bounds)
    assert bounds[-1] == objective.score(result(Outcome.REACHED, *course))


def test_fewer_than_one_training_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^objective\.num_trainings: found 0, accepted is a whole number from 1$"):
        AmortisedTime(num_trainings=0)
