"""Lightning: a callback that reports each validation to autotune. It needs the extra ``autotune[lightning]``."""

import contextlib
import sys
from collections.abc import Callable
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
    """Reports the metric of each validation, so that a training ends at its target, at its cap, or when it is paused.

    A paused training goes on from Lightning's own checkpoint. Validation and sanity checks are not timed. What else was logged is
    reported by name. Outside a trial this callback does nothing.

    Examples:
        >>> Trainer(max_epochs=10, callbacks=[autotune.lightning.ReportCallback(monitor="val_f1")]).fit(model, data)

    Args:
        monitor: name that the metric is logged by (``self.log("val_f1", ...)``).
    """

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        self._evaluating = contextlib.ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore a paused training's modules; Lightning then restores loops, optimizers and schedules from the same file."""
        session = current()
        if session is None:
            return
        if trainer.world_size > 1:
            raise ConfigError(f"autotune.lightning: found {trainer.world_size} processes that train together, accepted is one")
        if session.checkpoint.files is not None:
            trainer._checkpoint_connector._restore_modules_and_callbacks(session.checkpoint.files / _FILE, False)  # noqa: SLF001  # no public way within fit

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of a resumed training, whose set-up is over."""
        if (session := current()) is not None:
            session.checkpoint.load()

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
        """Report the metric, and count as training again.

        Raises:
            ConfigError: the metric was not logged.
        """
        session = current()
        if session is None or trainer.sanity_checking or (not trainer.training and not trainer.validating):
            return
        metrics = trainer.callback_metrics
        if self._monitor not in metrics:
            logged = ", ".join(metrics) or "none yet"
            raise ConfigError(f"autotune.lightning.ReportCallback: monitor={self._monitor!r} was not logged, accepted are {logged}")
        is_epoch_over = trainer.fit_loop.epoch_loop._is_training_done  # noqa: SLF001  # within an epoch the data's order could not go on
        session.checkpoint.save({} if is_epoch_over else None, weights=pl_module.state_dict(), write_files=_saver(trainer))
        try:
            further = further_metrics(metrics, self._monitor)
            session.report(metrics[self._monitor], step=trainer.global_step, epoch=trainer.current_epoch + 1, **further)
        finally:
            self._evaluating.close()

    def _enter_evaluating(self) -> None:
        session: Session | None = current()
        if session is not None:
            self._evaluating.enter_context(session.clock.evaluating())


def _saver(trainer: Trainer) -> Callable[[Path], Any]:
    return lambda folder: trainer.save_checkpoint(folder / _FILE)
