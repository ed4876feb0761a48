"""A training that is ended anywhere goes on from its last evaluation as if nothing had happened."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import autotune
from autotune.config.schema import TrialConfig
from autotune.errors import DataError
from autotune.execution.task import TrialTask, WorkerReport
from autotune.execution.task_run import TaskRun
from autotune.files import NOTICE_FILE, STATE_FILE
from autotune.measurement import Evaluation
from autotune.outcome import Outcome
from autotune.training.loop import train
from autotune.training.run import start_training
from autotune.training.states import TrainingStates
from tests.support.records import make_trial_task

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


def numbers(evaluations: Sequence[Evaluation | None]) -> list[tuple[int, float, float]]:
    return [(each.step, each.metric, each.loss) for each in evaluations if each is not None]


@pytest.mark.parametrize("overrides", PARTS)
def test_a_training_that_was_ended_or_paused_goes_on_with_the_numbers_it_would_have_had(
    short: MakeConfig, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config = short(*overrides)
    whole = list(train(config))
    assert len(whole) == 4
    first = train(config, states=TrainingStates(tmp_path))
    begun = [next(first), next(first)]
    assert first.send(True) == begun[-1]
    assert numbers([*begun, next(first)]) == numbers(whole[:3]), "what is saved can go on itself"
    first.close()
    torch.manual_seed(99)
    np.random.seed(99)
    again = train(config, states=TrainingStates(tmp_path))
    rest = [next(again)]
    assert again.send(True) == rest[-1], "it can be paused again"
    again.close()
    rest += list(train(config, states=TrainingStates(tmp_path)))
    assert numbers(rest) == numbers(whole[2:])


def test_a_pause_costs_the_paused_training_nothing(short: MakeConfig, tmp_path: Path) -> None:
    first = train(short(), states=TrainingStates(tmp_path))
    begun = next(first)
    assert begun is not None
    first.send(True)
    first.close()
    rest = next(train(short(), states=TrainingStates(tmp_path)))
    assert rest is not None
    assert (rest.build_seconds, rest.prepare_seconds) == (
        begun.build_seconds,
        begun.prepare_seconds,
    )
    assert rest.train_seconds > begun.train_seconds


def test_a_training_that_had_ended_says_so_again_and_trains_no_more(
    short: MakeConfig, tmp_path: Path
) -> None:
    ended = list(train(short(), states=TrainingStates(tmp_path, every_seconds=0)))[-1]
    again = list(train(short(), states=TrainingStates(tmp_path, every_seconds=0)))
    assert ended is not None
    assert ended.outcome is Outcome.MISSED
    assert again == [ended]


def test_a_training_that_is_ended_anywhere_goes_on_from_its_last_state(
    short: MakeConfig, tmp_path: Path
) -> None:
    whole = list(train(short()))
    states = TrainingStates(tmp_path, every_seconds=0)
    first = train(short(), states=states)
    begun = [next(first), next(first), next(first)]
    first.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"], "two states are kept"
    (tmp_path / "3" / STATE_FILE).write_bytes(b"half of it")
    states = TrainingStates(tmp_path, every_seconds=0)
    rest = list(train(short(), states=states))
    assert numbers(rest) == numbers(whole[2:]), "from the older one, where the newer is damaged"
    assert states.curve.evaluations[:2] == tuple(begun[:2])


def test_states_are_saved_no_more_often_than_is_wanted(short: MakeConfig, tmp_path: Path) -> None:
    list(train(short(), states=TrainingStates(tmp_path, every_seconds=3600)))
    assert not list(tmp_path.iterdir())
    states = TrainingStates(tmp_path / "slow", every_seconds=1e-6)
    (tmp_path / "slow").mkdir()
    states.save(lambda folder: time.sleep(0.05))
    assert not states.is_due(lambda: 0), "saving took 0.05 s, of which 3% is not yet trained"


def test_the_first_state_waits_until_what_it_takes_is_at_most_3_percent_of_the_training(
    short: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("autotune.training.states.time", clock)

    def due_seconds(num_bytes: float, every_seconds: float) -> float:
        clock.now = 0.0
        states = TrainingStates(tmp_path / "run", every_seconds)
        while not states.is_due(lambda: round(num_bytes)):
            clock.now += 1.0
        return float(clock.now)

    assert due_seconds(1e9, every_seconds=3.0) == 167, "1 GB takes 5 s on a slow disk"
    assert due_seconds(1e6, every_seconds=3.0) == 3
    assert due_seconds(1e9, every_seconds=300.0) == 300
    assert due_seconds(1e12, every_seconds=3.0) == 600, "it is saved once, however large"
    assert due_seconds(1e12, every_seconds=0.0) == 0, "at every evaluation, as is asked for"


def test_saving_takes_3_percent_of_the_training_also_where_a_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("autotune.training.states.time", clock)
    states, shares = TrainingStates(tmp_path / "run", every_seconds=60.0), []
    for _ in range(3000):
        clock.now += 1.0
        if states.is_due(lambda: 200_000_000):  # which take 4 s, not 1
            states.save(lambda folder: setattr(clock, "now", clock.now + 4.0))
            shares.append(states.seconds / (clock.now - states.seconds))
    assert shares[0] == 4 / 60
    assert len(shares) > 10
    assert max(shares[1:]) <= 0.03


def saving_much(checkpoint: autotune.Checkpoint) -> None:
    """Saves 40 kB of a module, 80 of tensors beside it, and files, of which 160 kB of weights."""
    for number in range(4):
        checkpoint.save(
            {
                "model": torch.nn.Linear(1, 5000),
                "more": [{"it": torch.zeros(10_000)}, np.ones(5000)],
            },
            weights={"it": torch.zeros(40_000)},
            write_files=lambda folder: None,
        )
        autotune.report(-number)


def test_a_training_tells_how_much_it_would_save(
    short: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def is_due(states: TrainingStates, num_bytes: Callable[[], int]) -> bool:
        told.append(num_bytes())
        return False

    monkeypatch.setattr(TrainingStates, "is_due", is_due)
    training = train(short("optimizer=adamw"), states=TrainingStates(tmp_path))
    next(training)
    training.send(True)
    training.close()
    size = (tmp_path / "1" / STATE_FILE).stat().st_size
    assert 0.5 * size < told[0] < size
    function = {"_target_": f"{__name__}.saving_much"}
    config = replace(short(), training=function, allowed_targets=[__name__])
    next(start_training(config, states=TrainingStates(tmp_path / "function")))
    assert told[1] == 2 * 5000 * 4 + 10_000 * 4 + 5000 * 8 + 40_000 * 4


@pytest.mark.parametrize("every_seconds", [0, math.inf])
def test_a_notice_saves_a_training_at_its_next_step(
    short: MakeConfig, tmp_path: Path, every_seconds: float
) -> None:
    whole = list(train(short()))
    first = train(short(), states=TrainingStates(tmp_path / "run", every_seconds))
    begun = [next(first)]
    (tmp_path / NOTICE_FILE).touch()
    time.sleep(0.6)
    assert next(first) is None
    first.close()
    (tmp_path / NOTICE_FILE).unlink()
    states = TrainingStates(tmp_path / "run")
    assert numbers([*begun, *train(short(), states=states)]) == numbers(whole)


def test_a_process_that_fails_before_it_has_its_state_says_nothing_of_earlier_evaluations(
    short: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    states = tmp_path / "trial-0"
    first = train(short(), states=TrainingStates(states, every_seconds=0))
    next(first)
    first.close()
    task = make_trial_task(short(), tmp_path, state_folder=str(states), is_resumed=True)

    def first_report(task: TrialTask) -> WorkerReport:
        run = TaskRun(task)
        report = run.next_report()
        run.close()
        return report

    failed = first_report(replace(task, config=replace(task.config, batch_size=10**9)))
    assert failed.failure is not None
    assert failed.earlier is None
    continued = first_report(task)
    assert continued.earlier is not None
    assert list(continued.earlier) == [0]


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), ["1", "2"]),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), ["1", "2"]),
        (KeyError("momentum"), ["1"]),
    ],
)
def test_a_state_is_deleted_where_it_cannot_be_loaded_but_not_for_a_fault_of_the_device(
    short: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kept: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    states = tmp_path / "trial-0"
    first = train(short(), states=TrainingStates(states, every_seconds=0))
    next(first)
    next(first)
    first.close()

    def load_state_dict(model: torch.nn.Module, state: Any) -> None:
        raise error

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", load_state_dict)
    task = make_trial_task(short(), tmp_path, state_folder=str(states), is_resumed=True)
    run = TaskRun(task)
    report = run.next_report()
    run.close()
    assert report.failure is not None
    assert sorted(path.name for path in states.iterdir()) == kept


def test_the_time_limit_of_a_training_may_be_raised_while_it_is_paused(
    short: MakeConfig, tmp_path: Path
) -> None:
    config = short()
    first = train(config, states=TrainingStates(tmp_path))
    next(first)
    first.send(True)
    first.close()

    def limited(seconds: float) -> TrialConfig:
        return replace(config, target=replace(config.target, max_train_seconds=seconds))

    with pytest.raises(DataError, match=r"target\.max_train_seconds: 1000\.0 there, 999\.0 here"):
        next(train(limited(999.0), states=TrainingStates(tmp_path)))
    assert len(list(train(limited(2000.0), states=TrainingStates(tmp_path)))) == 3


def test_a_state_of_another_configuration_is_refused(short: MakeConfig, tmp_path: Path) -> None:
    list(train(short(), states=TrainingStates(tmp_path, every_seconds=0)))
    with pytest.raises(DataError, match=r"another training \(batch_size: 128 there, 32 here\);"):
        list(train(replace(short(), batch_size=32, seed=8), states=TrainingStates(tmp_path)))
