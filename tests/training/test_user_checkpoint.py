"""A training function that saves what it could go on from can be paused, and goes on as if it
had not been.
"""

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotune
from autotune.config.schema import TrialConfig
from autotune.errors import AutotuneError, ConfigError, DataError, StateError
from autotune.failure import FailureKind
from autotune.files import STATE_FILE
from autotune.measurement import Evaluation, Target
from autotune.outcome import Outcome
from autotune.session import TrialInfo, current, in_trial, is_pausable, trial
from autotune.training.checkpoint import read_weights
from autotune.training.parallel.ranks import open_store
from autotune.training.parallel.rendezvous import Rendezvous, follow
from autotune.training.parallel.reports import LeadingRank
from autotune.training.run import start_training
from autotune.training.states import TrainingStates

MakeConfig = Callable[..., TrialConfig]
STATUS = Path("/proc/self/status")


def learning(checkpoint: autotune.Checkpoint, num_epochs: int, lr: float = 0.1) -> None:
    """Fits a line to noise drawn anew each epoch, so that random numbers matter.

    Reports the loss.
    """
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    state = checkpoint.load({"model": model, "optimizer": optimizer})
    for epoch in range(state.get("epoch", 0), num_epochs):
        inputs = torch.randn(16, 1)
        loss = ((model(inputs) - 3 * inputs) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoint.save({"model": model, "optimizer": optimizer, "epoch": epoch + 1})
        autotune.report(loss.detach(), epoch=epoch + 1)


def not_saving() -> None:
    for number in range(5):
        autotune.report(-number)


def saving_once(checkpoint: autotune.Checkpoint) -> None:
    checkpoint.save({"number": 0})
    for number in range(5):
        autotune.report(-number)


def failing_to_load(checkpoint: autotune.Checkpoint) -> None:
    """Loads as a library does that cannot read what it wrote."""
    if checkpoint.files is not None:
        raise KeyError("model.embeddings.weight")
    for number in range(5):
        checkpoint.save({}, write_files=lambda folder: (folder / "progress.txt").write_text("1"))
        autotune.report(-number)


def failing_on_its_device(checkpoint: autotune.Checkpoint) -> None:
    if checkpoint.files is not None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    failing_to_load(checkpoint)


def never_loading(checkpoint: autotune.Checkpoint) -> None:
    for number in range(5):
        checkpoint.save({"number": number})
        autotune.report(-number)


def loading_another(checkpoint: autotune.Checkpoint) -> None:
    checkpoint.load({"network": nn.Linear(1, 1)})
    never_loading(checkpoint)


def memory(kind: str) -> float:
    """Megabytes of this process's memory: VmRSS is what it has now, VmHWM the most it had."""
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) / 1e3


