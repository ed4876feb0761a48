"""Training functions of the user's own: those below are such functions, made for one test each."""

import contextlib
import json
import math
import multiprocessing
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import autotune
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target
from autotune.outcome import Outcome
from autotune.session import further_metrics
from autotune.training.parallel.ranks import Ranks
from autotune.training.run import check_training, start_training
from autotune.training.user_training import TrainingClock, check_own, train_own

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


def telling(config: TrialConfig, seed: int, device: torch.device, clock: TrainingClock) -> Iterator[Mapping[str, Any]]:
    """Yields what it was given, as far as numbers can tell."""
    given = isinstance(config, TrialConfig) and isinstance(device, torch.device) and isinstance(clock, TrainingClock)
    yield {"metric": float(given), "loss": float(torch.rand(1)), "step": 7, "epoch": 0.5, "samples": seed}


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


_LEFT: list["weakref.ref[threading.Event]"] = []
"""What calls of ``littering`` left in reference cycles."""


def littering(report: Report) -> None:
    """Reports how many of the earlier calls' leavings are still there, and leaves some."""
    alive = sum(left() is not None for left in _LEFT)
    cycle: list[Any] = [held := threading.Event()]
    cycle.append(cycle)
    _LEFT.append(weakref.ref(held))
    report(float(alive))


def stubborn(report: Report) -> None:
    """Catches all that it can, and reports again."""
    for _ in range(3):
        with contextlib.suppress(BaseException):
            report(0.1)
    while True:
        report(0.1)


def saying(value: Any, key: str = "metric") -> Iterator[Mapping[str, Any]]:
    yield {"metric": 0.5, key: value}


def saying_itself(value: Any) -> Iterator[Any]:
    yield value


def silent(report: Report) -> None:
    """Never reports."""


def unable(batch_size: int) -> float:
    return 0.5


MakeConfig = Callable[..., TrialConfig]


@pytest.fixture
def own(trial_config: MakeConfig) -> MakeConfig:
    """Makes configurations of a training function here; targets 0.5, and no time limit."""

    def make(function: Callable[..., Any], *, max_train_seconds: float = 1e9, seed: int = 0, **arguments: Any) -> TrialConfig:
        return trial_config(
            training={"_target_": f"{__name__}.{function.__name__}", **arguments},
            target=Target(metric="score", value=0.5, mode="max", max_train_seconds=max_train_seconds),
            allowed_targets=(__name__,),
            seed=seed,
        )

    return make


