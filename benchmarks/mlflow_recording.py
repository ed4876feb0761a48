"""Write a study that was tracked in MLflow as a recording.

``python -m benchmarks.mlflow_recording --mlflow-run RUN_ID --output DIR [--tracking-uri URI]``
copies the recording that a study which has ended keeps among the artifacts of its MLflow run.

Exit code 0: the recording was written; 2: bad input.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.config.command_line import run_main
from autotune.errors import ConfigError
from autotune.files import make_folder, replace_file
from autotune.recording import read_recording
from autotune.redaction import without_secrets
from autotune.remote import refuse_url, user_path
from autotune.tracking.mlflow_store import database_file, first_contact, open_store, store_uri


def mlflow_recording_command(arguments: Sequence[str]) -> int:
    """Run ``python -m benchmarks.mlflow_recording`` with command-line arguments and return its exit
    code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mlflow_recording",
        description="Write a study that was tracked in MLflow as a recording: its trials with all"
        " their learning curves.",
    )
    parser.add_argument(
        "--mlflow-run",
        required=True,
        metavar="RUN_ID",
        help="id of the study's run, the one that its trials' runs are nested in",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="where the recording goes")
    parser.add_argument(
        "--tracking-uri",
        metavar="URI",
        help="the MLflow store; else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working"
        " folder",
    )
    own = parser.parse_args(arguments)
    refuse_url(own.output, "--output")
    output = user_path(own.output)
    if (output / "study.yaml").exists():
        raise ConfigError(f"--output {output}: holds a recording already; use another folder")
    with TemporaryDirectory() as temporary:
        study, fetched = _fetch_recording(own.mlflow_run, own.tracking_uri, Path(temporary))
        recording = read_recording(fetched)
        make_folder(output)
        for file in fetched.iterdir():
            replace_file(output / file.name, file.read_bytes())
    num_evaluations = sum(len(trial.steps) for trial in recording.trials)
    print(
        f"wrote {output}: study {study}, {len(recording.trials)} trials, {num_evaluations}"
        " evaluations"
    )
    return 0


def _fetch_recording(run_id: str, uri: str | None, folder: Path) -> tuple[str, Path]:
    """Bring the recording of the study whose own run in MLflow is ``run_id`` into a folder.

    Args:
        uri: of the MLflow store; None for the usual one.
        folder: an empty folder.

    Returns:
        The study's name, and the folder of its recording, inside ``folder``.

    Raises:
        ConfigError: the store cannot be read, or the run does not exist, is not the study's own, or
            its study has not ended.
    """
    uri, where = store_uri(uri), f"--mlflow-run {run_id}"
    with first_contact(uri):
        file = database_file(uri)
        if file is not None and not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")
        client = open_store(uri)
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


if __name__ == "__main__":
    run_main(mlflow_recording_command)
