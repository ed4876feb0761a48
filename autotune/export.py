"""Write the best configuration of a study as an experiment: ``autotune export study=NAME as=NAME
--config-dir DIR``.

The weights of the winner's first confirmation run that reached the target are copied beside the
experiment, if workers could keep them. ``script=FILE`` writes a plain PyTorch program that needs no
autotune, and ``arguments=FILE`` the arguments of one's own training function.
"""

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.config.command_line import parse_command_line, run_main
from autotune.config.experiment_file import train_command
from autotune.config.own_keys import own_key, own_keys_help, read_own_keys, refuse_other_keys
from autotune.errors import ConfigError, StudyError
from autotune.execution.study_folder import shown_path
from autotune.files import check_format, make_folder, replace_file, replacing
from autotune.remote import refuse_url, user_path

_PURPOSE = (
    "Write what a study found as an experiment, DIR/experiment/NAME.yaml, that runs by name, or as"
    " a plain PyTorch program."
)


@dataclass(kw_only=True)
class ExportKeys:
    """Keys of ``autotune export``."""

    study: str = own_key(..., "a study of the folder", shown="NAME")
    experiment: str | None = own_key(
        None, "the name that the experiment gets", name="as", shown="EXPERIMENT"
    )
    script: str | None = own_key(
        None, "the file of a program that trains it without autotune", shown="FILE.py"
    )
    arguments: str | None = own_key(
        None, "the file of the arguments of one's own training function", shown="FILE.yaml"
    )
    folder: str = own_key("outputs", "where studies are kept")
    overwrite: bool = own_key(False, "true replaces what has that name", shown="true")


def export_command(arguments: Sequence[str]) -> int:
    """Run ``autotune export`` with command-line arguments and return its exit code."""
    line = parse_command_line(
        "autotune export",
        _PURPOSE,
        own_keys_help(ExportKeys),
        arguments,
        takes="study=NAME [as=NAME --config-dir DIR] [script=FILE]",
    )
    own, others = read_own_keys(ExportKeys, line.overrides)
    refuse_other_keys(ExportKeys, others)
    wants_experiment = (
        own.experiment is not None or line.config_dirs or not (own.script or own.arguments)
    )
    if wants_experiment and own.experiment is None:
        raise ConfigError(
            "as: missing; accepted is as=EXPERIMENT with --config-dir, or script=FILE.py"
        )
    if wants_experiment and len(line.config_dirs) != 1:
        raise ConfigError(
            f"--config-dir: found {len(line.config_dirs)} folders, accepted is one, which the"
            " experiment is written to"
        )
    for key, location in (
        ("folder", own.folder),
        *(("--config-dir", folder) for folder in line.config_dirs),
    ):
        refuse_url(location, key)
    for key, file in (("script", own.script), ("arguments", own.arguments)):
        refuse_url(file or "", key, "a file of this machine")
    if own.experiment is not None and not re.fullmatch(
        r"\w[\w-]*(/\w[\w-]*)*", own.experiment, re.ASCII
    ):
        raise ConfigError(
            f"as: found {own.experiment!r}, accepted are letters, digits, '_' and '-', and folders"
            " as in vision/best"
        )
    study_folder = Path(own.folder) / own.study
    text = _best_yaml(study_folder)
    if own.experiment is not None:
        _export_experiment(own, line.config_dirs[0], study_folder, text)
    if own.script or own.arguments:
        _export_program(own, study_folder, text)
    return 0


def _export_experiment(own: ExportKeys, config_dir: str, study_folder: Path, text: str) -> None:
    """Write the experiment file, and the weights beside it."""
    exported = own.experiment or ""
    if exported == _best_json(study_folder).get("experiment"):
        raise ConfigError(
            f"as: found {exported}, the experiment that the study started from; accepted is another"
            " name"
        )
    path = user_path(config_dir) / "experiment" / f"{exported}.yaml"
    _write(path, text, overwrite=own.overwrite)
    try:
        weights = _copy_weights(study_folder / "best.safetensors", path.with_suffix(".safetensors"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"wrote {' and '.join(map(str, [path, *weights]))}")
    folders, allowed = _config_dirs_and_targets(study_folder)
    shown_folders = dict.fromkeys([config_dir, *(shown_path(Path(folder)) for folder in folders)])
    print(f"run it: {train_command(exported, list(shown_folders), allowed)}")


def _export_program(own: ExportKeys, study_folder: Path, text: str) -> None:
    """Write the program that needs no autotune, and the arguments of the user's own function."""
    # after --help
    from autotune.execution.exported import (  # noqa: PLC0415
        arguments_text,
        compose_exported,
        script_text,
    )

    composed = compose_exported(text, *_config_dirs_and_targets(study_folder))
    if own.script:
        num_threads = _best_json(study_folder).get(
            "num_threads", composed.config.cluster.cpus_per_worker or 1
        )
        path = user_path(own.script)
        _write(
            path,
            script_text(composed.trial, text, num_threads=num_threads),
            overwrite=own.overwrite,
        )
        print(f"wrote {path}\nrun it: python {shlex.quote(str(path))}")
    if own.arguments:
        path = user_path(own.arguments)
        content = arguments_text(composed.trial, study=own.study)
        _write(path, content, overwrite=own.overwrite)
        print(f"wrote {path}\n{content.partition(chr(10))[0].removeprefix('# ')}")


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a file; what says something else is only replaced if the user said so.

    Raises:
        ConfigError: the file cannot be written, or is there already.
    """
    try:
        if path.exists() and path.read_text(encoding="utf-8") != text and not overwrite:
            raise ConfigError(
                f"{path}: is there already and says something else; accepted is another name, or"
                " overwrite=true"
            )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    make_folder(path.parent)
    replace_file(path, text)


def _copy_weights(source: Path, to: Path) -> list[Path]:
    """Copy the weights, completely or not at all, and return the paths written.

    Without weights, remove those of an earlier export.
    """
    if not source.is_file():  # workers on other machines could not leave them in the study's folder
        to.unlink(missing_ok=True)
        return []
    with replacing(to) as part:
        shutil.copyfile(source, part)
    return [to]


def _config_dirs_and_targets(study_folder: Path) -> tuple[list[str], list[str]]:
    """The folders of ``--config-dir`` and the ``allowed_targets`` that the study was started
    with.
    """
    known = _best_json(study_folder)
    return known.get("config_dirs", []), known.get("allowed_targets", [])


def _best_json(study_folder: Path) -> dict[str, Any]:
    from autotune.reporting.study_files import read_summary  # noqa: PLC0415  # after --help

    return read_summary(study_folder / "best.json")


def _best_yaml(folder: Path) -> str:
    path = folder / "best.yaml"
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StudyError(
                f"study={folder.name}: {path}: cannot be read: {' '.join(str(error).split())}"
            ) from error
        check_format(
            "experiment",
            (
                int(found[1])
                if (found := re.search(r"^# Format (\d{1,9})\.$", text, re.MULTILINE))
                else None
            ),
            path,
        )
        return text
    if folder.is_dir():
        raise StudyError(
            f"study={folder.name}: has nothing confirmed to export yet ({path} is not there)"
        )
    known = ", ".join(
        sorted(best_yaml.parent.name for best_yaml in folder.parent.glob("*/best.yaml"))
    )
    raise StudyError(
        f"study={folder.name}: no such study in {folder.parent}; "
        + (f"accepted are {known}" if known else "there is none")
    )


if __name__ == "__main__":
    run_main(export_command)
