"""The freeze-thaw search over curves made by a formula, and its guards."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.errors import ConfigError
from autotune.measurement import PAUSED, Evaluation, Target, TrialResult
from autotune.objective import AmortisedTime
from autotune.outcome import Outcome
from autotune.policy import Decision, Resume, Start
from autotune.recording import RecordedTrial, Recording
from autotune.search.freeze_thaw import FreezeThawSampler
from autotune.search.scheduler import PointPlacement, Scheduler
from autotune.search.stopping import CapAtIncumbent
from autotune.search.trial_history import KnownTrial, TrialHistory
from autotune.space import SearchSpace, Suggestion
from benchmarks.replay.simulation import Trace, replay, replayed_evaluation
from tests.support.policies import policy_over
from tests.support.records import make_evaluation, make_result

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=64.0)
OBJECTIVE = AmortisedTime(num_trainings=1)
DOMAINS: Mapping[str, Any] = {
    "kind": ["slow", "fast"],
    "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
    "size": {"type": "power_of_two", "low": 8, "high": 64},
}
SPACE = SearchSpace.from_mapping(DOMAINS, "space.yaml")


def made_up(number: int, values: Mapping[str, Any]) -> RecordedTrial:
    """Accuracy rises to a limit that the rate decides; a step's seconds grow with the size."""
    miss = abs(math.log10(values["lr"]) + 2)
    speed = 0.5 if values["kind"] == "slow" else 1.0
    steps = tuple(float(each) for each in range(1, 33))
    seconds = tuple(each * values["size"] / 8 for each in steps)
    metrics = tuple(
        (0.97 - 0.1 * miss) * (1 - math.exp(-speed * each / (1 + miss))) for each in steps
    )
    return RecordedTrial(
        number=number,
        suggestion=Suggestion(values),
        steps=steps,
        train_seconds=seconds,
        metrics=metrics,
    )


def recording(count: int = 120) -> Recording:
    rng = np.random.default_rng(0)
    trials = [
        made_up(
            number,
            {
                "kind": str(rng.choice(["slow", "fast"])),
                "lr": float(10 ** rng.uniform(-4, 0)),
                "size": int(2 ** rng.integers(3, 7)),
            },
        )
        for number in range(count)
    ]
    return Recording(target=TARGET, space=SPACE, trials=tuple(trials))


def sampler(**settings: Any) -> FreezeThawSampler:
    return FreezeThawSampler(
        **{"space": SPACE, "target": TARGET, "objective": OBJECTIVE, "seed": 0, **settings}
    )


def searched(
    recorded: Recording,
    *,
    seed: int,
    pausing: bool = True,
    within: float | None = 0.1,
) -> Trace:
    def make(place: PointPlacement) -> Scheduler:
        return policy_over(
            SPACE,
            TARGET,
            seed=seed,
            stopping=CapAtIncumbent(objective=OBJECTIVE, cap_margin=1.0),
            sampler=sampler(seed=seed) if pausing else None,
            place=place,
        )

    return replay(recorded, make, within=within)


def test_it_finds_a_good_point_in_less_training_than_chance_with_a_cap() -> None:
    recorded = recording()

    def cost(pausing: bool) -> float:
        found = [
            searched(recorded, seed=seed, pausing=pausing).seconds_until(recorded, 0.1)
            for seed in range(6)
        ]
        return float(np.mean(np.log([seconds for seconds in found if seconds is not None])))

    assert cost(True) < cost(False) - math.log(1.3)


def test_what_cannot_end_in_the_time_that_is_left_gains_less() -> None:
    made, rng = sampler(num_startup_trials=1), np.random.default_rng(0)
    points = [Suggestion({"kind": "slow", "lr": lr, "size": 64}) for lr in (0.01, 0.02, 0.1, 0.3)]
    for number, point in enumerate(points):
        recorded = made_up(number, point.values)
        curve = [replayed_evaluation(recorded, index) for index in range(7 if number else 3)]
        made.paused(number, point, curve)
    made._gains.learn(rng)
    # after three of about six steps of eight seconds, and anew
    drawn = [Suggestion({"kind": "slow", "lr": 0.011, "size": 64})]
    untold = made._gains.log_gains(drawn, [0], None)[0]
    told = made._gains.log_gains(drawn, [0], None, 40.0)[0]
    assert told[1] == untold[1]
    assert told[0] < untold[0]
    too_short = made._gains.log_gains(drawn, [0], None, 1e-3)[0]
    np.testing.assert_array_equal(too_short, untold)


