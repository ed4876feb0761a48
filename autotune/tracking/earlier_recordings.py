"""Finds the recordings of earlier studies that a command line gives by a study's name, a folder, or
the id of an MLflow run.

Of a study that was interrupted, the recording is made of its storage (``autotune.search.study``).

A study that has ended keeps its recording among the artifacts of its MLflow run.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.errors import ConfigError
from autotune.recording import Recording, read_recording
from autotune.redaction import without_secrets
from autotune.remote import refuse_url, user_path

Stored = Callable[[str], tuple[str, Recording] | None]


def earlier_recordings(
    entries: Sequence[str], studies: Path, uri: str | None, stored: Stored = lambda entry: None
) -> list[tuple[str, Recording]]:
    """The recordings that the entries of ``warm_start`` name, each with a name to display.

    Args:
        studies: folder that contains the studies' folders.
        uri: of the MLflow store, as ``tracking.uri``.
        stored: the name and the recording of a study whose storage has more than its folder; None
            for any other entry.

    Raises:
        ConfigError: an entry names neither a study nor a folder with a recording nor a run of a
            study.
        DataError: a recording cannot be read.
    """
    return [stored(entry) or _kept_recording(entry, studies, uri) for entry in entries]


def _kept_recording(entry: str, studies: Path, uri: str | None) -> tuple[str, Recording]:
    refuse_url(
        entry, "warm_start", "a study's name, a folder of this machine, or the id of an MLflow run"
    )
    path = user_path(entry)
    for folder in (path, path / "recording", studies / entry / "recording"):
        if (folder / "study.yaml").is_file():
            study = folder.parent if folder.name == "recording" else folder
            return study.name, read_recording(folder)
    if re.fullmatch("[0-9a-f]{32}", entry):
        with TemporaryDirectory() as temporary:
            name, folder = fetch_recording(entry, uri, Path(temporary))
            return name, read_recording(folder)
    known = sorted(path.parent.parent.name for path in studies.glob("*/recording/study.yaml"))
    raise ConfigError(
        f"warm_start: {entry}: is no study that has a recording in {studies} (there are"
        f" {', '.join(known) or 'none'}), no folder with study.yaml, and no id of an MLflow run;"
        " give one of these"
    )


def fetch_recording(run_id: str, uri: str | None, folder: Path) -> tuple[str, Path]:
    """Bring the recording of the study whose own run in MLflow is ``run_id`` into a folder.

    Args:
        uri: of the MLflow store, as ``tracking.uri``.
        folder: an empty folder.

    Returns:
        The study's name, and the folder of its recording, inside ``folder``.

    Raises:
        ConfigError: the store cannot be read, or the run does not exist, is not the study's own, or
            its study has not ended.
    """
    from autotune.tracking import mlflow_store  # noqa: PLC0415  # MLflow takes seconds to import

    uri, where = mlflow_store.store_uri(uri), f"mlflow_run={run_id}"
    with mlflow_store.first_contact(uri):
        client = mlflow_store.open_store(uri, must_exist=True)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments, f"attributes.run_id = '{run_id}'")
        if not runs:
            raise ConfigError(
                f"{where}: no such run in {without_secrets(uri)}; give the id of a study's run"
            )
        run, tags = runs[0], runs[0].data.tags
        if tags.get("autotune.phase") != "study":
            parent = tags.get("mlflow.parentRunId")
            whose = f"; its study's is {parent}" if parent else ""
            raise ConfigError(f"{where}: is not the run of a study{whose}")
        # a study that was resumed and has not ended since still keeps its recording of before
        kept = {artifact.path for artifact in client.list_artifacts(run_id)}
        if run.info.status != "FINISHED" or "recording" not in kept:
            raise ConfigError(
                f"{where}: study {tags['autotune.study']} has not ended; give its folder, or end it"
                " first"
            )
        fetched = client.download_artifacts(run_id, "recording", str(folder))
        return tags["autotune.study"], Path(fetched)
