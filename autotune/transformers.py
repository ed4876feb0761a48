"""Hugging Face: a callback that reports each evaluation of a ``Trainer`` to autotune. It needs the extra ``autotune[transformers]``."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from autotune.errors import ConfigError
from autotune.session import current, further_metrics

_SPEEDS = ("_runtime", "_per_second")
"""Ends of the names of what ``Trainer.evaluate`` tells of its own speed."""


class ReportCallback(TrainerCallback):
    """Reports the metric of each evaluation, so that a training ends at its target, at its cap, or when it is paused.

    A paused training goes on from the ``Trainer``'s own checkpoint. Evaluations are not timed. What else they
    compute is reported by name. Outside a trial this callback does nothing.

    Examples:
        >>> Trainer(model, arguments, ..., callbacks=[autotune.transformers.ReportCallback(monitor="eval_accuracy")]).train()

    Args:
        monitor: name of the metric, as in what ``Trainer.evaluate`` returns.
    """

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        self._evaluating = contextlib.ExitStack()
        self._trainer: Trainer | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Have ``Trainer.train`` go on from the checkpoint of a paused training.

        Raises:
            ConfigError: several processes train together.
        """
        session = current()
        if session is None:
            return
        if args.world_size > 1:
            raise ConfigError(f"autotune.transformers: found {args.world_size} processes that train together, accepted is one")
        self._trainer = _calling_trainer()
        if session.checkpoint.files is not None:
            (folder,) = session.checkpoint.files.iterdir()
            self._trainer.train = partial(self._trainer.train, resume_from_checkpoint=str(folder))  # type: ignore[method-assign]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check that the trainer is known, without which no training could be paused.

        Raises:
            ConfigError: the callback was added to a trainer that was there already.
        """
        if current() is not None and self._trainer is None:
            raise ConfigError(
                "autotune.transformers.ReportCallback: found one that was added by add_callback, "
                "accepted is Trainer(..., callbacks=[ReportCallback(...)])"
            )

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock of a resumed training, whose set-up is over."""
        if (session := current()) is not None:
            session.checkpoint.load()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop counting as training if an evaluation follows."""
        self._enter_evaluating(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop counting as training if an evaluation follows."""
        self._enter_evaluating(control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the metric, and count as training again.

        Raises:
            ConfigError: the metric was not computed.
        """
        session = current()
        if session is None:
            return
        metrics: Mapping[str, Any] = kwargs["metrics"]
        if self._monitor not in metrics:
            raise ConfigError(
                f"autotune.transformers.ReportCallback: monitor={self._monitor!r} was not computed, accepted are {', '.join(metrics)}"
            )
        session.checkpoint.save({}, weights=kwargs["model"].state_dict(), write_files=self._saver())
        try:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float) and not name.endswith(_SPEEDS)}
            session.report(metrics[self._monitor], step=state.global_step, epoch=state.epoch, **further_metrics(numbers, self._monitor))
        finally:
            self._evaluating.close()

    def _enter_evaluating(self, control: TrainerControl) -> None:
        session = current()
        if session is not None and control.should_evaluate:
            self._evaluating.enter_context(session.clock.evaluating())

    def _saver(self) -> Callable[[Path], Any]:
        trainer = self._trainer
        assert trainer is not None, "its initialisation ended"

        def save(folder: Path) -> None:
            args, output_dir = trainer.args, trainer.args.output_dir
            args.output_dir = str(folder)
            try:
                trainer._save_checkpoint(cast("Any", trainer.model), trial=None)  # noqa: SLF001  # what Trainer itself calls when a save is due
            finally:
                args.output_dir = output_dir

        return save


def _calling_trainer() -> Trainer:
    """The trainer whose initialisation calls this callback: callbacks are given much, but not their trainer."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back
    raise AssertionError("a Trainer makes its callbacks")