def test_where_a_trial_is_yet_without_an_evaluation_no_second_one_is_as_promising() -> None:
    made = sampler(num_startup_trials=1)
    for number, lr in enumerate((1e-4, 1e-3, 0.02, 0.1, 0.9)):
        point = Suggestion({"kind": "slow", "lr": lr, "size": 16})
        recorded = made_up(number, point.values)
        made.paused(number, point, [replayed_evaluation(recorded, index) for index in range(6)])
    drawn = [Suggestion({"kind": "slow", "lr": lr, "size": 16}) for lr in (0.011, 2e-4)]

    def gains() -> list[float]:
        made._gains.learn(np.random.default_rng(0))
        return [float(each) for each in made._gains.log_gains(drawn, [], None)[0]]

    alone = gains()
    made.started(5, Suggestion({"kind": "slow", "lr": 0.01, "size": 16}))
    beside = gains()
    assert beside[0] < alone[0] - 0.1
    assert abs(beside[1] - alone[1]) < abs(beside[0] - alone[0])
    made.forget(5)
    assert gains() == alone


def test_the_same_seed_searches_the_same_way() -> None:
    recorded = recording(24)
    assert searched(recorded, seed=3) == searched(recorded, seed=3)
    assert searched(recorded, seed=3) != searched(recorded, seed=4)


