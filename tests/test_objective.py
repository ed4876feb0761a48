"""The objective: what of a result is minimised."""

from typing import Any

import pytest

from autotune.errors import ConfigError
from autotune.measurement import Device, Evaluation, TrialResult
from autotune.objective import (
    AmortisedTime,
    Cost,
    Energy,
    Pareto,
    check_measured,
    pareto_front,
    weighted_product,
)
from autotune.outcome import Outcome
from tests.support.records import make_evaluation, make_result


def evaluation(train_seconds: float = 4.0, **changes: Any) -> Evaluation:
    return make_evaluation(train_seconds, build_seconds=8.0, prepare_seconds=1.0, **changes)


def result(outcome: Outcome, *evaluations: Evaluation) -> TrialResult:
    return make_result(3, outcome, *evaluations)


def test_a_trial_that_did_not_reach_the_target_has_no_score() -> None:
    with pytest.raises(
        ValueError, match="trial 3 ended MISSED: only a trial that REACHED has a time to target"
    ):
        AmortisedTime(num_trainings=1).score(result(Outcome.MISSED, evaluation()))


H200 = Device(kind="NVIDIA H200", where="there", energy_fault=None)
PRICES = {"cpu": 0.36, "NVIDIA H200": 3.6}


@pytest.mark.parametrize(
    ("kind", "num_workers", "cost"),
    [("cpu", 1, 0.0007), ("NVIDIA H200", 1, 0.007), ("NVIDIA H200", 8, 0.056)],
)
def test_money_is_device_seconds_at_the_price_of_their_kind(
    kind: str, num_workers: int, cost: float
) -> None:
    objective = Cost(num_trainings=4, price_per_hour=PRICES, currency="EUR")
    reached = result(Outcome.REACHED, evaluation(device_kind=kind, num_workers=num_workers))
    assert objective.score(reached) == pytest.approx(cost, rel=1e-12)
    assert objective.unit == "EUR"


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        (
            None,
            (
                "objective: there trains on 'NVIDIA H200', and cluster.price_per_hour has no price;"
                " use a price"
            ),
        ),
        (
            {"cpu": 1.0},
            r"only prices of 'cpu'; .* 'cluster\.price_per_hour=\{NVIDIA H200: 2\.5\}'$",
        ),
    ],
)
def test_a_kind_without_a_price_is_refused_with_the_key_to_set(
    prices: dict[str, float] | None, message: str
) -> None:
    objective = Cost(num_trainings=1, price_per_hour=prices, currency="USD")
    with pytest.raises(ConfigError, match=message):
        check_measured(objective, [H200])
    with pytest.raises(ConfigError, match="price"):
        objective.lower_bound(evaluation(device_kind="NVIDIA H200"))


@pytest.mark.parametrize("price", [0.0, float("nan")])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(
        ConfigError, match=r"^cluster\.price_per_hour: found .* for 'cpu', must be above 0$"
    ):
        Cost(num_trainings=1, price_per_hour={"cpu": price}, currency="USD")


@pytest.mark.parametrize(("num_trainings", "joules"), [(1, 1500.0), (4, 750.0)])
def test_the_energy_of_building_is_shared_among_the_trainings_of_a_process(
    num_trainings: int, joules: float
) -> None:
    objective = Energy(num_trainings=num_trainings)
    reached = result(
        Outcome.REACHED, evaluation(build_joules=1000.0, energy_joules=500.0, train_seconds=1e9)
    )
    assert objective.score(reached) == pytest.approx(joules, rel=1e-12)


@pytest.mark.parametrize("changes", [{}, {"energy_joules": 500.0}, {"build_joules": 500.0}])
def test_energy_that_was_not_measured_is_refused_and_never_taken_for_another_number(
    changes: dict[str, float],
) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^objective: the energy that the device uses is not known on this training \(it was"
            r" not measured\)"
        ),
    ):
        Energy(num_trainings=1).score(result(Outcome.REACHED, evaluation(**changes)))


OBJECTIVES = {"time": AmortisedTime(num_trainings=1), "energy": Energy(num_trainings=1)}
PREFERENCES = {
    "balanced": {"time": 1.0, "energy": 1.0},
    "quick": {"time": 3.0, "energy": 1.0},
    "green": {"energy": 1.0},
}


def pareto(**changes: object) -> Pareto:
    return Pareto(
        **{"objectives": OBJECTIVES, "preferences": PREFERENCES, "search_for": "quick", **changes}
    )  # type: ignore[arg-type]


def test_each_preference_picks_its_point() -> None:
    points = {3: (1.0, 100.0), 5: (2.0, 40.0), 9: (20.0, 10.0)}
    assert pareto().picks(points) == {"balanced": 5, "quick": 3, "green": 9}


class Unbounded:
    def score(self, result: TrialResult) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objectives": {"time": OBJECTIVES["time"]}},
            r"^objective\.objectives: found time, must be at least two",
        ),
        (
            {"objectives": {**OBJECTIVES, "loss": Unbounded()}},
            r"^objective\.objectives\.loss: has no lower_bound",
        ),
        (
            {"preferences": {"odd": {"time": 1.0, "speed": 1.0}}},
            r"^objective\.preferences\.odd: found .* must be weights of time, energy",
        ),
        (
            {"preferences": {"odd": {"time": -1.0, "energy": 2.0}}},
            r"^objective\.preferences\.odd: found",
        ),
        (
            {"search_for": "slow"},
            r"^objective\.search_for: found slow, must be one of balanced, quick, green",
        ),
    ],
)
def test_objectives_and_preferences_that_cannot_be_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pareto(**changes)


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], []),
        ([(2.0, 1.0), (1.0, 2.0), (2.0, 2.0), (0.0, 9.0)], [3, 1, 0]),
        ([(1.0, 1.0), (0.0, 3.0), (1.0, 1.0)], [1, 0, 2]),
        ([(1.0, 5.0), (1.0, 4.0), (0.0, 5.0)], [2, 1]),
        ([(3.0,), (2.0,), (2.0,)], [1, 2]),
    ],
)
def test_the_front_is_what_no_point_dominates(
    points: list[tuple[float, ...]], front: list[int]
) -> None:
    assert pareto_front(points) == front


@pytest.mark.parametrize(
    ("values", "weights", "product"),
    [
        ((2.0, 8.0), (5, 5), 4.0),
        ((16.0, 1.0), (3, 1), 8.0),
        ((7.0, 5.0), (1, 0), 7.0),
        ((0.0, 5.0), (1, 1), 0.0),
    ],
)
def test_a_weighted_product_is_worked_out_by_hand(
    values: tuple[float, ...], weights: tuple[float, ...], product: float
) -> None:
    assert weighted_product(values, weights) == pytest.approx(product)
