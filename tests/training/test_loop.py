"""Training to a target on toy data: 256 images of 8x8 whose brightness tells their class."""

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target
from autotune.outcome import Outcome
from autotune.training.loop import train
from autotune.training.run import fingerprint, start_training

NUM_TRAIN = 256


def bright_images(
    num_classes: int = 2, noise: float = 1.0
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Splits whose class is the images' brightness plus noise."""
    random_numbers = torch.Generator().manual_seed(1)
    splits = {}
    for name, size in (("train", NUM_TRAIN), ("validation", 100), ("test", 50)):
        targets = torch.arange(size) % num_classes
        inputs = (
            noise * torch.randn(size, 1, 8, 8, generator=random_numbers)
            + targets.float().view(-1, 1, 1, 1)
            - 0.5
        )
        splits[name] = (inputs, targets)
    return splits


def fraction_of_ten(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric that is always nine tenths, in float32."""
    return torch.tensor(0.9)


MakeConfig = Callable[..., TrialConfig]


@pytest.fixture
def toy(trial_config: MakeConfig) -> MakeConfig:
    """Makes configurations of the toy data and a net of 1 convolution, whose target no training
    reaches.
    """

    def make(
        *overrides: str, target: float = 2.0, max_train_seconds: float = 1000.0, **fields: Any
    ) -> TrialConfig:
        values: dict[str, Any] = {
            "data": {"_target_": f"{__name__}.bright_images"},
            "model": {
                "_target_": "autotune.workloads.cnn.SimpleCNN",
                "widths": [4],
                "norm": "batch",
            },
            "target": Target(
                metric="accuracy", value=target, mode="max", max_train_seconds=max_train_seconds
            ),
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


def test_training_ends_at_the_first_evaluation_past_the_target(toy: MakeConfig) -> None:
    metrics = [each.metric for each in run(toy(epochs=4))]
    target = max(metrics)
    first = metrics.index(target)
    reached = run(toy(epochs=4, target=target))
    assert [each.outcome for each in reached] == [*[None] * first, Outcome.REACHED]
    assert [each.metric for each in reached] == metrics[: first + 1]


def test_a_target_to_go_below_is_reached_from_above(toy: MakeConfig) -> None:
    loss = {"_target_": "torch.nn.functional.cross_entropy"}
    target = Target(metric="loss", value=1e9, mode="min", max_train_seconds=1000)
    ended = run(replace(toy(metric=loss), target=target))[-1]
    assert ended.outcome is Outcome.REACHED
    assert ended.metric == pytest.approx(ended.loss)


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


def test_a_seed_gives_the_same_numbers_and_another_seed_others(toy: MakeConfig) -> None:
    first, again, other = (numbers(run(toy(seed=seed))) for seed in (3, 3, 4))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_the_clock_stands_still_while_the_training_is_suspended(
    toy: MakeConfig, ticking: Ticking
) -> None:
    config = toy(epochs=3)
    undisturbed = run(config)
    suspended = []
    for evaluation in train(config):
        suspended.append(evaluation)
        ticking.now += 1e6

    def clocks(evaluations: list[Evaluation]) -> list[tuple[float, ...]]:
        return [
            (each.build_seconds, each.prepare_seconds, each.train_seconds, each.evaluate_seconds)
            for each in evaluations
        ]

    assert clocks(suspended) == clocks(undisturbed)


def test_the_phases_sum_to_the_time_between_start_and_last_evaluation(
    toy: MakeConfig, ticking: Ticking
) -> None:
    started = ticking.now + 1
    evaluations = run(toy(epochs=3))
    last = evaluations[-1]
    suspended = len(evaluations) - 1
    measured = (
        last.build_seconds + last.prepare_seconds + last.train_seconds + last.evaluate_seconds
    )
    assert measured == ticking.now - started - suspended
    assert (
        min(last.build_seconds, last.prepare_seconds, last.train_seconds, last.evaluate_seconds) > 0
    )


def returned(training: Generator[Evaluation, None, float | None]) -> float | None:
    while True:
        try:
            next(training)
        except StopIteration as ended:
            # what a generator returns is untyped in StopIteration
            return ended.value  # type: ignore[no-any-return]


def test_the_test_split_is_scored_only_where_asked_for(toy: MakeConfig) -> None:
    config = toy(target=0.0)
    scored = returned(start_training(config, score_test=True))
    assert scored is not None
    assert 0 < scored <= 1
    assert returned(start_training(config)) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": {"_target_": "torch.nn.Linear", "in_features": 3}}, "model: Linear"),
        (
            {"model": {"_target_": f"{__name__}.fraction_of_ten", "outputs": 1, "targets": 1}},
            "model: .*returned Tensor",
        ),
        (
            {"optimizer": {"_target_": "torch.optim.SGD", "lr": -1}},
            "optimizer: SGD.* Invalid learning rate",
        ),
        ({"loss": {"_target_": "torch.nn.NoSuchLoss"}}, "loss"),
        ({"device": "cuda"}, "device: found cuda"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(
    toy: MakeConfig, fields: dict[str, Any], said: str
) -> None:
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match=said) as refused:
        run(toy(**fields))
    assert "\n" not in str(refused.value)


def test_a_fingerprint_names_what_the_numbers_depend_on(toy: MakeConfig) -> None:
    first, again, other = (fingerprint(toy(seed=seed), num_threads=1) for seed in (1, 1, 2))
    assert first == again
    assert first["sha256"] != other["sha256"]
    assert first["data_checksum"] == other["data_checksum"]
    assert first["device_type"] == "cpu"
    assert (
        first["versions"]["torch"] == torch.__version__.split("+")[0]
        or first["versions"]["torch"] == torch.__version__
    )


@pytest.mark.gpu
def test_data_off_the_gpu_trains_as_data_on_it(toy: MakeConfig) -> None:
    on, off = (run(toy(f"data_path.on_device={flag}", device="cuda")) for flag in ("true", "false"))
    assert [each.loss for each in off] == pytest.approx([each.loss for each in on], rel=1e-3)