def test_a_share_of_the_trials_is_trained_on_whatever_the_model_says() -> None:
    # that none reaches
    target = Target(metric="accuracy", value=0.999, mode="max", max_train_seconds=64.0)
    trace = searched(
        Recording(target=target, space=SPACE, trials=recording(16).trials), seed=0, within=None
    )
    stood: dict[int, float] = {}
    for each in trace.stretches[:40]:
        stood[each.trial] = each.train_seconds
    first = min(each.train_seconds for each in trace.stretches)
    for doublings in range(4):
        longer = sum(seconds >= first * 2 ** (doublings + 1) for seconds in stood.values())
        assert longer >= sum(seconds >= first * 2**doublings for seconds in stood.values()) / 4 - 2
    assert any(each.outcome == PAUSED for each in trace.stretches)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_candidates": 0}, "search.sampler: found num_startup_trials 6, num_candidates 0"),
        ({"reduction_factor": 1}, "reduction_factor 1, least_chance 0.01; use"),
        ({"objective": object()}, "needs an objective with lower_bound"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampler(**settings)


def ended(
    number: int, values: Mapping[str, Any], outcome: Outcome, *, step: int = 5
) -> TrialResult:
    last = replace(replayed_evaluation(made_up(0, values), step), outcome=outcome)
    return make_result(number, outcome, last, values=values)


def test_who_would_be_the_incumbent_by_one_run_is_run_again_at_once() -> None:
    made = sampler()
    for number, (values, step) in enumerate(
        [({"kind": "fast", "lr": 0.01, "size": 8}, 9), ({"kind": "slow", "lr": 0.1, "size": 8}, 3)]
    ):
        made.started(number, Suggestion(values))
        result = ended(number, values, Outcome.REACHED, step=step)
        made.finish(result, OBJECTIVE.score(result))
        assert made.propose() == Suggestion(values), "its first run alone is better than all before"
        assert made.propose(new=False) is None, "no trial may be begun"
        made.started(10 + number, Suggestion(values))
        assert made.propose() != Suggestion(values), "it is run again at the moment"
        result = ended(10 + number, values, Outcome.REACHED, step=step)
        made.finish(result, OBJECTIVE.score(result))
        assert made.propose() != Suggestion(values), "it was run again"


def test_the_incumbent_is_run_again_after_every_eight_trials_until_it_was_run_four_times() -> None:
    made, best, runs = sampler(), {"kind": "fast", "lr": 0.01, "size": 8}, []
    for number in range(50):
        is_best = number == 0 or made.propose() == Suggestion(best)
        values = best if is_best else {"kind": "slow", "lr": 10 ** (-number / 20), "size": 8}
        made.started(number, Suggestion(values))
        made.finish(
            ended(number, values, Outcome.REACHED if is_best else Outcome.MISSED),
            6.0 if is_best else None,
        )
        runs += [number] * is_best
    assert runs == [0, 1, 10, 19]


def test_a_half_of_the_space_that_cannot_be_trained_is_kept_away_from() -> None:
    """Where the size is large it runs out of memory, and where the kind is slow the point is
    refused.
    """
    space = SearchSpace.from_mapping(
        {**DOMAINS, "size": {"type": "float", "low": 8.0, "high": 64.0}}, "space.yaml"
    )
    cap = CapAtIncumbent(objective=OBJECTIVE, cap_margin=1.0)
    policy = policy_over(space, TARGET, stopping=cap, sampler=sampler(space=space))
    failed, begun = [], set()
    while len(begun) < 60:
        answer = policy.suggest()
        assert isinstance(answer, Start | Resume)
        trial, is_new = answer.trial, isinstance(answer, Start)
        values = trial.suggestion.values
        begun.add(trial.number)
        if is_new and values["kind"] == "slow":
            policy.reject(trial.number, "refused")
            failed.append(len(begun))
            continue
        curve, evaluations = made_up(trial.number, values), []
        outcome = Outcome.OUT_OF_MEMORY if values["size"] > 36 else None
        for place in range(len(curve.steps) if outcome is None else 0):
            evaluation = replayed_evaluation(curve, place)
            evaluations.append(evaluation)
            if evaluation.metric >= TARGET.value:
                outcome = Outcome.REACHED
                evaluations[-1] = replace(evaluation, outcome=outcome)
                break
            decision = policy.observe(trial.number, evaluation, may_pause=False)
            if decision is Decision.CAP:
                outcome = Outcome.CAPPED
                break
        failed += [len(begun)] if outcome is Outcome.OUT_OF_MEMORY else []
        policy.finish(
            make_result(trial.number, outcome or Outcome.MISSED, *evaluations, values=values)
        )
    assert sum(at > 20 for at in failed) < 0.4 * 40, "of the space three quarters cannot be trained"


def start(history: TrialHistory, number: int, values: Mapping[str, Any]) -> KnownTrial:
    point = Suggestion(values)
    history.trials[number] = KnownTrial(
        key=point.key,
        features=history.cube.features([point])[0],
        prior_means=np.zeros(0),
        log_length=history.log_length(point),
        is_repeat=False,
    )
    return history.trials[number]


@pytest.mark.parametrize(
    ("epochs", "has_lengths"), [([0.5, 3.0], True), ([0.5, 500.0], False), ([0.0, 0.0], False)]
)
def test_curves_are_functions_of_epochs_only_where_the_schedules_length_is_in_epochs(
    epochs: list[float], *, has_lengths: bool
) -> None:
    space = SearchSpace.from_mapping({"epochs": {"type": "int", "low": 1, "high": 4}}, "space.yaml")
    history = TrialHistory(space, TARGET, OBJECTIVE, "epochs", lambda _: False)
    start(history, 0, {"epochs": 3})
    for step, epoch in zip([100, 500], epochs, strict=True):
        history.add_evaluation(0, make_evaluation(float(step), step=step, epoch=epoch))
    assert history.has_lengths == has_lengths
    steps = [each.step for each in history.trials[0].curve]
    assert steps == (epochs if has_lengths else [100, 500])
    assert math.isinf(history.trials[0].log_length) == (not has_lengths)


POINT = {"kind": "fast", "lr": 0.01, "size": 8}


def late_riser(num_flat: int, num_steps: int) -> list[Evaluation]:
    """Accuracy stays at 0.1 for some steps, and then rises by 0.2 a step up to 0.8."""
    return [
        make_evaluation(
            float(step),
            step=step,
            epoch=step / 10,
            metric=0.1 + 0.1 * min(max(0, 2 * (step - num_flat)), 7),
        )
        for step in range(1, num_steps + 1)
    ]


def test_no_trial_is_paused_in_the_flat_start_that_trials_had_that_ended() -> None:
    made = sampler(num_startup_trials=1)
    made.started(0, Suggestion(POINT))
    made.finish(make_result(0, Outcome.MISSED, *late_riser(8, 20), values=POINT), None)
    for number in range(1, 9):
        made.started(number, Suggestion({"kind": "slow", "lr": 0.5, "size": 8 + number}))
        for evaluation in late_riser(20, 9):
            assert made.observe(number, evaluation) is Decision.CONTINUE, "it may rise at step 9"
    longest = {
        number: next(
            evaluation.step
            for evaluation in late_riser(100, 64)[9:]
            if made.observe(number, evaluation) is Decision.PAUSE
        )
        for number in range(1, 9)
    }
    assert min(longest.values()) == 10, "8 times 1.25 steps say enough"


def test_after_a_flat_start_a_rising_trial_goes_on_until_one_has_reached_the_target() -> None:
    made = sampler(num_startup_trials=1)
    made.started(0, Suggestion(POINT))
    made.finish(make_result(0, Outcome.MISSED, *late_riser(8, 20), values=POINT), None)
    rising = {"kind": "slow", "lr": 0.5, "size": 9}
    made.started(1, Suggestion(rising))
    slow = [
        replace(each, metric=0.1 + max(0, each.step - 8) * 0.005) for each in late_riser(100, 120)
    ]
    decisions = [made.observe(1, evaluation) for evaluation in slow]
    assert set(decisions[30:]) == {Decision.CONTINUE}, "it rises still"
    made.started(2, Suggestion(POINT | {"size": 64}))
    won = late_riser(2, 6)
    won[-1] = replace(won[-1], metric=0.95, outcome=Outcome.REACHED)
    made.finish(make_result(2, Outcome.REACHED, *won, values=POINT | {"size": 64}), 6.0)
    made.started(3, Suggestion(rising | {"size": 10}))
    assert Decision.PAUSE in {made.observe(3, evaluation) for evaluation in slow[:40]}


def test_no_trial_is_paused_in_the_first_tenth_of_a_schedule_whose_length_is_searched() -> None:
    space = SearchSpace.from_mapping(
        {"epochs": {"type": "int", "low": 20, "high": 80}, "lr": DOMAINS["lr"]}, "space.yaml"
    )
    made = sampler(space=space, num_startup_trials=4)
    for number, epochs in enumerate((80, 40)):
        made.started(number, Suggestion({"epochs": epochs, "lr": 0.01}))
        decisions = [
            made.observe(number, make_evaluation(float(step), step=step, epoch=step, metric=0.1))
            for step in range(1, epochs // 10 + 1)
        ]
        assert decisions == [Decision.CONTINUE] * (epochs // 10 - 1) + [Decision.PAUSE]


def test_flat_starts_of_winners_count_before_those_of_others() -> None:
    history = TrialHistory(SPACE, TARGET, OBJECTIVE, "epochs", lambda _: False)
    assert math.isinf(history.informative_position)
    start(history, 0, POINT)
    history.finish(make_result(0, Outcome.MISSED, *late_riser(8, 20), values=POINT), None)
    assert math.exp(history.informative_position) == pytest.approx(8 * 1.25)
    start(history, 1, {**POINT, "size": 16})
    won = late_riser(3, 10)
    won[-1] = replace(won[-1], metric=0.95, outcome=Outcome.REACHED)
    history.finish(make_result(1, Outcome.REACHED, *won, values=POINT), 10.0)
    assert math.exp(history.informative_position) == pytest.approx(3 * 1.25)


def test_one_trial_is_trained_to_its_end_while_all_curves_are_flat() -> None:
    history = TrialHistory(SPACE, TARGET, OBJECTIVE, "epochs", lambda _: False)
    for number in range(4):
        start(history, number, {**POINT, "size": 8 * 2**number})
        for evaluation in late_riser(100, 2 ** (4 - number)):
            history.add_evaluation(number, evaluation)
    assert history.promoted(range(4), 2) == 0, "the longest one goes on"
    for evaluation in late_riser(1, 4):
        history.add_evaluation(3, evaluation)
    assert history.promoted(range(4), 2) is None, "two of four have been trained on"


def test_where_lengths_differ_the_best_after_so_long_are_trained_on() -> None:
    space = SearchSpace.from_mapping(
        {"epochs": {"type": "int", "low": 20, "high": 80}, "lr": DOMAINS["lr"]}, "space.yaml"
    )
    history = TrialHistory(space, TARGET, OBJECTIVE, "epochs", lambda _: False)
    for number in range(5):
        start(history, number, {"epochs": 20, "lr": 0.1 / (number + 1)})
        for evaluation in late_riser(6, 8) if number < 4 else late_riser(1, 2):
            history.add_evaluation(number, evaluation)
    assert history.trials[0].rungs[1] > history.trials[4].rungs[1] > history.trials[0].rungs[3]
    assert history.promoted([4], 4) == 4, "the best of five after two steps"
    assert history.promoted([4], 6) is None, "of six it would be one"


def test_where_lengths_are_equal_a_share_is_trained_on() -> None:
    history = TrialHistory(SPACE, TARGET, OBJECTIVE, "epochs", lambda _: False)
    for number in range(8):
        start(history, number, {**POINT, "lr": 0.1 / (number + 1)})
        for evaluation in late_riser(number / 10, 2):
            history.add_evaluation(number, evaluation)
    assert history.promoted(range(8), 8) is None, "8 / 8 - 1 need be trained on"
    assert history.promoted(range(8), 4) == 0, "8 / 4 - 1 need be, the best first"
    for evaluation in late_riser(0, 4)[2:]:
        history.add_evaluation(0, evaluation)
    assert history.promoted(range(1, 8), 4) is None, "one of them has been"


def test_first_metrics_say_little_where_most_curves_are_flat() -> None:
    history = TrialHistory(SPACE, TARGET, OBJECTIVE, "epochs", lambda _: False)
    for number, num_flat in enumerate((1, 6, 6)):
        start(history, number, {**POINT, "lr": 0.1 / (number + 1)})
        for evaluation in late_riser(num_flat, 8):
            history.add_evaluation(number, evaluation)
        assert history.may_all_miss == (number == 2), "two of three are flat after four steps"
