"""Hugging Face: a callback that reports each evaluation of a ``Trainer`` to autotune.

It needs the extra ``autotune[transformers]``.

An evaluation is reported when the step is over for everyone: after all callbacks have seen it, a
schedule has stepped by it, and the ``Trainer`` has noted the best metric and saved its own
checkpoint. There is no event for that, so the first callback reports at the next step or epoch, or
at the end. A training that continues from there is as if it had not been paused.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from autotune.errors import ConfigError
from autotune.session import current, evaluating, further_metrics

_SPEEDS = ("_runtime", "_per_second")
"""Ends of the names of what ``Trainer.evaluate`` tells of its own speed."""


class ReportCallback(TrainerCallback):
    """Reports the metric of each evaluation, so that a training ends at its target, at its cap, or
    when it is paused.

    A paused training continues from the ``Trainer``'s own checkpoint. Evaluations are not timed.
    What else they compute is reported by name. Outside a trial this callback does nothing.

    Examples:
        >>> report = autotune.transformers.ReportCallback(monitor="eval_accuracy")
        >>> Trainer(model, arguments, ..., callbacks=[report]).train()

    Args:
        monitor: name of the metric, as in what ``Trainer.evaluate`` returns.
    """

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        self._trainer: Trainer | None = None
        self._due: dict[str, Any] = {}
        """Metrics of the evaluation that is not yet reported."""
        self._reported_step = 0

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Become the first callback, time evaluations, and have ``Trainer.train`` continue from the
        checkpoint of a paused training.

        Raises:
            ConfigError: several processes train together.
        """
        session = current()
        if session is None:
            return
        if args.world_size > 1:
            raise ConfigError(
                f"autotune.transformers: found {args.world_size} processes that train together,"
                " accepted is one: a program that torchrun or accelerate launch has not started"
            )
        trainer = self._trainer = _calling_trainer()
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))
        evaluate = trainer.evaluate

        @functools.wraps(evaluate)
        def evaluate_untimed(*args: Any, **kwargs: Any) -> dict[str, float]:
            with evaluating():
                return evaluate(*args, **kwargs)

        trainer.evaluate = evaluate_untimed  # type: ignore[method-assign]
        if session.checkpoint.files is not None and not session.checkpoint.is_loaded:
            (folder,) = session.checkpoint.files.iterdir()
            args.eval_on_start = False  # callbacks have seen that evaluation
            args.restore_callback_states_from_checkpoint = True
            train = trainer.train

            @functools.wraps(train)
            def train_on(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
                return train(str(folder), *args, **kwargs)

            trainer.train = train_on  # type: ignore[method-assign]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the trainings of the trial.

        Raises:
            ConfigError: the callback was added to a trainer that was there already.
        """
        session = current()
        if session is None:
            return
        if self._trainer is None:
            raise ConfigError(
                "autotune.transformers.ReportCallback: found one that was added by add_callback, "
                "accepted is Trainer(..., callbacks=[ReportCallback(...)])"
            )
        session.trainers.append(self._trainer)
        self._reported_step = state.global_step

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report what was evaluated at the last epoch's end.

        Start the clock of a training that was paused there.
        """
        if (session := current()) is not None and not (state.epoch or 0) % 1:
            session.checkpoint.load()
        self._report(state, is_resumable=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report what was evaluated after the last step.

        Start the clock of a training that was paused there, and has found its batch.
        """
        if (session := current()) is not None:
            session.checkpoint.load()
        self._report(state, is_resumable=not args.ignore_data_skip)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the last evaluation of a training that has ended, before the best model takes
        the place of what was evaluated.
        """
        if "train_runtime" in kwargs["logs"]:
            self._report(state, is_resumable=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the last evaluation, where nothing was logged after it."""
        self._report(state, is_resumable=False)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the metrics of steps that no report has told, until they are reported.

        Outside ``Trainer.train`` that is now.
        """
        if self._trainer is None or state.global_step <= self._reported_step:
            return
        self._due |= kwargs["metrics"]  # those of several data sets come one after the other
        if not self._trainer.is_in_train and self._monitor in self._due:
            self._report(state, is_resumable=False)

    def _report(self, state: TrainerState, *, is_resumable: bool) -> None:
        """Report the evaluation that is due, if one is.

        Raises:
            ConfigError: the metric was not computed.
        """
        session, trainer = current(), self._trainer
        if session is None or trainer is None or not self._due:
            return
        metrics, self._due, self._reported_step = self._due, {}, state.global_step
        if self._monitor not in metrics:
            raise ConfigError(
                f"autotune.transformers.ReportCallback: monitor={self._monitor!r} was not computed,"
                f" accepted are {', '.join(metrics)}"
            )
        is_first_training = session.trainers == [trainer]
        model: Any = trainer.model
        session.checkpoint.save(
            {} if is_resumable and is_first_training else None,
            weights=model.state_dict(),
            write_files=_saver(trainer),
        )
        numbers = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and not name.endswith(_SPEEDS)
        }
        session.report(
            metrics[self._monitor],
            step=state.global_step,
            epoch=state.epoch,
            **further_metrics(numbers, self._monitor),
        )


def _saver(trainer: Trainer) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        args, trainer.args = trainer.args, copy.copy(trainer.args)
        trainer.args.output_dir = str(folder)
        # otherwise this would become the best checkpoint's folder
        trainer.args.save_strategy = "no"
        trainer.args.save_total_limit, trainer.args.save_only_model, trainer.args.push_to_hub = (
            None,
            False,
            False,
        )
        try:
            # what Trainer itself calls when a save is due
            trainer._save_checkpoint(cast("Any", trainer.model), trial=None)  # noqa: SLF001
        finally:
            trainer.args = args

    return save


def _calling_trainer() -> Trainer:
    """The trainer whose initialisation calls this callback: callbacks are given much, but not
    their trainer.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back
    raise AssertionError("a Trainer makes its callbacks")
