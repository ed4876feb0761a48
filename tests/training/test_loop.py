"""Training to a target on toy data: 256 images of 8x8 whose brightness tells their class."""

import math
import random
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target, as_measured, outcome_of
from autotune.outcome import Outcome
from autotune.training.device import seed_everything
from autotune.training.loop import train
from autotune.training.run import check_training, fingerprint, start_training

NUM_TRAIN = 256


def bright_images(num_classes: int = 2, noise: float = 1.0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Splits whose class is the images' brightness plus noise."""
    random_numbers = torch.Generator().manual_seed(1)
    splits = {}
    for name, size in (("train", NUM_TRAIN), ("validation", 100), ("test", 50)):
        targets = torch.arange(size) % num_classes
        inputs = noise * torch.randn(size, 1, 8, 8, generator=random_numbers) + targets.float().view(-1, 1, 1, 1) - 0.5
        splits[name] = (inputs, targets)
    return splits


class Flat(torch.nn.Linear):
    """A linear model whose constructor asks for nothing but its sizes."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.flatten(1))


def fraction_of_ten(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric that is always nine tenths, in float32."""
    return torch.tensor(0.9)


MakeConfig = Callable[..., TrialConfig]


@pytest.fixture
def toy(trial_config: MakeConfig) -> MakeConfig:
    """Makes configurations of the toy data and a net of 1 convolution, whose target no training reaches."""

    def make(*overrides: str, target: float = 2.0, max_train_seconds: float = 1000.0, **fields: Any) -> TrialConfig:
        values: dict[str, Any] = {
            "data": {"_target_": f"{__name__}.bright_images"},
            "model": {"_target_": "autotune.workloads.simple_cnn.SimpleCNN", "widths": [4], "norm": "batch"},
            "target": Target(metric="accuracy", value=target, mode="max", max_train_seconds=max_train_seconds),
            "allowed_targets": (__name__,),
            "batch_size": 32,
            "epochs": 2,
        }
        return trial_config(*overrides, **{**values, **fields})

    return make


def run(config: TrialConfig, **settings: Any) -> list[Evaluation]:
    return list(train(config, **settings))


def numbers(evaluations: list[Evaluation]) -> list[tuple[int, float, float]]:
    """What must be the same wherever and whenever a training runs."""
    return [(each.step, each.metric, each.loss) for each in evaluations]


class Ticking:
    """A clock, in place of the ``time`` module, that goes on by one each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    clock = Ticking()
    monkeypatch.setattr("autotune.measurement.time", clock)
    return clock


class StartingDevice:
    """A device that takes seconds when it is first asked for, waited for and metered, on a clock in place of the ``time`` module."""

    def __init__(self) -> None:
        self.now, self.joules = 0.0, 0.0
        self._has_started: set[str] = set()

    def perf_counter(self) -> float:
        return self.now

    def starting(self, what: str, seconds: float) -> None:
        self.now += 0.0 if what in self._has_started else seconds
        self._has_started.add(what)

    def picked(self, name: str) -> torch.device:
        self.starting("driver", 100.0)
        return torch.device("cpu")

    def wait(self) -> None:
        if "context" not in self._has_started:
            self.joules += 7.0
        self.starting("context", 20.0)

    def meter(self, device: torch.device) -> Callable[[], float]:
        self.starting("meter", 3.0)
        return lambda: self.joules


def one_report(report: Callable[[float], None]) -> None:
    """The shortest training function."""
    report(1.0)


@pytest.mark.parametrize("module", ["loop", "user_training"])
def test_what_a_device_takes_to_start_counts_as_building(toy: MakeConfig, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    device = StartingDevice()
    monkeypatch.setattr("autotune.measurement.time", device)
    for name, value in (("pick_device", device.picked), ("synchronizer", lambda _: device.wait), ("energy_meter", device.meter)):
        monkeypatch.setattr(f"autotune.training.{module}.{name}", value)
    training = None if module == "loop" else {"_target_": f"{__name__}.one_report"}
    first = next(start_training(toy(training=training)))
    assert (first.build_seconds, first.prepare_seconds, first.train_seconds) == (123.0, 0.0, 0.0)
    assert (first.build_joules, first.energy_joules) == (7.0, 0.0)


def test_training_ends_at_the_first_evaluation_past_the_target(toy: MakeConfig) -> None:
    metrics = [each.metric for each in run(toy(epochs=4))]
    target = max(metrics)
    first = metrics.index(target)
    reached = run(toy(epochs=4, target=target))
    assert [each.outcome for each in reached] == [*[None] * first, Outcome.REACHED]
    assert [each.metric for each in reached] == metrics[: first + 1]


def test_a_target_in_tenths_is_reached_by_a_metric_in_float32(toy: MakeConfig) -> None:
    metric = {"_target_": f"{__name__}.fraction_of_ten"}
    assert run(toy(target=0.9, metric=metric))[-1].outcome is Outcome.REACHED
    assert as_measured(float(np.float32(0.9))) == 0.9
    assert math.isnan(as_measured(math.nan))


def test_a_target_to_go_below_is_reached_from_above(toy: MakeConfig) -> None:
    loss = {"_target_": "torch.nn.functional.cross_entropy"}
    target = Target(metric="loss", value=1e9, mode="min", max_train_seconds=1000)
    ended = run(replace(toy(metric=loss), target=target))[-1]
    assert ended.outcome is Outcome.REACHED
    assert ended.metric == pytest.approx(ended.loss)


@pytest.mark.parametrize("batch_size", [8, 32, 48, 128])
def test_evaluations_come_at_the_same_number_of_samples_whatever_the_batch_size(toy: MakeConfig, batch_size: int) -> None:
    evaluations = run(toy(batch_size=batch_size, evaluate_every_samples=96))
    every = [each.samples for each in evaluations]
    total_samples = 2 * (NUM_TRAIN // batch_size) * batch_size
    marks = range(96, total_samples + 1, 96)
    expected = sorted({math.ceil(mark / batch_size) * batch_size for mark in marks} | {total_samples})
    assert every == expected
    assert [each.step * batch_size for each in evaluations] == every
    assert [each.epoch for each in evaluations] == [samples / NUM_TRAIN for samples in every]


def test_by_default_each_epoch_is_evaluated(toy: MakeConfig) -> None:
    assert [each.epoch for each in run(toy(epochs=3))] == [1, 2, 3]


def test_the_end_of_the_schedule_is_missed(toy: MakeConfig) -> None:
    outcomes = [each.outcome for each in run(toy(evaluate_every_samples=NUM_TRAIN * 10))]
    assert outcomes == [Outcome.MISSED]


def test_a_training_past_its_cap_is_capped_at_its_first_step(toy: MakeConfig) -> None:
    evaluations = run(toy(), cap_seconds=0)
    assert [(each.step, each.outcome) for each in evaluations] == [(1, Outcome.CAPPED)]


def test_a_training_past_its_time_is_timed_out_even_at_the_target(toy: MakeConfig) -> None:
    evaluations = run(toy(max_train_seconds=1e-9, target=0.0), cap_seconds=0)
    assert [(each.step, each.outcome) for each in evaluations] == [(1, Outcome.TIMED_OUT)]


def test_a_loss_that_is_not_finite_is_divergence(toy: MakeConfig) -> None:
    optimizer = {"_target_": "torch.optim.SGD", "lr": 1e38}
    last = run(toy(optimizer=optimizer, target=0.0))[-1]
    assert last.outcome is Outcome.DIVERGED
    assert not math.isfinite(last.loss)


def test_the_target_outranks_the_cap() -> None:
    target = Target(metric="accuracy", value=0.5, mode="max", max_train_seconds=10)
    ends = [
        outcome_of(target, 0.5, 0.1, 2, 2, 3, ended=False),
        outcome_of(target, 0.4, 0.1, 2, 2, 3, ended=True),
        outcome_of(target, 0.4, 0.1, 2, 2, 4, ended=True),
        outcome_of(target, 0.4, 0.1, 2, 2, 4, ended=False),
        outcome_of(target, math.nan, 0.1, 11, 2, 4, ended=False),
    ]
    assert ends == [Outcome.REACHED, Outcome.CAPPED, Outcome.MISSED, None, Outcome.DIVERGED]


def test_a_seed_gives_the_same_numbers_and_another_seed_others(toy: MakeConfig) -> None:
    first, again, other = (numbers(run(toy(seed=seed))) for seed in (3, 3, 4))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_seeding_reaches_every_global_generator() -> None:
    def draw() -> tuple[float, float, float]:
        seed_everything(5)
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert draw() == draw()


def test_a_training_is_the_same_after_another_one_in_the_process(toy: MakeConfig) -> None:
    config = toy(seed=7, optimizer={"_target_": "torch.optim.AdamW", "lr": 1e-3})
    first = numbers(run(config))
    run(toy("precision=bf16", "lr_schedule=one_cycle", runtime=replace(config.runtime, channels_last=True, num_threads=2), seed=1))
    torch.set_default_dtype(torch.float64)
    assert numbers(run(config)) == first


def test_the_clock_stands_still_while_the_training_is_suspended(toy: MakeConfig, ticking: Ticking) -> None:
    config = toy(epochs=3)
    undisturbed = run(config)
    suspended = []
    for evaluation in train(config):
        suspended.append(evaluation)
        ticking.now += 1e6

    def clocks(evaluations: list[Evaluation]) -> list[tuple[float, ...]]:
        return [(each.build_seconds, each.prepare_seconds, each.train_seconds, each.evaluate_seconds) for each in evaluations]

    assert clocks(suspended) == clocks(undisturbed)


def test_the_phases_sum_to_the_time_between_start_and_last_evaluation(toy: MakeConfig, ticking: Ticking) -> None:
    started = ticking.now + 1
    evaluations = run(toy(epochs=3))
    last = evaluations[-1]
    suspended = len(evaluations) - 1
    measured = last.build_seconds + last.prepare_seconds + last.train_seconds + last.evaluate_seconds
    assert measured == ticking.now - started - suspended
    assert min(last.build_seconds, last.prepare_seconds, last.train_seconds, last.evaluate_seconds) > 0


def test_throughput_is_counted_since_the_evaluation_before(toy: MakeConfig) -> None:
    first, second = run(toy(evaluate_every_samples=NUM_TRAIN))
    assert first.samples_per_second == pytest.approx(NUM_TRAIN / first.train_seconds)
    assert second.samples_per_second == pytest.approx(NUM_TRAIN / (second.train_seconds - first.train_seconds))
    assert second.peak_memory_bytes is not None
    assert second.peak_memory_bytes > 0


def test_a_batch_larger_than_the_data_is_the_whole_data(toy: MakeConfig) -> None:
    larger, whole = toy(batch_size=10_000), toy(batch_size=NUM_TRAIN)
    assert numbers(run(larger)) == numbers(run(whole))
    assert [each.samples for each in run(larger)] == [NUM_TRAIN, 2 * NUM_TRAIN]


def returned(training: Generator[Evaluation, None, float | None]) -> float | None:
    while True:
        try:
            next(training)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]  # what a generator returns is untyped in StopIteration


def test_the_test_split_is_scored_only_where_asked_for(toy: MakeConfig) -> None:
    config = toy(target=0.0)
    scored = returned(start_training(config, score_test=True))
    assert scored is not None
    assert 0 < scored <= 1
    assert returned(start_training(config)) is None


@pytest.mark.parametrize("override", ["precision=bf16", "runtime.channels_last=true", "data_path.on_device=false"])
def test_every_way_of_running_learns(toy: MakeConfig, override: str) -> None:
    last = run(toy(override, epochs=8, target=0.9))[-1]
    assert last.outcome is Outcome.REACHED


def test_bf16_computes_other_numbers_than_fp32(toy: MakeConfig) -> None:
    assert numbers(run(toy("precision=bf16"))) != numbers(run(toy("precision=fp32")))


def test_channels_last_computes_what_the_usual_format_does(toy: MakeConfig) -> None:
    usual, last = (run(toy(f"runtime.channels_last={flag}")) for flag in ("false", "true"))
    assert [each.loss for each in last] == pytest.approx([each.loss for each in usual], rel=1e-3)


def test_a_model_that_asks_for_no_shape_is_given_none(toy: MakeConfig) -> None:
    model = {"_target_": f"{__name__}.Flat", "in_features": 64, "out_features": 2}
    assert run(toy(model=model, epochs=8, target=0.9))[-1].outcome is Outcome.REACHED


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": {"_target_": "torch.nn.Linear", "in_features": 3}}, "model: Linear"),
        ({"model": {"_target_": f"{__name__}.fraction_of_ten", "outputs": 1, "targets": 1}}, "model: .*returned Tensor"),
        ({"optimizer": {"_target_": "torch.optim.SGD", "lr": -1}}, "optimizer: SGD.* Invalid learning rate"),
        ({"loss": {"_target_": "torch.nn.NoSuchLoss"}}, "loss"),
        ({"device": "cuda"}, "device: found cuda"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(toy: MakeConfig, fields: dict[str, Any], said: str) -> None:
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match=said) as refused:
        run(toy(**fields))
    assert "\n" not in str(refused.value)


def test_the_check_before_a_study_makes_all_and_trains_nothing(toy: MakeConfig) -> None:
    check_training(toy())
    with pytest.raises(ConfigError, match=r"optimizer: SGD.* Invalid momentum"):
        check_training(toy(optimizer={"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": -1}))


def test_a_fingerprint_names_what_the_numbers_depend_on(toy: MakeConfig) -> None:
    first, again, other = (fingerprint(toy(seed=seed), num_threads=1) for seed in (1, 1, 2))
    assert first == again
    assert first["sha256"] != other["sha256"]
    assert first["data_checksum"] == other["data_checksum"]
    assert first["device_type"] == "cpu"
    assert first["versions"]["torch"] == torch.__version__.split("+")[0] or first["versions"]["torch"] == torch.__version__


@pytest.mark.gpu
def test_a_gpu_reaches_the_target(toy: MakeConfig) -> None:
    last = run(toy(device="cuda", epochs=8, target=0.9))[-1]
    assert last.outcome is Outcome.REACHED
    assert last.peak_memory_bytes is not None
    assert 0 < last.peak_memory_bytes < 1 << 30


@pytest.mark.gpu
def test_bf16_on_a_gpu_reaches_the_target(toy: MakeConfig) -> None:
    config = toy("precision=bf16", "runtime.channels_last=true", device="cuda", epochs=8, target=0.9)
    assert run(config)[-1].outcome is Outcome.REACHED


@pytest.mark.gpu
def test_data_off_the_gpu_trains_as_data_on_it(toy: MakeConfig) -> None:
    on, off = (run(toy(f"data_path.on_device={flag}", device="cuda")) for flag in ("true", "false"))
    assert [each.loss for each in off] == pytest.approx([each.loss for each in on], rel=1e-3)
