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
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.session import ADDRESS, current

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
else:  # the same library under its older name
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy

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
        if (session := current()) is None:
            return
        if kept := session.checkpoint.load():
            trainer.should_stop = kept["should_stop"]
            trainer.callback_metrics.update(kept["callback_metrics"])
            _begin_epoch(trainer)
        metrics = dict(trainer.callback_metrics)
        self._report(trainer, {"should_stop": trainer.should_stop, "callback_metrics": metrics})

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Report a validation within an epoch, where the order of the data could not continue."""
        self._report(trainer, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last validation, after which nothing is left to train."""
        self._report(trainer, None)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting as training, also for a sanity check."""
        if (session := current()) is not None:
            self._evaluating.enter_context(session.clock.evaluating())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count as training again.

        What ``Trainer.validate`` scores is reported if it was trained and no validation scored it
        before.
        """
        self._evaluating.close()
        is_fitting = trainer.state.fn == "fit"
        if not trainer.sanity_checking and trainer.global_step > self._reported_step:
            self._due_epoch = trainer.current_epoch + is_fitting
        if not is_fitting:
            self._report(trainer, None)

    def _report(self, trainer: Trainer, state: dict[str, Any] | None) -> None:
        """Report the validation that is due, if one is.

        Args:
            trainer: what trains.
            state: what a training needs to continue from here, beside Lightning's checkpoint; None
                if it cannot.

        Raises:
            ConfigError: the metric was not logged.
        """
        if self._due_epoch is None or (session := current()) is None:
            return
        epoch, self._due_epoch, self._reported_step = self._due_epoch, None, trainer.global_step

        def write_files(folder: Path) -> None:
            trainer.save_checkpoint(folder / _FILE, weights_only=False)

        session.report_trainer(
            trainer,
            trainer.callback_metrics,
            self._monitor,
            step=trainer.global_step,
            epoch=epoch,
            state=state,
            # gathering a divided one takes all ranks, and time
            weights=None
            if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
            else trainer.lightning_module.state_dict(),
            write_files=write_files,
        )


_library_fit = Trainer.fit


@functools.wraps(_library_fit)
def _fit(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """``Trainer.fit``; in a trial it trains in the trial's processes, and continues a paused
    training.

    Both are too late in a callback: its first hook runs in the processes that Lightning has
    started, with ``ckpt_path`` read.

    Raises:
        ConfigError: the trainer would train in more or fewer processes.
    """
    # made without a type
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    reporting = [callback for callback in callbacks if isinstance(callback, ReportCallback)]
    if reporting and (session := current()) is not None:
        session.check_size(
            trainer.num_devices * trainer.num_nodes,  # its world_size is that of the environment
            f"a Trainer with devices={trainer.num_devices}, num_nodes={trainer.num_nodes}",
        )
        # a script of which this is no rank starts its own; ddp_spawn would start them again
        if "TORCHELASTIC_RUN_ID" in os.environ or ADDRESS not in os.environ:
            trainer.strategy._launcher = None  # noqa: SLF001
        # no other begins an epoch before this one reports the last
        callbacks.sort(key=lambda callback: callback not in reporting)
        if session.checkpoint.files is not None and not session.checkpoint.is_loaded:
            kwargs |= {"ckpt_path": session.checkpoint.files / _FILE, "weights_only": False}
    return _library_fit(trainer, *args, **kwargs)


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
