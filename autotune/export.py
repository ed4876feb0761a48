"""Write what a study found somewhere else: ``autotune export study=NAME as=NAME --config-dir DIR``
writes its best configuration as an experiment, ``autotune report study=NAME [output=FILE]`` its
HTML report again.

The weights of the winner's first confirmation run that reached the target are copied beside the
experiment, if workers could keep them.
"""

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.config.command_keys import own_key, own_keys_help, read_own_keys, refuse_other_keys
from autotune.config.command_line import parse_command_line
from autotune.errors import ConfigError, StudyError
from autotune.execution.study_folder import shown_path
from autotune.files import check_format, make_folder, replace_file, replacing
from autotune.remote import refuse_url, user_path
from autotune.reporting.study_files import read_summary

_PURPOSE = "Write what a study found as an experiment, DIR/experiment/NAME.yaml, that runs by name."
_REPORT_PURPOSE = (
    "Write the HTML report of a study from the files in its folder: report.html, one page that"
    " opens offline."
)


@dataclass(kw_only=True)
class ExportKeys:
    """Keys of ``autotune export``."""

    study: str = own_key(..., "a study of the folder", shown="NAME")
    experiment: str = own_key(
        ..., "the name that the experiment gets", name="as", shown="EXPERIMENT"
    )
    folder: str = own_key("outputs", "where studies are kept")
    overwrite: bool = own_key(False, "true replaces what has that name", shown="true")


@dataclass(kw_only=True)
class ReportKeys:
    """Keys of ``autotune report``."""

    study: str = own_key(..., "a study of the folder", shown="NAME")
    folder: str = own_key("outputs", "where studies are kept")
    output: str | None = own_key(
        None, "the file to write; else report.html in the study's folder", shown="FILE"
    )


def export_command(arguments: Sequence[str]) -> int:
    """Run ``autotune export`` with command-line arguments and return its exit code: write the
    experiment file, and the weights beside it.
    """
    line = parse_command_line(
        "autotune export",
        _PURPOSE,
        own_keys_help(ExportKeys),
        arguments,
        takes="study=NAME as=NAME --config-dir DIR",
    )
    own, others = read_own_keys(ExportKeys, line.overrides)
    refuse_other_keys(ExportKeys, others)
    if len(line.config_dirs) != 1:
        raise ConfigError(
            f"--config-dir: found {len(line.config_dirs)} folders; as=EXPERIMENT needs one, which"
            " the experiment is written to"
        )
    refuse_url(own.folder, "folder")
    refuse_url(line.config_dirs[0], "--config-dir")
    exported, [config_dir] = own.experiment, line.config_dirs
    study_folder = Path(own.folder) / own.study
    text, known = _best_yaml(study_folder), read_summary(study_folder / "best.json")
    if not re.fullmatch(r"\w[\w-]*(/\w[\w-]*)*", exported, re.ASCII):
        raise ConfigError(
            f"as: found {exported!r}, use letters, digits, '_' and '-', and folders as in"
            " vision/best"
        )
    if exported == known.get("experiment"):
        raise ConfigError(
            f"as: found {exported}, the experiment that the study started from; use another name"
        )
    path = user_path(config_dir) / "experiment" / f"{exported}.yaml"
    if not own.overwrite and path.exists() and path.read_bytes() != text.encode():
        raise ConfigError(
            f"{path}: is there already and says something else; use another name, or overwrite=true"
        )
    make_folder(path.parent)
    replace_file(path, text)
    print(f"wrote {path}")
    weights, copy = study_folder / "best.safetensors", path.with_suffix(".safetensors")
    copy.unlink(missing_ok=True)  # that of an earlier export
    if weights.is_file():  # workers on other machines could not leave them in the study's folder
        with replacing(copy) as part:
            shutil.copyfile(weights, part)
        print(f"wrote {copy}")
    kept = (shown_path(Path(folder)) for folder in known.get("config_dirs", []))
    allowed = ",".join(known.get("allowed_targets", []))
    words = [f"experiment={exported}", *([f"allowed_targets=[{allowed}]"] if allowed else [])]
    for folder in dict.fromkeys([config_dir, *kept]):
        words += ["--config-dir", folder]
    print(f"run it: python -m autotune train {shlex.join(words)}")
    return 0


def _best_yaml(folder: Path) -> str:
    path = folder / "best.yaml"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        found = re.search(r"^# Format (\d{1,9})\.$", text, re.MULTILINE)
        check_format(int(found[1]) if found else None, path)
        return text
    if folder.is_dir():
        raise StudyError(
            f"study={folder.name}: has nothing confirmed to export yet ({path} is not there)"
        )
    known = sorted(best_yaml.parent.name for best_yaml in folder.parent.glob("*/best.yaml"))
    raise StudyError(
        f"study={folder.name}: no such study in {folder.parent}; there are"
        f" {', '.join(known) or 'none'}"
    )


def report_command(arguments: Sequence[str]) -> int:
    """Run ``autotune report`` with command-line arguments and return its exit code."""
    line = parse_command_line(
        "autotune report", _REPORT_PURPOSE, own_keys_help(ReportKeys), arguments, takes="study=NAME"
    )
    own, others = read_own_keys(ReportKeys, line.overrides)
    refuse_other_keys(ReportKeys, others)
    refuse_url(own.folder, "folder")
    refuse_url(own.output or "", "output", "a file of this machine")
    # imports Plotly and scikit-learn, after --help
    from autotune.reporting.html import write_study_report  # noqa: PLC0415

    output = None if own.output is None else user_path(own.output)
    print(f"wrote {write_study_report(user_path(own.folder) / own.study, output)}")
    return 0