@pytest.fixture(autouse=True)
def _first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process in which no training function was called before."""
    monkeypatch.setattr("autotune.training.first_call._paid", {})


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
def test_a_function_runs_until_it_reaches_the_target(own: MakeConfig, function: Callable[..., Any]) -> None:
    evaluations = run(own(function, num_evaluations=10))
    assert [each.metric for each in evaluations] == [0, 0.25, 0.5]
    assert [each.outcome for each in evaluations] == [None, None, Outcome.REACHED]
    assert [each.samples for each in evaluations] == [100, 200, 300]
    assert [each.step for each in evaluations] == [1, 2, 3]
    assert training_threads() == []


@both_kinds
def test_a_function_that_ends_early_leaves_no_outcome(own: MakeConfig, function: Callable[..., Any]) -> None:
    evaluations = run(own(function, num_evaluations=2))
    assert [each.outcome for each in evaluations] == [None, None]
    assert training_threads() == []


@both_kinds
def test_a_function_past_its_cap_is_capped(own: MakeConfig, function: Callable[..., Any]) -> None:
    assert [each.outcome for each in run(own(function, num_evaluations=10), cap_seconds=0)] == [Outcome.CAPPED]
    assert training_threads() == []


@both_kinds
def test_a_function_past_its_time_is_timed_out(own: MakeConfig, function: Callable[..., Any]) -> None:
    config = own(function, num_evaluations=10, max_train_seconds=1e-12)
    assert [each.outcome for each in run(config)] == [Outcome.TIMED_OUT]


@both_kinds
def test_a_metric_in_float32_reaches_a_target_in_tenths(own: MakeConfig, function: Callable[..., Any]) -> None:
    just_short = 0.5 - 1e-8
    assert run(own(function, num_evaluations=2, step=just_short))[-1].outcome is Outcome.REACHED


def test_a_metric_that_is_not_finite_is_divergence(own: MakeConfig) -> None:
    assert run(own(saying, value=float("nan")))[-1].outcome is Outcome.DIVERGED
    assert run(own(saying, value=float("inf"), key="loss"))[-1].outcome is Outcome.DIVERGED


def test_a_function_is_given_what_its_signature_names(own: MakeConfig) -> None:
    first, again, other = (run(own(telling, seed=seed))[0] for seed in (11, 11, 12))
    assert (first.metric, first.step, first.epoch, first.samples) == (1.0, 7, 0.5, 11)
    assert first.loss == again.loss
    assert first.loss != other.loss


@pytest.mark.parametrize(("function", "frame"), [(failing, "failing"), (failing_generator, "failing_generator")])
def test_an_exception_surfaces_with_its_traceback(own: MakeConfig, function: Callable[..., Any], frame: str) -> None:
    training = start_training(own(function))
    next(training)
    with pytest.raises(ZeroDivisionError, match="the batch was empty") as raised:
        next(training)
    assert frame in [each.name for each in traceback.extract_tb(raised.value.__traceback__)]
    assert training_threads() == []


@pytest.mark.parametrize("function", [in_phases, in_phases_reported])
def test_building_and_evaluating_are_not_training(own: MakeConfig, ticking: Ticking, function: Callable[..., Any]) -> None:
    first, second, third = run(own(function))
    assert 1000 <= first.build_seconds < 1020
    assert 20 <= first.train_seconds < 40
    assert 3000 <= first.evaluate_seconds < 3020
    assert third.build_seconds == first.build_seconds
    assert third.train_seconds < 60
    assert second.evaluate_seconds < 3040
    assert 6000 <= third.evaluate_seconds < 6060


def test_the_clock_stands_still_while_the_training_is_suspended(own: MakeConfig, ticking: Ticking) -> None:
    evaluations = []
    for evaluation in start_training(own(reporting, num_evaluations=3)):
        evaluations.append(evaluation)
        ticking.now += 1e6
    assert evaluations[-1].train_seconds < 100


def test_a_function_finds_nothing_that_earlier_calls_left_in_reference_cycles(own: MakeConfig) -> None:
    _LEFT.clear()
    for _ in range(2):
        with contextlib.closing(start_training(own(littering))) as training:
            assert next(training).metric == 0.0
    assert len(_LEFT) == 2


def test_the_thread_ends_with_a_training_that_is_stopped(own: MakeConfig) -> None:
    training = start_training(own(reporting, num_evaluations=10))
    next(training)
    assert len(training_threads()) == 1
    training.close()
    assert training_threads() == []


def test_the_thread_ends_even_where_the_function_goes_on_reporting(own: MakeConfig) -> None:
    training = start_training(own(stubborn))
    next(training)
    training.close()
    assert training_threads() == []


@pytest.mark.parametrize(
    ("value", "key", "said"),
    [
        ("high", "metric", "reported metric as str, accepted is a number"),
        (None, "loss", "reported loss as NoneType, accepted is a number"),
        ([1, 2], "step", "reported step as list, accepted is a number"),
        (float("nan"), "samples", "reported samples=nan, accepted is a finite number"),
        ("0.95", "metric", r"reported metric as str, accepted is a number \(found '0.95'\)"),
        (True, "metric", "reported metric as bool, accepted is a number"),
        (np.bool_(True), "metric", "reported metric as bool, accepted is a number"),
        (torch.tensor(True), "metric", "reported metric as Tensor, accepted is a number"),
        (10**400, "metric", "reported metric as int, accepted is a number"),
        ("high", "accuracy", "reported accuracy as str, accepted is a number"),
    ],
)
def test_a_report_of_the_wrong_kind_is_refused_in_one_line(own: MakeConfig, value: Any, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        run(own(saying, value=value, key=key))
    assert "\n" not in str(refused.value)
    assert f"{__name__}.saying" in str(refused.value)


@pytest.mark.parametrize("value", [0.5, {}, {1: 2, "loss": 3}])
def test_a_yield_that_is_no_evaluation_is_refused_in_one_line(own: MakeConfig, value: Any) -> None:
    with pytest.raises(ConfigError, match="accepted is metric, any of epoch, loss, samples, step, and further metrics by name") as refused:
        run(own(saying_itself, value=value))
    assert "\n" not in str(refused.value)


NAMES = (
    "d_loss", "g_loss", "q_loss", "r_loss", "loss_d", "loss1", "losses", "vloss", "step1", "t_step", "my_metric", "symmetric", "geometric",
    "examples", "n_samples", "n_epoch", "epochs", "Loss",
)  # fmt: skip
"""Names that look like those which a report gives a meaning to, and are none of them."""


@pytest.mark.parametrize("name", NAMES)
def test_only_the_exact_names_have_a_meaning(own: MakeConfig, name: str) -> None:
    config = own(saying, value=3.0, key=name)
    for at_most, outcome in ((3.0, Outcome.REACHED), (2.0, None)):
        constrained = replace(config.target, constraints={name: {"at_most": at_most}})
        (evaluation,) = run(replace(config, target=constrained))
        assert (evaluation.metrics, evaluation.outcome) == ({name: 3.0}, outcome)


@pytest.mark.parametrize("name", [*NAMES, "loss"])
def test_what_a_callback_measures_beside_its_metric_is_reported_by_its_name(name: str) -> None:
    assert further_metrics({name: 3.0, "accuracy": 0.5, "epoch": 1, "step": 7}, "accuracy") == {name: 3.0}


def test_a_metric_that_is_missing_is_told_with_a_name_that_is_close_to_it(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"reported \['scores'\], .*; metric may be called score, too \(did you mean it by scores\?\)"):
        run(own(saying_itself, value={"scores": 0.5}))


def test_a_throughput_that_is_not_known_is_told_as_none(own: MakeConfig) -> None:
    assert math.isnan(run(own(saying_itself, value={"score": 0.5}))[0].samples_per_second)
    assert run(own(saying_itself, value={"score": 0.5, "samples": 8}))[0].samples_per_second > 0


def test_further_metrics_are_kept_and_decide_nothing(own: MakeConfig) -> None:
    (evaluation,) = run(own(saying, value=float("nan"), key="f1"))
    assert list(evaluation.metrics) == ["f1"]
    assert evaluation.outcome is Outcome.REACHED
    restored = Evaluation.from_dict(json.loads(json.dumps(evaluation.as_dict())))
    assert list(restored.metrics) == ["f1"]
    assert run(own(rising, num_evaluations=1))[0].metrics == {}


@pytest.mark.parametrize("said", [{"score": 0.5, "f1": 0.1}, {"metric": 0.5, "f1": 0.1}])
def test_the_metric_goes_by_its_own_name_too(own: MakeConfig, said: dict[str, float]) -> None:
    for function in (yielding, reporting_by_name, reporting_a_mapping):
        (evaluation,) = run(own(function, said=said))
        assert (evaluation.metric, evaluation.metrics, evaluation.outcome) == (0.5, {"f1": 0.1}, Outcome.REACHED)


def yielding(said: Mapping[str, float]) -> Iterator[Mapping[str, float]]:
    yield said


def reporting_by_name(said: Mapping[str, float]) -> None:
    autotune.report(**said)


def reporting_a_mapping(report: Report, said: Mapping[str, float]) -> None:
    report(dict(said))


def test_more_than_the_metric_by_position_is_refused_in_one_line_outside_a_trial_too(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"found 2 arguments by position \(3, 0.5\), accepted is the metric alone") as refused:
        autotune.report(3, 0.5)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"found 2 arguments by position \(0, 0.5\)"):
        run(own(reporting_by_position))


def reporting_by_position(report: Report) -> None:
    report(0, 0.5)


def test_a_report_from_another_thread_is_told_where_the_thread_does_not_tell_it(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="accepted is the thread that trains"):
        run(own(reporting_aside))


def reporting_aside() -> None:
    def report() -> None:
        with contextlib.suppress(ConfigError):
            autotune.report(0.5)

    thread = threading.Thread(target=report)
    thread.start()
    thread.join()


def in_a_process(queue: "multiprocessing.SimpleQueue[str]") -> None:
    try:
        autotune.report(0.5)
    except ConfigError as error:
        queue.put(str(error))
    else:
        queue.put("reported")


def reporting_in_processes() -> None:
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=in_a_process, args=(queue,))
        process.start()
        process.join()
        autotune.report(float("accepted is the process that trains" in queue.get()) / 4)


def test_a_report_from_a_process_that_the_function_starts_is_refused_there(own: MakeConfig) -> None:
    assert [evaluation.metric for evaluation in run(own(reporting_in_processes))] == [0.25, 0.25]


def tuning_within(report: Report) -> None:
    with pytest.raises(ConfigError, match="tune: was called within a trial"):
        autotune.tune(reporting_by_name, space={"said": [1]}, target=autotune.target("score", at_least=1, max_seconds=1))
    report(0.5)


def test_a_study_within_a_trial_is_refused(own: MakeConfig) -> None:
    assert run(own(tuning_within))[-1].outcome is Outcome.REACHED


@pytest.mark.parametrize(
    ("limits", "reached"),
    [({"at_most": 20}, 3), ({"at_least": 35}, 0), ({"at_most": 30, "at_least": 25}, 2), ({"at_most": 5}, None)],
)
def test_an_evaluation_reaches_the_target_only_where_it_keeps_the_constraints(
    own: MakeConfig, limits: dict[str, float], reached: int | None
) -> None:
    config = own(getting_lighter)
    target = Target(metric="accuracy", value=0.5, mode="max", max_train_seconds=1e9, constraints={"latency": limits})
    evaluations = run(replace(config, target=target))
    outcomes = [evaluation.outcome for evaluation in evaluations]
    assert outcomes == [None] * (3 if reached is None else reached) + [Outcome.REACHED if reached is not None else None]
    shortfalls = [evaluation.shortfall(target) for evaluation in evaluations]
    assert all(shortfall > 0 for shortfall, outcome in zip(shortfalls, outcomes, strict=True) if outcome is None)


def getting_lighter() -> Iterator[Mapping[str, float]]:
    for latency in (50, 40, 30, 20):
        yield {"accuracy": 0.6, "latency": latency}


def test_a_constraint_of_what_is_not_reported_is_one_line(own: MakeConfig) -> None:
    target = Target(metric="accuracy", value=0.5, mode="max", max_train_seconds=1e9, constraints={"memory": {"at_most": 20}})
    with pytest.raises(ConfigError, match=r"getting_lighter reported no memory, which target\.constraints bounds"):
        run(replace(own(getting_lighter), target=target))


@pytest.mark.parametrize("limits", [20, {}, {"below": 20}, {"at_most": "20"}, {"at_most": float("nan")}, [1]])
def test_a_constraint_that_is_no_bound_is_one_line(own: MakeConfig, limits: Any) -> None:
    target = Target(metric="accuracy", value=0.5, mode="max", max_train_seconds=1e9, constraints={"latency": limits})
    with pytest.raises(ConfigError, match=r"target.constraints.latency: found .*, accepted is at_most, at_least or both"):
        replace(own(getting_lighter), target=target)


def test_a_tensor_of_one_number_is_a_number(own: MakeConfig) -> None:
    config = own(saying, value=0.0)
    training = train_own(config, cap_seconds=1e9, num_threads=1)
    assert next(training).metric == 0
    assert run(own(tensor_saying))[-1].outcome is Outcome.REACHED


def tensor_saying() -> Iterator[Mapping[str, Any]]:
    yield {"metric": torch.tensor([0.5]), "samples": torch.tensor(3)}


def test_a_function_that_never_reports_is_refused(own: MakeConfig) -> None:
    for config in (own(silent), own(unable, batch_size=1)):
        with pytest.raises(ConfigError, match="ended without one evaluation"):
            run(config)
    assert training_threads() == []


def test_a_function_of_ones_own_does_not_train_with_other_ranks(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"rising: found 2 ranks, accepted with a training function of one's own is 1$"):
        start_training(own(rising), ranks=Ranks(rank=0, size=2))


@pytest.mark.parametrize(("setting", "num_lines"), [({}, 0), ({"score_test": True}, 1)])
def test_a_test_score_that_is_asked_for_in_vain_is_told(
    own: MakeConfig, setting: dict[str, Any], num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "autotune.training.run")
    start_training(own(rising), **setting)
    assert [record.getMessage().partition(": no ")[2] for record in caplog.records] == ["test split is scored"] * num_lines


def test_a_function_with_other_arguments_is_refused_before_it_runs(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="unable: missing a required argument: 'batch_size'; accepted are batch_size"):
        check_training(own(unable))
    with pytest.raises(ConfigError, match="unable: got an unexpected keyword argument 'batches'; accepted are batch_size"):
        check_training(own(unable, batch_size=1, batches=1))
    for function in (rising, reporting):
        check_own(own(function, num_evaluations=1))


def misspelling(lr: float = 0.1) -> None:
    for epoch in range(3):
        autotune.report(scores=0.5, epoch=epoch)


def saying_too_much(report: Report) -> None:
    report(1, 0.5)


def reporting_rightly(report: Report, said: dict[str, float], epoch: int = 1) -> None:
    report(0.5, epoch=epoch)
    report(score=0.5)
    report(metric=0.5)
    report(**said)
    autotune.report(said)


def reporting_elsewhere() -> None:
    def report(name: str, epoch: int) -> None:
        autotune.report(*[0.5])

    report(name="a", epoch=1)


def test_a_report_without_a_metric_is_refused_before_anything_is_trained(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"misspelling reported \['epoch', 'scores'\], .* \(did you mean it by scores\?\)"):
        check_training(own(misspelling))
    with pytest.raises(ConfigError, match=r"found 2 arguments by position \(1, 0.5\)"):
        check_training(own(saying_too_much))
    check_training(own(reporting_rightly, said={"score": 0.5}))
    check_training(own(reporting_elsewhere))
