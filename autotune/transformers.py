"""Hugging Face: a callback that reports each evaluation of a ``Trainer`` to autotune.

It needs the extra ``autotune[transformers]``.

An evaluation is reported when the step is over for everyone: after all callbacks have seen it, a
schedule has stepped by it, and the ``Trainer`` has noted the best metric and saved its own
checkpoint. There is no event for that, so the first callback reports at the next step or epoch, or
at the end. A training that continues from there is as if it had not been paused.
"""

import copy
import functools
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from autotune.session import current, evaluating

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

    def attach(self, trainer: Trainer) -> None:
        """Become the first callback of a trainer that begins a training, so that no other has begun
        a step before this one reports the last.
        """
        self._trainer = trainer
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the trainings of the trial."""
        if (session := current()) is not None and self._trainer is not None:
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
        due, self._due, self._reported_step = self._due, {}, state.global_step
        model: Any = trainer.model
        session.report_trainer(
            trainer,
            {name: value for name, value in due.items() if not name.endswith(_SPEEDS)},
            self._monitor,
            step=state.global_step,
            epoch=state.epoch,
            state={} if is_resumable else None,
            weights=model.state_dict(),
            write_files=functools.partial(_save, trainer),
        )


def _save(trainer: Trainer, folder: Path) -> None:
    """Have the trainer save its checkpoint into a folder, as if none of its own were due."""
    model: Any = trainer.model
    args, trainer.args = trainer.args, copy.copy(trainer.args)
    trainer.args.output_dir, trainer.args.save_strategy = str(folder), "no"
    trainer.args.save_total_limit = None
    trainer.args.save_only_model = trainer.args.push_to_hub = False
    try:
        # what Trainer itself calls when a save is due
        trainer._save_checkpoint(model, trial=None)  # noqa: SLF001
    finally:
        trainer.args = args


_library_train, _library_evaluate = Trainer.train, Trainer.evaluate


@functools.wraps(_library_train)
def _train(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.train``; in a trial it continues a paused training.

    That is too late in a callback, which is not given its trainer either.

    Raises:
        ConfigError: the trainer does not train in the trial's processes.
    """
    callbacks = trainer.callback_handler.callbacks
    callback = next((item for item in callbacks if isinstance(item, ReportCallback)), None)
    if callback is not None and (session := current()) is not None:
        session.check_size(trainer.args.world_size, "a Trainer")
        callback.attach(trainer)
        if session.checkpoint.files is not None and not session.checkpoint.is_loaded:
            (folder,) = session.checkpoint.files.iterdir()
            trainer.args.eval_on_start = False  # callbacks have seen that evaluation
            trainer.args.restore_callback_states_from_checkpoint = True
            args, kwargs = (), {**kwargs, "resume_from_checkpoint": str(folder)}
    return _library_train(trainer, *args, **kwargs)


@functools.wraps(_library_evaluate)
def _evaluate(trainer: Trainer, *args: Any, **kwargs: Any) -> dict[str, float]:
    """``Trainer.evaluate``; in a trial its time is not training."""
    with evaluating():
        return _library_evaluate(trainer, *args, **kwargs)


Trainer.train = _train  # type: ignore[method-assign, assignment]
Trainer.evaluate = _evaluate  # type: ignore[method-assign, assignment]
