"""Between a study's storage and MLflow, in both directions.

``autotune record mlflow_run=RUN_ID output=DIR [tracking.uri=URI]`` writes a study that was tracked
in MLflow as a recording. ``autotune record --push experiment=NAME study.name=NAME ...``, with the
study's own arguments, gives the study's tracker what it lacks (``autotune.tune_study``).

Exit code 0: everything was written; 1: the tracker still lacks something; 2: bad input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.config.command_keys import own_key, own_keys_help, read_own_keys, refuse_other_keys
from autotune.config.command_line import parse_command_line, run_main
from autotune.errors import ConfigError
from autotune.files import make_folder, replace_file
from autotune.recording import read_recording
from autotune.remote import refuse_url, user_path
from autotune.tracking.earlier_recordings import fetch_recording

_PURPOSE = (
    "Write a study that MLflow keeps as a recording: its trials with all their learning curves."
)
_PUSH_HELP = """
autotune record --push experiment=NAME study.name=NAME ...
  with the arguments of a study, gives its tracker what that lacks of it, and trains nothing"""


@dataclass(kw_only=True)
class RecordKeys:
    """Keys of ``autotune record``."""

    mlflow_run: str = own_key(
        ..., "id of the study's run, the one that its trials' runs are nested in", shown="RUN_ID"
    )
    output: str = own_key(..., "where the recording goes", shown="DIR")
    tracking_uri: str | None = own_key(
        None,
        "the MLflow store; else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working"
        " folder",
        name="tracking.uri",
        shown="URI",
    )


def record_command(arguments: Sequence[str]) -> int:
    """Run ``autotune record`` with command-line arguments and return its exit code."""
    help_text = own_keys_help(RecordKeys) + "\n" + _PUSH_HELP
    line = parse_command_line(
        "autotune record", _PURPOSE, help_text, arguments, takes="mlflow_run=RUN_ID output=DIR"
    )
    own, others = read_own_keys(RecordKeys, line.overrides)
    refuse_other_keys(RecordKeys, others)
    refuse_url(own.output, "output")
    output = user_path(own.output)
    if (output / "study.yaml").exists():
        raise ConfigError(f"output={output}: holds a recording already; use another folder")
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
    run_main(record_command)