def large(checkpoint: autotune.Checkpoint, by_objects: bool) -> None:
    """Has a state of 300 MB, and reports its process's memory."""
    model = nn.Linear(5000, 5000)
    optimizer = torch.optim.Adam(model.parameters())
    objects = {"model": model, "optimizer": optimizer}
    if by_objects:
        state = checkpoint.load(objects)
    elif state := checkpoint.load():
        for name, owner in objects.items():
            owner.load_state_dict(state.pop(name))
    if not state:
        model(torch.ones(1, 5000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save({**objects, "epoch": 1})
    autotune.report(
        0.0, loss=float(model.weight.detach().sum()), most=memory("VmHWM"), now=memory("VmRSS")
    )


def saving(checkpoint: autotune.Checkpoint, what: str) -> None:
    state: Any = [] if what == "list" else {"it": object()}
    checkpoint.save(state)
    autotune.report(0.0)


@pytest.fixture
def own(trial_config: MakeConfig) -> MakeConfig:
    """Makes configurations of a training function here, to be trained until its metric is at
    most -100.
    """

    def make(
        function: Callable[..., Any], *, value: float = -100.0, **arguments: Any
    ) -> TrialConfig:
        return trial_config(
            training={"_target_": f"{__name__}.{function.__name__}", **arguments},
            target=Target(metric="score", value=value, mode="min", max_train_seconds=1e9),
            allowed_targets=(__name__,),
        )

    return make


def paused_after(config: TrialConfig, num_evaluations: int, folder: Path) -> list[Evaluation]:
    """The evaluations of a training up to its pause, which leaves its state in ``folder``."""
    training = start_training(config, states=TrainingStates(folder))
    evaluations = [next(training) for _ in range(num_evaluations)]
    assert is_pausable()
    assert training.send(True) == evaluations[-1]
    training.close()
    return evaluations


@pytest.mark.parametrize("num_before", [1, 3, 6])
def test_a_paused_training_goes_on_as_if_it_had_not_been(
    own: MakeConfig, tmp_path: Path, num_before: int
) -> None:
    config = own(learning, num_epochs=7)
    whole = list(start_training(config))
    parts = [
        *paused_after(config, num_before, tmp_path),
        *start_training(config, states=TrainingStates(tmp_path)),
    ]
    assert [evaluation.metric for evaluation in parts] == [
        evaluation.metric for evaluation in whole
    ]
    assert [(evaluation.step, evaluation.epoch) for evaluation in parts] == [
        (epoch, epoch) for epoch in range(1, 8)
    ]
    seconds = [evaluation.train_seconds for evaluation in parts]
    assert seconds == sorted(seconds)


_RESUMES = """
import json, pathlib, pickle, sys
from autotune.training.run import start_training
from autotune.training.states import TrainingStates
from test_user_checkpoint import memory
before = memory("VmRSS")
config, folder = pickle.loads(sys.stdin.buffer.read())
(evaluation,) = start_training(config, states=TrainingStates(folder))
most, now = (evaluation.metrics[name] - before for name in ("most", "now"))
print(json.dumps([evaluation.loss, most, now]))
"""


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells a process's memory")
@pytest.mark.parametrize(("by_objects", "most_copies"), [(True, 2.3), (False, 2.7)])
def test_a_resumed_training_has_one_copy_of_its_state_in_memory(
    own: MakeConfig, tmp_path: Path, by_objects: bool, most_copies: float
) -> None:
    config = own(large, by_objects=by_objects)
    [evaluation] = paused_after(config, 1, tmp_path)
    resumed = subprocess.run(
        [sys.executable, "-c", _RESUMES],
        input=pickle.dumps((config, tmp_path)),
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        check=True,
    )
    loss, most, now = json.loads(resumed.stdout)
    assert loss == evaluation.loss
    size = (tmp_path / "1" / STATE_FILE).stat().st_size / 1e6
    assert size > 300
    assert (most / size < most_copies, now / size < 1.3) == (True, True), (most / size, now / size)


@pytest.mark.parametrize(
    ("function", "fresh"), [(not_saving, [False, False]), (saving_once, [True, False])]
)
def test_a_training_can_be_paused_at_a_report_that_it_saved_for(
    own: MakeConfig, function: Callable[..., Any], fresh: list[bool]
) -> None:
    training = start_training(own(function))
    found = []
    for _ in fresh:
        next(training)
        found.append(is_pausable())
    assert found == fresh
    training.close()
    assert not is_pausable()
    assert current() is None


def test_the_weights_of_a_training_that_reached_its_target_are_written(
    own: MakeConfig, tmp_path: Path
) -> None:
    training = start_training(
        own(learning, num_epochs=500, lr=0.1, value=0.01),
        weights_path=tmp_path / "weights.safetensors",
    )
    last = list(training)[-1]
    assert last.outcome is Outcome.REACHED
    weights, metadata = read_weights(tmp_path / "weights.safetensors")
    assert weights["weight"].item() == pytest.approx(3, abs=0.3)
    assert metadata["evaluation"]["metric"] == last.metric


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (
            never_loading,
            ConfigError,
            "never_loading was paused, and reported before it called checkpoint.load",
        ),
        (
            loading_another,
            ConfigError,
            "checkpoint.load: 'network' was not saved; saved are number",
        ),
        (
            failing_to_load,
            StateError,
            ("cannot continue from the state that it saved: KeyError: 'model.embeddings.weight'$"),
        ),
    ],
)
def test_a_function_that_cannot_go_on_says_why(
    own: MakeConfig,
    tmp_path: Path,
    function: Callable[..., Any],
    error: type[AutotuneError],
    said: str,
) -> None:
    config = own(function)
    paused_after(config, 1, tmp_path)
    with pytest.raises(error, match=said):
        list(start_training(config, states=TrainingStates(tmp_path)))


