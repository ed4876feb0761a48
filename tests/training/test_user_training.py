"""Training functions of the user's own: those below are such functions, made for one test each."""

import multiprocessing
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import autotune
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target
from autotune.outcome import Outcome
from autotune.training.run import check_training, start_training
from autotune.training.user_training import TrainingClock, check_function

Report = Callable[..., None]


class Ticking:
    """A clock, in place of the ``time`` module, that goes on by one each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


TICKING = Ticking()


def rising(num_evaluations: int, step: float = 0.25) -> Iterator[Mapping[str, Any]]:
    """Yields a metric that rises by ``step`` from 0."""
    for index in range(num_evaluations):
        yield {"metric": index * step, "samples": 100 * (index + 1)}


def reporting(report: Report, num_evaluations: int, step: float = 0.25) -> None:
    """Reports what ``rising`` yields."""
    for index in range(num_evaluations):
        report(index * step, samples=100 * (index + 1))


def telling(
    config: TrialConfig, seed: int, device: torch.device, clock: TrainingClock
) -> Iterator[Mapping[str, Any]]:
    """Yields what it was given, as far as numbers can tell."""
    given = (
        isinstance(config, TrialConfig)
        and isinstance(device, torch.device)
        and isinstance(clock, TrainingClock)
    )
    yield {
        "metric": float(given),
        "loss": float(torch.rand(1)),
        "step": 7,
        "epoch": 0.5,
        "samples": seed,
    }


def failing(report: Report) -> None:
    report(0.1)
    raise ZeroDivisionError("the batch was empty")


def failing_generator() -> Iterator[Mapping[str, Any]]:
    yield {"metric": 0.1}
    raise ZeroDivisionError("the batch was empty")


def in_phases(clock: TrainingClock) -> Iterator[Mapping[str, Any]]:
    with clock.building():
        TICKING.now += 1000
    TICKING.now += 20
    with clock.evaluating():
        TICKING.now += 3000
    yield {"metric": 0.1}
    with clock.evaluating():
        yield {"metric": 0.2}
        TICKING.now += 3000
    yield {"metric": 0.3}


def in_phases_reported(report: Report, clock: TrainingClock) -> None:
    for evaluation in in_phases(clock):
        report(**evaluation)


def saying(value: Any, key: str = "metric") -> Iterator[Mapping[str, Any]]:
    yield {"metric": 0.5, key: value}


def silent(report: Report) -> None:
    """Never reports."""


def unable(batch_size: int) -> float:
    return 0.5


MakeConfig = Callable[..., TrialConfig]


@pytest.fixture
def own(trial_config: MakeConfig) -> MakeConfig:
    """Makes configurations of a training function here; targets 0.5, and no time limit."""

    def make(
        function: Callable[..., Any],
        *,
        max_train_seconds: float = 1e9,
        seed: int = 0,
        **arguments: Any,
    ) -> TrialConfig:
        return trial_config(
            training={"_target_": f"{__name__}.{function.__name__}", **arguments},
            target=Target(
                metric="score", value=0.5, mode="max", max_train_seconds=max_train_seconds
            ),
            allowed_targets=(__name__,),
            seed=seed,
        )

    return make


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    monkeypatch.setattr("autotune.measurement.time", TICKING)
    return TICKING


def run(config: TrialConfig, **settings: Any) -> list[Evaluation]:
    return list(start_training(config, **settings))


def training_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "training"]


both_kinds = pytest.mark.parametrize("function", [rising, reporting])


@both_kinds
def test_a_function_runs_until_it_reaches_the_target(
    own: MakeConfig, function: Callable[..., Any]
) -> None:
    evaluations = run(own(function, num_evaluations=10))
    assert [each.metric for each in evaluations] == [0, 0.25, 0.5]
    assert [each.outcome for each in evaluations] == [None, None, Outcome.REACHED]
    assert [each.samples for each in evaluations] == [100, 200, 300]
    assert [each.step for each in evaluations] == [1, 2, 3]
    assert training_threads() == []


def test_a_function_is_given_what_its_signature_names(own: MakeConfig) -> None:
    first, again, other = (run(own(telling, seed=seed))[0] for seed in (11, 11, 12))
    assert (first.metric, first.step, first.epoch, first.samples) == (1.0, 7, 0.5, 11)
    assert first.loss == again.loss
    assert first.loss != other.loss


@pytest.mark.parametrize(
    ("function", "frame"), [(failing, "failing"), (failing_generator, "failing_generator")]
)
def test_an_exception_surfaces_with_its_traceback(
    own: MakeConfig, function: Callable[..., Any], frame: str
) -> None:
    training = start_training(own(function))
    next(training)
    with pytest.raises(ZeroDivisionError, match="the batch was empty") as raised:
        next(training)
    assert frame in [each.name for each in traceback.extract_tb(raised.value.__traceback__)]
    assert training_threads() == []


@pytest.mark.parametrize("function", [in_phases, in_phases_reported])
def test_building_and_evaluating_are_not_training(
    own: MakeConfig, ticking: Ticking, function: Callable[..., Any]
) -> None:
    first, second, third = run(own(function))
    assert 1000 <= first.build_seconds < 1020
    assert 20 <= first.train_seconds < 40
    assert 3000 <= first.evaluate_seconds < 3020
    assert third.build_seconds == first.build_seconds
    assert third.train_seconds < 60
    assert second.evaluate_seconds < 3040
    assert 6000 <= third.evaluate_seconds < 6060


def test_the_thread_ends_with_a_training_that_is_stopped(own: MakeConfig) -> None:
    training = start_training(own(reporting, num_evaluations=10))
    next(training)
    assert len(training_threads()) == 1
    training.close()
    assert training_threads() == []


@pytest.mark.parametrize(
    ("value", "key", "said"),
    [
        ("high", "metric", "reported metric as str, which is not a number"),
        (None, "loss", "reported loss as NoneType, which is not a number"),
        ([1, 2], "step", "reported step as list, which is not a number"),
        (float("nan"), "samples", "reported samples=nan, which is not finite"),
        ("0.95", "metric", r"reported metric as str, which is not a number \(found '0.95'\)"),
        (True, "metric", "reported metric as bool, which is not a number"),
        ("high", "accuracy", "reported accuracy as str, which is not a number"),
    ],
)
def test_a_report_of_the_wrong_kind_is_refused_in_one_line(
    own: MakeConfig, value: Any, key: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        run(own(saying, value=value, key=key))
    assert "\n" not in str(refused.value)
    assert f"{__name__}.saying" in str(refused.value)


@pytest.mark.parametrize("said", [{"score": 0.5, "f1": 0.1}, {"metric": 0.5, "f1": 0.1}])
def test_the_metric_goes_by_its_own_name_too(own: MakeConfig, said: dict[str, float]) -> None:
    for function in (yielding, reporting_by_name, reporting_a_mapping):
        (evaluation,) = run(own(function, said=said))
        assert (evaluation.metric, evaluation.metrics, evaluation.outcome) == (
            0.5,
            {"f1": 0.1},
            Outcome.REACHED,
        )


def yielding(said: Mapping[str, float]) -> Iterator[Mapping[str, float]]:
    yield said


def reporting_by_name(said: Mapping[str, float]) -> None:
    autotune.report(**said)


def reporting_a_mapping(report: Report, said: Mapping[str, float]) -> None:
    report(dict(said))


def test_a_report_from_another_thread_is_refused_there(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="call it in the thread that trains"):
        run(own(reporting_aside))


def reporting_aside() -> None:
    with ThreadPoolExecutor() as threads:
        threads.submit(autotune.report, 0.5).result()


def in_a_process(queue: "multiprocessing.SimpleQueue[str]") -> None:
    try:
        autotune.report(0.5)
    except ConfigError as error:
        queue.put(str(error))
    else:
        queue.put("reported")


def reporting_in_processes() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=in_a_process, args=(queue,))
    process.start()
    process.join()
    autotune.report(float("call it in the process that trains" in queue.get()) / 4)


def test_a_report_from_a_process_that_the_function_starts_is_refused_there(own: MakeConfig) -> None:
    assert [evaluation.metric for evaluation in run(own(reporting_in_processes))] == [0.25]


@pytest.mark.parametrize(
    ("limits", "reached"),
    [
        ({"at_most": 20}, 3),
        ({"at_least": 35}, 0),
        ({"at_most": 30, "at_least": 25}, 2),
        ({"at_most": 5}, None),
    ],
)
def test_an_evaluation_reaches_the_target_only_where_it_keeps_the_constraints(
    own: MakeConfig, limits: dict[str, float], reached: int | None
) -> None:
    config = own(getting_lighter)
    target = Target(
        metric="accuracy",
        value=0.5,
        mode="max",
        max_train_seconds=1e9,
        constraints={"latency": limits},
    )
    evaluations = run(replace(config, target=target))
    outcomes = [evaluation.outcome for evaluation in evaluations]
    assert outcomes == [None] * (3 if reached is None else reached) + [
        Outcome.REACHED if reached is not None else None
    ]
    shortfalls = [evaluation.shortfall(target) for evaluation in evaluations]
    assert all(
        shortfall > 0
        for shortfall, outcome in zip(shortfalls, outcomes, strict=True)
        if outcome is None
    )


def getting_lighter() -> Iterator[Mapping[str, float]]:
    for latency in (50, 40, 30, 20):
        yield {"accuracy": 0.6, "latency": latency}


def test_a_function_that_never_reports_is_refused(own: MakeConfig) -> None:
    for config in (own(silent), own(unable, batch_size=1)):
        with pytest.raises(ConfigError, match="ended without one evaluation"):
            run(config)
    assert training_threads() == []


def test_a_function_with_other_arguments_is_refused_before_it_runs(own: MakeConfig) -> None:
    with pytest.raises(
        ConfigError, match="unable: missing a required argument: 'batch_size'; it takes batch_size"
    ):
        check_training(own(unable))
    with pytest.raises(
        ConfigError,
        match="unable: got an unexpected keyword argument 'batches'; it takes batch_size",
    ):
        check_training(own(unable, batch_size=1, batches=1))
    for function in (rising, reporting):
        check_function(own(function, num_evaluations=1))
