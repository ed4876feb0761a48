"""Write a study that MLflow keeps as a recording: ``python -m autotune.record mlflow_run=RUN_ID output=DIR [tracking.uri=URI]``.

Exit code 0: the recording was written; 2: bad input.
"""

from collections.abc import Sequence
from pathlib import Path

from autotune.config.command_line import parse_command_line, run_main
from autotune.errors import ConfigError
from autotune.recording import write_recording
from autotune.remote.url import refuse_url
from autotune.tracking.mlflow_environment import set_environment

_PURPOSE = "Write a study that MLflow keeps as a recording: its trials with all their learning curves."
_EPILOG = """keys:
  mlflow_run=RUN_ID   id of the study's run, the one that its trials' runs are nested in
  output=DIR          where the recording goes
  tracking.uri=URI    the MLflow store; else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working folder"""
_ACCEPTED = "accepted is mlflow_run=RUN_ID output=DIR, and tracking.uri=URI"


def record_command(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    line = parse_command_line("python -m autotune.record", _PURPOSE, _EPILOG, arguments, takes="mlflow_run=RUN_ID output=DIR")
    given = dict(each.partition("=")[::2] for each in line.overrides)
    unknown = sorted(set(given) - {"mlflow_run", "output", "tracking.uri"})
    missing = [key for key in ("mlflow_run", "output") if not given.get(key)]
    if unknown or missing:
        raise ConfigError(f"{f'found {unknown[0]}' if unknown else f'found no {missing[0]}'}; {_ACCEPTED}")
    refuse_url(given["output"], "output")
    output = Path(given["output"]).expanduser()
    if (output / "study.yaml").exists():
        raise ConfigError(f"output={output}: holds a recording already; accepted is another folder")
    set_environment()
    from autotune.tracking.mlflow_recording import tracked_study  # noqa: PLC0415  # MLflow takes seconds to import

    study = tracked_study(given["mlflow_run"], given.get("tracking.uri"))
    try:
        write_recording(
            output,
            results=study.results,
            target=study.target,
            space=study.space,
            source=f"autotune study {study.name}",
            baseline=study.baseline,
        )
    except OSError as error:
        raise ConfigError(f"output={output}: cannot be written: {error.strerror}") from error
    num_evaluations = sum(len(each.evaluations) for each in study.results)
    print(f"wrote {output}: study {study.name}, {len(study.results)} trials, {num_evaluations} evaluations")
    return 0


def main() -> None:
    """Entry point of ``python -m autotune.record``."""
    run_main(record_command)


if __name__ == "__main__":
    main()
