"""Reads the runs that MLflow holds of a study, with their outcomes and scores; ``autotune verify`` compares them with the study."""

from dataclasses import dataclass
from pathlib import Path

from autotune.hiding import without_secrets
from autotune.outcome import Outcome
from autotune.tracking.mlflow_fields import OUTCOME_TAG, RUN_TAG
from autotune.tracking.mlflow_tracker import preload
from autotune.tracking.mlflow_uri import store_uri


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run of a trial or of a confirmation in MLflow."""

    outcome: str | None
    """Outcome that the run's tag says; None for a run that is still open."""
    score: float | None

    @property
    def is_result(self) -> bool:
        """Whether the run says a result that counts, and not that of a trial that was interrupted, lost or taken again."""
        return self.outcome in set(Outcome) - {Outcome.CONTENDED, Outcome.LOST}


def tracked_study(study: str, folder: Path, experiment: str, uri: str | None) -> tuple[str, dict[str, TrackedRun] | None]:
    """The store's name for messages, and a study's runs in it by name, such as ``trial-7``; None if the store has no such study.

    A name that has several runs, since one was interrupted, stands for the one with a result.

    Args:
        folder: the study's folder; where no run of that folder is known, as after it was moved, the name of the study decides.
        experiment: name of the MLflow experiment.
        uri: of the store, as ``tracking.uri``.

    Raises:
        ConfigError: the store cannot be read.
    """
    preload()
    from autotune.tracking import mlflow_store  # noqa: PLC0415  # MLflow takes seconds to import

    uri = store_uri(uri)
    with mlflow_store.first_contact(uri):
        client = mlflow_store.open_store(uri)
        known = client.get_experiment_by_name(experiment)
        if known is None:
            return without_secrets(uri), None
        parents = mlflow_store.tagged_runs(client, known.experiment_id, {"autotune.study": study, "autotune.phase": "study"})
        own = [run for run in parents if run.data.tags.get("autotune.folder") == str(folder.resolve())] or parents
        if not own:
            return without_secrets(uri), None
        parent = max(own, key=lambda run: run.info.start_time)
        runs: dict[str, TrackedRun] = {}
        for run in mlflow_store.tagged_runs(client, known.experiment_id, {"mlflow.parentRunId": parent.info.run_id}):
            name = run.data.tags.get(RUN_TAG, run.info.run_name)
            tracked = TrackedRun(outcome=run.data.tags.get(OUTCOME_TAG), score=run.data.metrics.get("score"))
            if name not in runs or tracked.is_result:
                runs[name] = tracked
        return without_secrets(uri), runs
