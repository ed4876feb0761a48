"""Hugging Face trainings with the callback: reported, capped, paused and resumed through the Trainer's own checkpoint."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import autotune
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target
from autotune.outcome import Outcome
from autotune.session import is_pausable
from autotune.training.checkpoint import read_weights
from autotune.training.run import start_training

transformers = pytest.importorskip("transformers")

MakeConfig = Callable[..., TrialConfig]


class Words(torch.utils.data.Dataset[dict[str, Any]]):
    """Sequences of eight tokens, labelled by which half of the vocabulary has more of them."""

    def __init__(self, num: int) -> None:
        generator = torch.Generator().manual_seed(num)
        self.tokens = torch.randint(0, 20, (num, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": int((tokens < 10).sum() > 4)}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def tiny_bert() -> Any:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
        )
    )


def fit(
    lr: float, epochs: int = 4, folder: str = ".", monitor: str = "eval_accuracy", eval_steps: int | None = None, is_added: bool = False
) -> None:
    arguments = transformers.TrainingArguments(
        folder,
        learning_rate=lr,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        eval_strategy="epoch" if eval_steps is None else "steps",
        eval_steps=eval_steps,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = autotune.transformers.ReportCallback(monitor=monitor)
    trainer = transformers.Trainer(
        tiny_bert(), arguments, train_dataset=Words(96), eval_dataset=Words(64), compute_metrics=accuracy,
        callbacks=[] if is_added else [callback],
    )  # fmt: skip
    if is_added:
        trainer.add_callback(callback)
    trainer.train()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("autotune.training.first_call._paid", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def own(trial_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    def make(*, value: float = 2.0, mode: str = "max", **arguments: Any) -> TrialConfig:
        return trial_config(
            training={"_target_": f"{__name__}.fit", "folder": str(tmp_path / "output"), **arguments},
            target=Target(metric="eval_accuracy", value=value, mode=mode, max_train_seconds=1e9),
            allowed_targets=(__name__,),
        )

    return make


@pytest.mark.parametrize(("eval_steps", "num_before"), [(None, 1), (None, 3), (4, 2), (4, 3)])
def test_a_paused_training_has_the_same_curve(own: MakeConfig, tmp_path: Path, eval_steps: int | None, num_before: int) -> None:
    config = own(lr=0.01, monitor="eval_loss", eval_steps=eval_steps)
    whole = list(start_training(config))
    assert [evaluation.step for evaluation in whole] == ([6, 12, 18, 24] if eval_steps is None else [4, 8, 12, 16, 20, 24])
    training = start_training(config)
    before: list[Evaluation] = [next(training) for _ in range(num_before)]
    assert is_pausable()
    training.send(tmp_path / "paused")
    training.close()
    after = list(start_training(config, paused_folder=tmp_path / "paused"))
    parts = [*before, *after]
    assert [evaluation.metric for evaluation in parts] == [evaluation.metric for evaluation in whole]
    assert [evaluation.step for evaluation in parts] == [evaluation.step for evaluation in whole]
    seconds = [evaluation.train_seconds for evaluation in parts]
    assert seconds == sorted(seconds)
    assert all(evaluation.evaluate_seconds > 0 for evaluation in parts)
    assert all(set(evaluation.metrics) == {"eval_accuracy"} for evaluation in whole)


def test_it_ends_at_the_target_and_its_weights_score_the_same(own: MakeConfig, tmp_path: Path) -> None:
    evaluations = list(start_training(own(lr=0.01, value=0.8, epochs=60), weights_path=tmp_path / "weights.safetensors"))
    assert evaluations[-1].outcome is Outcome.REACHED
    model = tiny_bert()
    model.load_state_dict(read_weights(tmp_path / "weights.safetensors")[0])
    words = Words(64)
    with torch.no_grad():
        predicted = model.eval()(input_ids=words.tokens).logits.argmax(-1)
    right = predicted == torch.tensor([words[index]["labels"] for index in range(64)])
    assert right.float().mean().item() == pytest.approx(evaluations[-1].metric)


def test_a_metric_that_is_not_computed_is_one_line(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="monitor='eval_f1' was not computed, accepted are eval_loss, eval_accuracy"):
        list(start_training(own(lr=0.01, monitor="eval_f1")))


def test_a_callback_that_is_added_later_could_not_pause(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"added by add_callback, accepted is Trainer\(..., callbacks="):
        list(start_training(own(lr=0.01, is_added=True)))


@pytest.mark.parametrize("is_added", [False, True])
def test_by_hand_it_does_nothing(tmp_path: Path, is_added: bool) -> None:
    fit(lr=0.01, epochs=1, folder=str(tmp_path), is_added=is_added)
