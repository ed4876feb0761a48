"""Lightning: a callback that reports each validation to autotune.

It needs the extra ``autotune[lightning]``.

A validation is reported when its epoch is over for everyone: all other callbacks have seen its end,
and all schedulers have stepped. Lightning has no hook there, so the first callback reports at the
start of the next epoch, or at the end of the training. A training that continues from there is as
if it had not been paused; the checkpoints that Lightning's own callbacks save lack the last of an
epoch.
"""

import contextlib
import functools
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
from autotune.session import Session, current, further_metrics

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:  # the same library under its older name
    from pytorch_lightning import Callback, LightningModule, Trainer

_FILE = "lightning.ckpt"


class ReportCallback(Callback):
    """Reports the metric of each validation, so that a training ends at its target, at its cap, or
    when it is paused.

    A validation is reported at the end of its epoch, or before the next batch where it was made
    within one. A training is paused between epochs, and continues from Lightning's own checkpoint.
    Validation and sanity checks are not timed. What else was logged is reported by name. Outside a
    trial this callback does nothing.

    Examples:
        >>> report = autotune.lightning.ReportCallback(monitor="val_f1")
        >>> Trainer(max_epochs=10, callbacks=[report]).fit(model, data)

    Args:
        monitor: name that the metric is logged by (``self.log("val_f1", ...)``).
    """

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        self._evaluating = contextlib.ExitStack()
        self._due_epoch: int | None = None
        """Epoch of the validation that is not yet reported, counted from 1."""
        self._reported_step = 0
        self._is_in_trainer = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Become the first callback, so that no other has begun an epoch before this one reports
        the last.

        Raises:
            ConfigError: the trainer did not have this callback when ``fit`` was called.
        """
        if current() is None:
            return
        if stage == "fit" and not self._is_in_trainer:
            raise ConfigError(
                "autotune.lightning.ReportCallback: found one that"
                " LightningModule.configure_callbacks gave, accepted is Trainer(...,"
                " callbacks=[ReportCallback(...)])"
            )
        # made without a type
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the trainings of the trial.

        One that is resumed has reported the steps that it begins with.
        """
        if (session := current()) is not None:
            session.trainers.append(trainer)
            self._reported_step = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last epoch's validation.

        In a resumed training, start the clock, since its set-up is over.
        """
        session = current()
        if session is None:
            return
        if kept := session.checkpoint.load():
            trainer.should_stop = kept["should_stop"]
            trainer.callback_metrics.update(kept["callback_metrics"])
            _begin_epoch(trainer)
        self._report(
            session,
            trainer,
            {
                "should_stop": trainer.should_stop,
                "callback_metrics": dict(trainer.callback_metrics),
            },
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Report a validation within an epoch, where the order of the data could not continue."""
        if (session := current()) is not None:
            self._report(session, trainer, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last validation, after which nothing is left to train."""
        if (session := current()) is not None:
            self._report(session, trainer, None)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting as training."""
        self._enter_evaluating()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count as training again."""
        self._evaluating.close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting as training."""
        if not trainer.sanity_checking:
            self._enter_evaluating()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count as training again.

        What ``Trainer.validate`` scores is reported if it was trained and no validation scored it
        before.
        """
        session = current()
        if session is None or trainer.sanity_checking:
            return
        self._evaluating.close()
        is_fitting = trainer.state.fn == "fit"
        if trainer.global_step > self._reported_step:
            self._due_epoch = trainer.current_epoch + 1 if is_fitting else trainer.current_epoch
        if not is_fitting:
            self._report(session, trainer, None)

    def _report(self, session: Session, trainer: Trainer, state: dict[str, Any] | None) -> None:
        """Report the validation that is due, if one is.

        Args:
            session: the trial.
            trainer: what trains.
            state: what a training needs to continue from here, beside Lightning's checkpoint; None
                if it cannot.

        Raises:
            ConfigError: the metric was not logged.
        """
        if self._due_epoch is None:
            return
        epoch, self._due_epoch, self._reported_step = self._due_epoch, None, trainer.global_step
        metrics = trainer.callback_metrics
        if self._monitor not in metrics:
            logged = ", ".join(metrics) or "none yet"
            raise ConfigError(
                f"autotune.lightning.ReportCallback: monitor={self._monitor!r} was not logged,"
                f" accepted are {logged}"
            )

        def write_files(folder: Path) -> None:
            trainer.save_checkpoint(folder / _FILE, weights_only=False)

        is_first_training = session.trainers == [trainer]
        weights = trainer.lightning_module.state_dict()
        session.checkpoint.save(
            state if is_first_training else None, weights=weights, write_files=write_files
        )
        session.report(
            metrics[self._monitor],
            step=trainer.global_step,
            epoch=epoch,
            **further_metrics(metrics, self._monitor),
        )

    def _enter_evaluating(self) -> None:
        session: Session | None = current()
        if session is not None:
            self._evaluating.enter_context(session.clock.evaluating())


_library_fit = Trainer.fit


@functools.wraps(_library_fit)
def _fit(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """``Trainer.fit``; in a trial it refuses several processes, and continues a paused training.

    Both are too late in a callback: its first hook runs in the processes that Lightning has
    started, with ``ckpt_path`` read.

    Raises:
        ConfigError: the trainer would train in other processes than this one.
    """
    # made without a type
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callback = next(
        (callback for callback in callbacks if isinstance(callback, ReportCallback)), None
    )
    session = current()
    if callback is None or session is None:
        return _library_fit(trainer, *args, **kwargs)
    callback._is_in_trainer = True  # noqa: SLF001  # of this module's own class
    # by fork or spawn, even a single one
    starts_processes = getattr(trainer.strategy, "_start_method", "popen") != "popen"
    if trainer.world_size > 1 or trainer.num_devices * trainer.num_nodes > 1 or starts_processes:
        raise ConfigError(
            f"autotune.lightning: found a Trainer with devices={trainer.num_devices},"
            f" num_nodes={trainer.num_nodes} and {type(trainer.strategy).__name__}, accepted in a"
            " trial is one that trains in the trial's own process: Trainer(devices=1, num_nodes=1,"
            " strategy='auto')"
        )
    arguments = inspect.signature(_library_fit).bind(trainer, *args, **kwargs).arguments
    if session.checkpoint.files is not None and not session.checkpoint.is_loaded:
        arguments |= {"ckpt_path": session.checkpoint.files / _FILE, "weights_only": False}
    return _library_fit(**arguments)


Trainer.fit = _fit  # type: ignore[method-assign, assignment]


def _begin_epoch(trainer: Trainer) -> None:
    """Have a resumed trainer begin its epoch as any other.

    It was saved as the epoch began, with the counts of the last epoch's batches. Lightning would
    take these for the new epoch's and skip it, and would not ask the data for a new order.
    """
    loop = trainer.fit_loop
    loop.epoch_progress.current.ready = loop.epoch_progress.current.completed + 1
    loop.epoch_loop.restarting = False
    loop.on_iteration_done()