def test_a_fault_of_the_device_before_a_state_is_loaded_says_nothing_of_the_state(
    own: MakeConfig, tmp_path: Path
) -> None:
    config = own(failing_on_its_device)
    paused_after(config, 1, tmp_path)
    with pytest.raises(RuntimeError, match="ECC"):
        list(start_training(config, states=TrainingStates(tmp_path)))


def test_a_state_is_deleted_of_which_another_rank_cannot_read_its_part(
    own: MakeConfig, tmp_path: Path
) -> None:
    config = own(learning, num_epochs=3)
    paused_after(config, 1, tmp_path)
    (tmp_path / "1" / "rank-1").mkdir()
    (tmp_path / "1" / "rank-1" / STATE_FILE).write_bytes(b"half of it")
    store = open_store()
    LeadingRank(store, 2).tell_state(tmp_path / "1")
    rendezvous = Rendezvous(host="127.0.0.1", port=store.port, rank=1, size=2)
    failure = follow(config, rendezvous, num_threads=1, state_folder=tmp_path)
    assert failure is not None
    assert failure.kind is FailureKind.LOST
    assert not list(tmp_path.iterdir()), "the training continues from the state before"


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("list", ConfigError, "checkpoint.save needs a mapping"),
        ("object", DataError, "checkpoint: it is of type object"),
    ],
)
def test_a_state_that_cannot_be_kept_is_refused_before_anything_is_paused(
    own: MakeConfig, what: str, error: type[AutotuneError], said: str
) -> None:
    with pytest.raises(error, match=said):
        next(start_training(own(saving, what=what)))


def keeping_files(report: Callable[..., None], how_far: int = 6) -> None:
    """Continues from a file of its own, which has every second epoch."""
    path = trial().folder / "epoch"
    begun = int(path.read_text()) if path.exists() else 0
    for epoch in range(begun + 1, how_far + 1):
        time.sleep(0.05)
        if epoch % 2 == 0:
            path.write_text(str(epoch))
        report(epoch / 10, epoch=epoch)


@pytest.mark.parametrize("deletes", [False, True])
def test_a_function_that_keeps_files_of_its_own_continues_with_the_clock_of_that_evaluation(
    own: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    monkeypatch.setattr("autotune.training.states._CURVE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr("autotune.training.states._MAX_FRACTION", 1e9)
    folder = tmp_path / "trials" / "trial-3"
    folder.mkdir(parents=True)
    with in_trial(TrialInfo(number=3, name="trial-3", folder=folder, seed=7)):
        states = TrainingStates(tmp_path / "states")
        first = start_training(own(keeping_files), states=states)
        begun = [next(first) for _ in range(5)]
        assert not is_pausable()
        first.close()
        if deletes:
            (folder / "epoch").unlink()
        states = TrainingStates(tmp_path / "states")
        rest = list(start_training(own(keeping_files), states=states))
    assert [each.epoch for each in rest] == ([1, 2, 3, 4, 5, 6] if deletes else [5, 6])
    continued = 0.0 if deletes else begun[3].train_seconds
    assert continued < rest[0].train_seconds < continued + 1.0
    assert [each.epoch for each in states.curve.evaluations] == [1, 2, 3, 4, 5, 6]
