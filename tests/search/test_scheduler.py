"""The search policy over real Optuna studies, with results made up by a small formula in place
of training.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autotune.config.build import build
from autotune.config.compose import Composer
from autotune.config.experiments import shipped_folder
from autotune.config.space_files import read_search_space
from autotune.errors import ConfigError
from autotune.measurement import Target, TrialResult
from autotune.objective import AmortisedTime, Cost
from autotune.outcome import Outcome
from autotune.policy import Decision, Done, Resume, Run, Start, Wait
from autotune.search.points import points
from autotune.search.samplers import quiet_optuna, reads_no_reports
from autotune.search.scheduler import Scheduler
from autotune.search.stopping import CapAtIncumbent
from autotune.search.storage import JOURNAL
from autotune.search.study import open_study
from autotune.space import SearchSpace, Suggestion
from tests.support import policies as support
from tests.support.pausing import PausesAtFirst
from tests.support.records import make_evaluation, make_result

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=100)
OBJECTIVE = AmortisedTime(num_trainings=1)
SPACE = SearchSpace.from_mapping(
    {
        "optimizer": {
            "type": "choice",
            "choices": {
                "sgd": {"optimizer.momentum": {"type": "float", "low": 0.8, "high": 0.99}},
                "adamw": {},
            },
        },
        "batch_size": {"type": "power_of_two", "low": 16, "high": 512},
        "epochs": {"type": "int", "low": 1, "high": 1000},
    },
    "space.yaml",
)
BASELINE = Suggestion(
    {"optimizer": "sgd", "optimizer.momentum": 0.9, "batch_size": 64, "epochs": 20}
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    quiet_optuna()


def new_study(sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
    return optuna.create_study(sampler=sampler or optuna.samplers.RandomSampler(seed=0))


def journal_study(folder: Path) -> optuna.Study:
    """The study in a folder, as a new process opens it: with a sampler whose seed counts the
    trials there are.
    """
    study, _ = open_study(
        "study",
        folder,
        storage_url=None,
        make_sampler=optuna.samplers.RandomSampler,
        seed=0,
        definition={},
    )
    study.sampler = optuna.samplers.RandomSampler(seed=len(study.trials))
    return study


def policy_over(study: optuna.Study, **settings: Any) -> Scheduler:
    given = {"space": SPACE, "target": TARGET, "baseline": BASELINE, **settings}
    return support.policy_over(study=study, **given)


def ended(
    trial: Run,
    outcome: Outcome = Outcome.REACHED,
    seconds: float = 10.0,
    metric: float | None = 0.9,
    error: str | None = None,
) -> TrialResult:
    """How a trial ended, as a worker would say it.

    A metric of None is an end before the first evaluation.
    """
    return make_result(
        trial.number,
        outcome,
        *() if metric is None else (make_evaluation(seconds, metric=metric),),
        values=trial.suggestion.values,
        overrides=tuple(trial.suggestion.as_overrides()),
        seed=trial.seed,
        stopped_at=seconds,
        error=error,
    )


def suggested(policy: Scheduler) -> Run:
    answer = policy.suggest()
    assert isinstance(answer, Start | Resume)
    return answer.trial


def end_next(policy: Scheduler, outcome: Outcome = Outcome.REACHED, **values: Any) -> Run:
    trial = suggested(policy)
    policy.finish(ended(trial, outcome, **values))
    return trial


def told(
    study: optuna.Study, number: int = 0
) -> tuple[TrialState, float | None, Mapping[int, float], Mapping[str, float]]:
    """What Optuna knows of a trial: state, value, reports, constraints."""
    frozen = study.trials[number]
    return frozen.state, frozen.value, frozen.intermediate_values, frozen.constraints


def test_the_baseline_comes_first_and_once() -> None:
    policy = policy_over(new_study())
    first, second = suggested(policy), suggested(policy)
    assert (first.number, first.is_baseline) == (0, True)
    assert first.suggestion == BASELINE
    assert not second.is_baseline
    assert second.suggestion != BASELINE


def test_the_baseline_is_trained_to_its_end_whoever_was_faster() -> None:
    policy = policy_over(new_study(), stopping=CapAtIncumbent(objective=OBJECTIVE, cap_margin=1.0))
    baseline, fast, other = (suggested(policy) for _ in range(3))
    policy.finish(ended(fast, seconds=1.0))
    assert policy.observe(other.number, make_evaluation(5.0)) is Decision.CAP
    assert policy.observe(baseline.number, make_evaluation(5.0)) is Decision.CONTINUE
    assert math.isinf(baseline.cap_seconds)


@pytest.mark.parametrize(
    ("outcome", "metric", "known"),
    [
        (Outcome.REACHED, 0.9, (TrialState.COMPLETE, 7.5, {}, {})),
        *(
            (outcome, 0.65, (TrialState.PRUNED, 0.25, {1: 0.25}, {}))
            for outcome in Outcome
            if outcome.is_censored
        ),
        (Outcome.OUT_OF_MEMORY, None, (TrialState.PRUNED, None, {}, {"infeasible": 1.0})),
        (Outcome.DIVERGED, math.nan, (TrialState.PRUNED, None, {}, {"infeasible": 1.0})),
    ],
)
def test_optuna_is_told_a_score_or_a_distance_from_the_target_or_a_violated_constraint(
    outcome: Outcome, metric: float | None, known: tuple[Any, ...]
) -> None:
    study = new_study(optuna.samplers.TPESampler(seed=0))
    policy = policy_over(study)
    score = 7.5 if outcome is Outcome.REACHED else None
    assert policy.finish(ended(suggested(policy), outcome, seconds=7.5, metric=metric)) == score
    assert told(study) == known
    assert policy.scores == ({} if score is None else {0: 7.5})


def test_a_rejected_point_is_infeasible_and_costs_no_budget() -> None:
    study = new_study()
    policy = policy_over(study, num_trials=2)
    end_next(policy)
    rejected = suggested(policy)
    assert policy.num_trials_left == 0
    policy.reject(rejected.number, "batch_size: too large")
    assert policy.num_trials_left == 1
    state, _, _, constraints = told(study, rejected.number)
    assert (state, list(constraints.values())) == (TrialState.PRUNED, [1.0])
    end_next(policy)
    assert policy.suggest() == Done("budget")
    assert len(policy.results) == 2


@pytest.mark.parametrize("in_journal", [False, True])
def test_a_study_taken_up_again_loses_and_repeats_nothing(tmp_path: Path, in_journal: bool) -> None:
    study = journal_study(tmp_path) if in_journal else new_study()
    first = policy_over(study, num_trials=8)
    done = [end_next(first), end_next(first, Outcome.MISSED, metric=0.4)]
    running = [suggested(first), suggested(first)]
    known = dict(first.results)

    again = journal_study(tmp_path) if in_journal else study
    second = policy_over(again, num_trials=8)
    assert second.results == known
    assert second.num_trials_left == 4
    retried = [suggested(second), suggested(second)]
    assert retried == running, "with their numbers and seeds"
    assert not any(each.is_baseline for each in retried)
    fresh = suggested(second)
    assert fresh.suggestion not in [each.suggestion for each in (*done, *running)]
    for trial in (*retried, fresh):
        second.finish(ended(trial))
    while isinstance(second.suggest(), Start):
        pass
    assert len(second.results) == 5
    assert {each.number for each in done} < set(second.results)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.REACHED, TrialState.COMPLETE),
        (Outcome.MISSED, TrialState.PRUNED),
        (Outcome.DIVERGED, TrialState.PRUNED),
        (Outcome.ERRORED, TrialState.FAIL),
    ],
)
def test_a_result_kept_before_a_crash_is_told_after_it(
    tmp_path: Path, outcome: Outcome, state: TrialState
) -> None:
    study = journal_study(tmp_path)
    end_next(policy_over(study), outcome, seconds=6.0, metric=0.4)
    whole = told(study)
    journal = tmp_path / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    result_line = next(index for index, line in enumerate(lines) if b"autotune:result" in line)
    assert result_line < len(lines) - 1
    journal.write_bytes(b"".join(lines[: result_line + 1]))

    crashed = journal_study(tmp_path)
    assert crashed.trials[0].state is TrialState.RUNNING
    policy = policy_over(crashed)
    assert told(crashed) == whole
    assert crashed.trials[0].state is state
    assert policy.results[0].outcome is outcome


def test_errors_in_a_row_end_the_search_with_the_first_traceback() -> None:
    policy = policy_over(new_study(), max_errors_in_a_row=2)
    end_next(policy, Outcome.ERRORED, error="the first")
    assert isinstance(policy.suggest(), Start)
    end_next(policy, Outcome.ERRORED, error="the second")
    assert policy.error is not None
    assert str(policy.error) == "2 trials in a row failed; the first was trial 0: the first"
    assert policy.error.traceback_text == "the first"
    assert policy.suggest() == Done("error")


def test_errors_of_one_configuration_end_the_search_only_where_it_has_few() -> None:
    policy = policy_over(new_study(), max_errors_in_a_row=2)
    for number in range(6):
        assert policy.error is None
        trial = suggested(policy)
        policy.finish(ended(trial, Outcome.ERRORED, error=f"error {number}"))
        policy.study.enqueue_trial(SPACE.params_of(trial.suggestion))
    assert policy.error is not None


def test_errors_on_one_device_of_several_do_not_end_the_search() -> None:
    policy = policy_over(new_study(), max_errors_in_a_row=2)
    policy.is_everywhere = lambda devices: len(devices) > 1
    for device in ("a", "a", "a"):
        policy.finish(replace(ended(suggested(policy), Outcome.ERRORED), device=device))
        assert policy.error is None
    policy.finish(replace(ended(suggested(policy), Outcome.ERRORED), device="b"))
    assert policy.error is not None


def test_trials_of_one_configuration_have_the_expected_score_of_its_runs() -> None:
    policy = policy_over(new_study(), stopping=CapAtIncumbent(objective=OBJECTIVE, cap_margin=1.0))
    first = end_next(policy, seconds=10.0)
    policy.study.enqueue_trial(SPACE.params_of(first.suggestion))
    again = end_next(policy, seconds=30.0)
    policy.study.enqueue_trial(SPACE.params_of(first.suggestion))
    end_next(policy, Outcome.MISSED, seconds=8.0, metric=0.5)
    other = end_next(policy, seconds=12.0)
    assert again.suggestion == first.suggestion
    assert again.seed != first.seed
    assert policy.expected_scores == {first.number: 24.0, again.number: 24.0, other.number: 12.0}
    assert policy.scores == {first.number: 10.0, again.number: 30.0, other.number: 12.0}
    assert [other.cap_seconds, suggested(policy).cap_seconds] == [24.0, 12.0], "no lucky run caps"


def test_a_sampler_that_models_scores_says_what_trials_must_beat_and_is_told_what_was_refused() -> (
    None
):
    class Models(PausesAtFirst):
        def score_to_beat(self, number: int) -> float:
            return 40.0 + number

        def expected_scores(self) -> dict[int, float]:
            return {0: 11.0}

        def rejected(self, suggestion: Suggestion) -> None:
            refused.append(suggestion)

    refused: list[Suggestion] = []
    points = [
        BASELINE,
        Suggestion({**BASELINE.values, "epochs": 30}),
        Suggestion({**BASELINE.values, "epochs": 40}),
    ]
    settings: dict[str, Any] = {
        "baseline": None,
        "stopping": CapAtIncumbent(objective=OBJECTIVE, cap_margin=2.0),
    }
    study = new_study()
    policy = policy_over(study, sampler=Models(points), **settings)
    first, second, third = suggested(policy), suggested(policy), suggested(policy)
    assert [each.cap_seconds for each in (first, second, third)] == [80.0, 82.0, 84.0]
    policy.finish(ended(first, seconds=10.0))
    assert policy.expected_scores == {0: 11.0}
    assert (
        policy.observe(second.number, make_evaluation(81.0), may_pause=False) is Decision.CONTINUE
    )
    assert policy.observe(second.number, make_evaluation(83.0), may_pause=False) is Decision.CAP
    policy.reject(third.number, "refused")
    assert refused == [points[2]]
    policy_over(study, sampler=Models([]), **settings)
    assert refused == [points[2]] * 2, "a process that takes the study up tells it again"


def test_a_worker_that_did_not_measure_what_the_objective_needs_ends_the_search() -> None:
    policy = policy_over(
        new_study(), objective=Cost(num_trainings=1, price_per_hour={"cpu": 1.0}, currency="USD")
    )
    first, second = suggested(policy), suggested(policy)
    assert policy.finish(
        replace(ended(first), evaluations=(make_evaluation(36.0, metric=0.9, device_kind="cpu"),))
    ) == pytest.approx(0.01)
    assert (
        policy.observe(second.number, make_evaluation(1.0, device_kind="NVIDIA H200"))
        is Decision.STOP
    )
    assert isinstance(policy.error, ConfigError)
    assert (
        "a worker trains on 'NVIDIA H200', and cluster.price_per_hour has only prices of 'cpu'"
        in str(policy.error)
    )
    assert (
        policy.finish(
            replace(
                ended(second, Outcome.STOPPED),
                evaluations=(make_evaluation(1.0, device_kind="NVIDIA H200"),),
            )
        )
        is None
    )
    assert list(policy.results) == [0]
    assert policy.suggest() == Done("error")


@cache
def shipped(sampler: str) -> tuple[SearchSpace, Suggestion | None, Mapping[str, Any]]:
    """Space, baseline and sampler node of the shipped experiment."""
    composer = Composer(["experiment=cnn", f"search={sampler}"])
    composed = composer.compose()
    space = read_search_space(composed.config.search_space, composer)
    return space, space.point_of(composed.lookup), composed.config.search.sampler


def made_up(trial: Run) -> TrialResult:
    """Fast where the rate is near its best, the batch large and the schedule short.

    Every way of ending occurs.
    """
    values = trial.suggestion.values
    best = {"sgd": 0.1, "adamw": 3e-3}[values["optimizer"]]
    miss = abs(math.log10(values["optimizer.lr"] / best))
    if values["model.widths"] == [32, 64] and values["batch_size"] == 512:
        return ended(trial, Outcome.OUT_OF_MEMORY, metric=None)
    if miss > 1.5:
        return ended(trial, Outcome.DIVERGED, metric=math.nan)
    if miss > 1:
        return ended(trial, Outcome.MISSED, metric=0.9 - 0.1 * miss)
    return ended(trial, seconds=values["epochs"] * (1 + miss) * 64 / values["batch_size"] + 1)


@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(path.stem, marks=[pytest.mark.slow] if path.stem == "gp" else [])
        for path in sorted((shipped_folder("conf") / "search").glob("*.yaml"))
        if "optuna.samplers" in path.read_text()
    ],
)
def test_every_shipped_sampler_searches_the_shipped_space_without_a_word(
    sampler: str, caplog: pytest.LogCaptureFixture
) -> None:
    space, baseline, node = shipped(sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_optuna()
        study = new_study(build({**node, "seed": 0}, (), "search.sampler"))
        policy = policy_over(study, space=space, baseline=baseline, num_trials=15)
        opened = set()
        while isinstance(answer := policy.suggest(), Start):
            trial = answer.trial
            values = trial.suggestion.values
            assert ("optimizer.momentum" in values) == (values["optimizer"] == "sgd")
            assert space.point_of(values.get) == trial.suggestion
            opened.add(values["optimizer"])
            policy.finish(made_up(trial))
    assert len(policy.results) == 15
    assert opened == {"sgd", "adamw"}
    assert policy.scores
    assert [each.getMessage() for each in caplog.records if each.name.startswith("optuna")] == []


@pytest.mark.parametrize("sampler", ["random", "cmaes", pytest.param("gp", marks=pytest.mark.slow)])
def test_every_evaluation_is_reported_where_the_sampler_proposes_the_same_without(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, baseline, node = shipped(sampler)

    def searched() -> tuple[list[Suggestion], list[Mapping[int, float]]]:
        study = new_study(build({**node, "seed": 0}, (), "search.sampler"))
        policy, tried = policy_over(study, space=space, baseline=baseline, num_trials=15), []
        while isinstance(answer := policy.suggest(), Start):
            result = made_up(answer.trial)
            earlier = [make_evaluation(0.1, metric=0.1 * n) for n in range(len(tried) % 4)]
            policy.finish(replace(result, evaluations=(*earlier, *result.evaluations)))
            tried.append(answer.trial.suggestion)
        return tried, [trial.intermediate_values for trial in study.trials]

    tried, curves = searched()
    monkeypatch.setattr("autotune.search.scheduler.reads_no_reports", lambda sampler: False)
    others, shortfalls = searched()
    assert tried == others
    assert {len(curve) for curve in curves} >= {2, 3, 4}
    assert {len(shortfall) for shortfall in shortfalls} <= {0, 1}


def test_samplers_that_rank_stopped_trials_by_their_last_report_get_one_report() -> None:
    assert not reads_no_reports(optuna.samplers.TPESampler())
    assert not reads_no_reports(optuna.samplers.CmaEsSampler(consider_pruned_trials=True))


FINITE = SearchSpace.from_mapping(
    {"optimizer": ["sgd", "adamw"], "batch_size": {"type": "power_of_two", "low": 16, "high": 64}},
    "",
)
"""Six points."""


@pytest.mark.parametrize("make", [optuna.samplers.RandomSampler, optuna.samplers.TPESampler])
def test_each_point_of_a_finite_space_is_tried_once(make: Any) -> None:
    first = Suggestion({"optimizer": "sgd", "batch_size": 32})
    policy = policy_over(
        new_study(make(seed=0)), space=FINITE, baseline=first, num_trials=100, max_errors_in_a_row=9
    )
    ends = [Outcome.REACHED, Outcome.MISSED, Outcome.CAPPED, Outcome.ERRORED, Outcome.OUT_OF_MEMORY]
    tried = [end_next(policy, outcome).suggestion for outcome in ends]
    assert tried[0] == first
    last = suggested(policy)  # and while it is trained
    assert {point.key for point in (*tried, last.suggestion)} == {
        point.key for point in points(FINITE)
    }
    assert policy.suggest() == Wait()
    policy.finish(ended(last))
    assert policy.suggest() == Done("exhausted")
