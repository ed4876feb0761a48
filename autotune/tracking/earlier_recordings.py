"""Finds the recordings of earlier studies that a command line gives by a study's name, a folder, or the id of an MLflow run."""

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.errors import ConfigError
from autotune.recording import Recording, read_recording, write_recording
from autotune.remote.url import refuse_url
from autotune.tracking.mlflow_environment import set_environment

_RUN_ID = r"[0-9a-f]{32}"


def earlier_recordings(entries: Sequence[str], studies: Path, uri: str | None) -> list[tuple[str, Recording]]:
    """The recordings that the entries of ``warm_start`` name, each with a name to display.

    Args:
        studies: folder that contains the studies' folders.
        uri: of the MLflow store, as ``tracking.uri``.

    Raises:
        ConfigError: an entry names neither a study nor a folder with a recording nor a run of a study.
        DataError: a recording cannot be read.
    """
    return [_earlier_recording(entry, studies, uri) for entry in entries]


def _earlier_recording(entry: str, studies: Path, uri: str | None) -> tuple[str, Recording]:
    refuse_url(entry, "warm_start", "a study's name, a folder of this machine, or the id of an MLflow run")
    path = Path(entry).expanduser()
    for folder, name in ((path, path.name), (path / "recording", path.name), (studies / entry / "recording", entry)):
        if (folder / "study.yaml").is_file():
            return path.parent.name if name == "recording" else name, read_recording(folder)
    if re.fullmatch(_RUN_ID, entry):
        return _tracked_recording(entry, uri)
    known = ", ".join(sorted(path.parent.parent.name for path in studies.glob("*/recording/study.yaml")))
    raise ConfigError(
        f"warm_start: {entry}: is no study that has a recording in {studies} ({f'there are {known}' if known else 'there is none'}), "
        f"no folder with study.yaml, and no id of an MLflow run; accepted is one of these"
    )


def _tracked_recording(run_id: str, uri: str | None) -> tuple[str, Recording]:
    set_environment()
    from autotune.tracking.mlflow_recording import tracked_study  # noqa: PLC0415  # MLflow takes seconds to import

    study = tracked_study(run_id, uri)
    with TemporaryDirectory() as folder:
        write_recording(
            Path(folder), results=study.results, target=study.target, space=study.space, source=study.name, baseline=study.baseline
        )
        return study.name, read_recording(Path(folder))
