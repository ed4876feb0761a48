"""Hugging Face trainings with the callback: reported, capped, paused and resumed through the
Trainer's own checkpoint.
"""

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
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=2,
        )
    )


def fit(
    lr: float,
    epochs: int = 4,
    folder: str = ".",
    monitor: str = "eval_accuracy",
) -> None:
    arguments = transformers.TrainingArguments(
        folder,
        learning_rate=lr,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        eval_strategy="epoch",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        tiny_bert(),
        arguments,
        train_dataset=Words(96),
        eval_dataset=Words(64),
        compute_metrics=accuracy,
    )
    trainer.add_callback(autotune.transformers.ReportCallback(monitor=monitor))
    trainer.train()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def own(trial_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    def make(*, value: float = 2.0, mode: str = "max", **arguments: Any) -> TrialConfig:
        return trial_config(
            training={
                "_target_": f"{__name__}.fit",
                "folder": str(tmp_path / "output"),
                **arguments,
            },
            target=Target(metric="eval_accuracy", value=value, mode=mode, max_train_seconds=1e9),
            allowed_targets=(__name__,),
        )

    return make


def test_it_ends_at_the_target_and_its_weights_score_the_same(
    own: MakeConfig, tmp_path: Path
) -> None:
    evaluations = list(
        start_training(
            own(lr=0.01, value=0.8, epochs=60), weights_path=tmp_path / "weights.safetensors"
        )
    )
    assert evaluations[-1].outcome is Outcome.REACHED
    model = tiny_bert()
    model.load_state_dict(read_weights(tmp_path / "weights.safetensors")[0])
    words = Words(64)
    with torch.no_grad():
        predicted = model.eval()(input_ids=words.tokens).logits.argmax(-1)
    right = predicted == torch.tensor([words[index]["labels"] for index in range(64)])
    assert right.float().mean().item() == pytest.approx(evaluations[-1].metric)


def test_a_metric_that_is_not_computed_is_one_line(own: MakeConfig) -> None:
    with pytest.raises(
        ConfigError,
        match="monitor='eval_f1' was not measured; measured were eval_loss, eval_accuracy",
    ):
        list(start_training(own(lr=0.01, monitor="eval_f1")))


EPOCHS = 6
ENDS: list[dict[str, Any]] = []
"""How the trainings of ``fit_row`` ended that came to their end."""

KEEPING_THE_BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "save_strategy": "epoch",
}

ROWS: dict[str, dict[str, Any]] = {
    "early stopping": {**KEEPING_THE_BEST, "early_stopping": True, "learning_rate": 0.2},
    "the best model at the end": {**KEEPING_THE_BEST, "save_total_limit": 1},
    "the best model of evaluations within epochs": {
        **KEEPING_THE_BEST,
        "early_stopping": True,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
    },
    "saved when it is best": {**KEEPING_THE_BEST, "save_strategy": "best"},
    "learning rate reduced on a plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
    },
    "saved each few steps": {
        "save_strategy": "steps",
        "save_steps": 5,
        "save_total_limit": 2,
        "save_only_model": True,
    },
    "accumulated gradients": {
        "gradient_accumulation_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "an evaluation before all": {**KEEPING_THE_BEST, "early_stopping": True, "eval_on_start": True},
    "adapters": {**KEEPING_THE_BEST, "peft": True},
    "several data sets": {"data_sets": True},
}


def fit_row(row: str, is_first: bool, folder: str) -> None:
    settings = {"eval_strategy": "epoch", "save_strategy": "no", "learning_rate": 0.05, **ROWS[row]}
    others = (
        [transformers.EarlyStoppingCallback(early_stopping_patience=2)]
        if settings.pop("early_stopping", False)
        else []
    )
    model = tiny_bert()
    if is_peft := settings.pop("peft", False):
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        )
    is_dict = settings.pop("data_sets", False)
    ours = autotune.transformers.ReportCallback(monitor="eval_b_loss" if is_dict else "eval_loss")
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            folder,
            **settings,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=16,
            logging_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Words(90),
        eval_dataset={"a": Words(32), "b": Words(64)} if is_dict else Words(64),
        compute_metrics=accuracy,
        callbacks=[ours, *others] if is_first else [*others, ours],
    )
    trainer.train()
    state = trainer.state
    ENDS.append(
        {
            "step": state.global_step,
            "epoch": state.epoch,
            "best": (state.best_metric, Path(state.best_model_checkpoint or "").name),
            "rates": trainer.lr_scheduler.get_last_lr(),
            "evaluated": [
                {
                    key: value
                    for key, value in line.items()
                    if key in ("step", "epoch", "eval_loss", "eval_accuracy", "eval_b_loss")
                }
                for line in state.log_history
                if any(key.startswith("eval") for key in line)
            ],
            "patience": [
                callback.early_stopping_patience_counter
                for callback in trainer.callback_handler.callbacks
                if isinstance(callback, transformers.EarlyStoppingCallback)
            ],
            "files": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
            "weights": {
                name: value.tolist()
                for name, value in model.state_dict().items()
                if not is_peft or "lora" in name
            },
        }
    )


@pytest.mark.parametrize(
    "is_first",
    [pytest.param(True, id="first"), pytest.param(False, id="last", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if row == "the best model at the end" else pytest.mark.slow)
        for row in ROWS
    ],
)
def test_a_training_that_is_paused_at_every_evaluation_is_as_if_it_were_not(
    own: MakeConfig,
    tmp_path: Path,
    check_pauses: Callable[[Callable[[str], TrialConfig]], list[Evaluation]],
    row: str,
    is_first: bool,
) -> None:
    ENDS.clear()

    def config(folder: str) -> TrialConfig:
        arguments = {"row": row, "is_first": is_first, "folder": str(tmp_path / folder)}
        return own(**arguments, _target_=f"{__name__}.fit_row")

    paused = check_pauses(config)
    assert len(ENDS) == 2
    assert ENDS[1] == ENDS[0]
    if "early_stopping" in ROWS[row]:
        assert ENDS[0]["patience"] == [2], "else early stopping did nothing"
    assert all(evaluation.evaluate_seconds > 0 for evaluation in paused)
