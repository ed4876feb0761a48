"""Write the HTML report of a study again: ``autotune report study=NAME [study=...] [folder=outputs]
[output=FILE]``.

Exit code 0: the report was written; 2: bad input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.config.command_keys import own_key, own_keys_help, read_own_keys, refuse_other_keys
from autotune.config.command_line import parse_command_line, run_main
from autotune.errors import ConfigError
from autotune.remote import refuse_url, user_path

_PURPOSE = (
    "Write the HTML report of a study from the files in its folder: report.html, one page that"
    " opens offline."
)


@dataclass(kw_only=True)
class ReportKeys:
    """Keys of ``autotune report``."""

    study: str = own_key(..., "a study of the folder; may be given several times", shown="NAME")
    folder: str = own_key("outputs", "where studies are kept")
    output: str | None = own_key(
        None, "the file to write; else report.html in the study's folder", shown="FILE"
    )


def report_command(arguments: Sequence[str]) -> int:
    """Run ``autotune report`` with command-line arguments and return its exit code."""
    line = parse_command_line(
        "autotune report", _PURPOSE, own_keys_help(ReportKeys), arguments, takes="study=NAME"
    )
    studies = [override for override in line.overrides if override.startswith("study=")]
    shared = [override for override in line.overrides if override not in studies]
    keys = []
    for study in studies or [""]:
        own, others = read_own_keys(ReportKeys, [*shared, study] if study else shared)
        refuse_other_keys(ReportKeys, others)
        refuse_url(own.folder, "folder")
        keys.append(own)
    output = None if keys[0].output is None else user_path(keys[0].output)
    if output is not None:
        refuse_url(str(keys[0].output), "output")
        if len(keys) > 1:
            raise ConfigError(f"output={output}: found {len(keys)} studies; use one")
    for own in keys:
        folder = user_path(own.folder) / own.study
        print(f"wrote {write_report(folder, output)}")
    return 0


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the report of the study in a folder, or into the file ``output``, and return its path.

    Raises:
        AutotuneError: the folder has no study that has ended, or one of its files cannot be read.
    """
    # imports Plotly and scikit-learn, after --help
    from autotune.reporting.html import write_study_report  # noqa: PLC0415

    return write_study_report(folder, output)


if __name__ == "__main__":
    run_main(report_command)
