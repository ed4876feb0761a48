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
from autotune.remote import refuse_url, user_path
from autotune.tracking.earlier_recordings import fetch_recording


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
        study, fetched = fetch_recording(own.mlflow_run, own.tracking_uri, Path(temporary))
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


if __name__ == "__main__":
    run_main(mlflow_recording_command)
