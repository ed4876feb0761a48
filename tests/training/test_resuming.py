"""A training that is ended anywhere goes on from its last evaluation as if nothing had happened."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.errors import DataError
from autotune.measurement import Evaluation
from autotune.outcome import Outcome
from autotune.training.loop import train

MakeConfig = Callable[..., TrialConfig]

SLOW_PARTS = {
    "plain": (),
    "schedule and momentum": ("lr_schedule=one_cycle",),
    "prefetched": ("augmentation=flip_shift", "data_path.on_device=false"),
    "half weights": ("precision=pure_bf16",),
    "scaled gradients": ("precision=fp16",),
    "joined optimizers": ("optimizer=muon",),
    "schedule-free": ("optimizer=schedule_free_adamw",),
    "pruned": ("technique=pruning",),
}
PARTS = [
    ("optimizer=adamw", "lr_schedule=cosine", "averaging=ema", "augmentation=flip_shift"),
    *(
        pytest.param(overrides, id=name, marks=pytest.mark.slow)
        for name, overrides in SLOW_PARTS.items()
    ),
]


@pytest.fixture
def short(trial_config: MakeConfig) -> MakeConfig:
    """Makes configurations of four evaluations, whose target and time limit no training reaches."""

    def make(*overrides: str) -> TrialConfig:
        config = trial_config("batch_size=128", "epochs=3.5", *overrides)
        # float16 takes long on a busy CPU
        target = replace(config.target, value=2.0, max_train_seconds=1000.0)
        return replace(config, target=target, evaluate_every_samples=1000)

    return make


def numbers(evaluations: list[Evaluation]) -> list[tuple[int, float, float]]:
    return [(each.step, each.metric, each.loss) for each in evaluations]


@pytest.mark.parametrize("overrides", PARTS)
def test_a_training_that_was_ended_or_paused_goes_on_with_the_numbers_it_would_have_had(
    short: MakeConfig, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config, kept, paused = short(*overrides), tmp_path / "kept", tmp_path / "paused"
    whole = list(train(config))
    assert len(whole) == 4
    first = train(config, state_folder=kept)
    begun = [next(first), next(first)]
    assert first.send(paused) == begun[-1]
    assert numbers([*begun, next(first)]) == numbers(whole[:3]), "what kept it can go on itself"
    first.close()
    torch.manual_seed(99)
    np.random.seed(99)
    assert numbers(list(train(config, state_folder=kept))) == numbers(whole[3:])
    again = train(config, paused_folder=paused)
    rest = [next(again)]
    assert again.send(paused) == rest[-1], "it can be paused again"
    again.close()
    rest += list(train(config, paused_folder=paused))
    assert numbers(rest) == numbers(whole[2:])


def test_a_pause_costs_the_paused_training_nothing(short: MakeConfig, tmp_path: Path) -> None:
    first = train(short())
    begun = next(first)
    first.send(tmp_path)
    first.close()
    rest = next(train(short(), paused_folder=tmp_path))
    assert (rest.build_seconds, rest.prepare_seconds) == (
        begun.build_seconds,
        begun.prepare_seconds,
    )
    assert rest.train_seconds > begun.train_seconds


def test_a_training_that_had_ended_says_so_again_and_trains_no_more(
    short: MakeConfig, tmp_path: Path
) -> None:
    ended = list(train(short(), state_folder=tmp_path))[-1]
    again = list(train(short(), state_folder=tmp_path))
    assert ended.outcome is Outcome.MISSED
    assert numbers(again) == numbers([ended])
    assert again[-1].train_seconds == ended.train_seconds


def test_a_state_of_another_configuration_is_refused(short: MakeConfig, tmp_path: Path) -> None:
    list(train(short(), state_folder=tmp_path))
    with pytest.raises(DataError, match=r"another training \(batch_size: 128 there, 32 here\);"):
        list(train(replace(short(), batch_size=32, seed=8), state_folder=tmp_path))
