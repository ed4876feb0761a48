"""Write the best configuration of a study as an experiment: ``autotune export study=NAME as=NAME --config-dir DIR``.

The weights of the winner's first confirmation run that reached the target are copied beside the experiment, if workers could keep them.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.config.command_line import parse_command_line, run_main
from autotune.config.experiment_file import train_command
from autotune.config.own_keys import own_key, own_keys_help, read_own_keys, refuse_other_keys
from autotune.errors import ConfigError, StudyError
from autotune.execution.study_folder import shown_path
from autotune.files import replacing
from autotune.remote.url import refuse_url

_PURPOSE = "Write what a study found as an experiment, DIR/experiment/NAME.yaml, that runs by name."


@dataclass(kw_only=True)
class ExportKeys:
    """Keys of ``autotune export``."""

    study: str = own_key(..., "a study of the folder", shown="NAME")
    experiment: str = own_key(..., "the name that the experiment gets", name="as", shown="EXPERIMENT")
    folder: str = own_key("outputs", "where studies are kept")
    overwrite: bool = own_key(False, "true replaces an experiment of that name", shown="true")


def export_command(arguments: Sequence[str]) -> int:
    """Run ``autotune export`` with command-line arguments and return its exit code."""
    line = parse_command_line(
        "autotune export", _PURPOSE, own_keys_help(ExportKeys), arguments, takes="study=NAME as=NAME --config-dir DIR"
    )
    own, others = read_own_keys(ExportKeys, line.overrides)
    refuse_other_keys(ExportKeys, others)
    if len(line.config_dirs) != 1:
        raise ConfigError(f"--config-dir: found {len(line.config_dirs)} folders, accepted is one, which the experiment is written to")
    for key, location in (("folder", own.folder), ("--config-dir", line.config_dirs[0])):
        refuse_url(location, key)
    exported, study_folder = own.experiment, Path(own.folder) / own.study
    if not re.fullmatch(r"[A-Za-z0-9_][\w-]*", exported):
        raise ConfigError(f"as: found {exported!r}, accepted are letters, digits, '_' and '-'")
    text = _best_yaml(study_folder)
    base = re.search(r"^defaults:\s*\n-\s*(\S+)|^defaults:\s*\[?\s*([\w-]+)", text, re.MULTILINE)
    if base is not None and exported in base.groups():
        raise ConfigError(f"as: found {exported}, the experiment that the study started from; accepted is another name")
    path = Path(line.config_dirs[0]).expanduser() / "experiment" / f"{exported}.yaml"
    if path.exists() and path.read_text(encoding="utf-8") != text and not own.overwrite:
        raise ConfigError(f"{path}: is there already and says something else; accepted is another name, or overwrite=true")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        weights = _copy_weights(study_folder / "best.safetensors", path.with_suffix(".safetensors"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"wrote {' and '.join(map(str, [path, *weights]))}")
    folders, allowed = _config_dirs_and_targets(study_folder)
    print(f"run it: {train_command(exported, list(dict.fromkeys([line.config_dirs[0], *folders])), allowed)}")
    return 0


def _copy_weights(source: Path, to: Path) -> list[Path]:
    """Copy the weights, completely or not at all, and return the paths written; without weights, remove those of an earlier export."""
    if not source.is_file():  # workers on other machines could not leave them in the study's folder
        to.unlink(missing_ok=True)
        return []
    with replacing(to) as part:
        shutil.copyfile(source, part)
    return [to]


def _config_dirs_and_targets(study_folder: Path) -> tuple[list[str], list[str]]:
    """The folders of ``--config-dir`` and the ``allowed_targets`` that the study was started with."""
    path = study_folder / "best.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return [shown_path(Path(folder)) for folder in known.get("config_dirs", [])], known.get("allowed_targets", [])


def _best_yaml(folder: Path) -> str:
    path = folder / "best.yaml"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if folder.is_dir():
        raise StudyError(f"study={folder.name}: has nothing confirmed to export yet ({path} is not there)")
    known = ", ".join(sorted(best_yaml.parent.name for best_yaml in folder.parent.glob("*/best.yaml")))
    raise StudyError(f"study={folder.name}: no such study in {folder.parent}; " + (f"accepted are {known}" if known else "there is none"))


if __name__ == "__main__":
    run_main(export_command)
