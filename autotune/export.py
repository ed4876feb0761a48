"""Write what a study found as an experiment of one's own: ``python -m autotune.export study=NAME as=NAME --config-dir DIR``.

The weights of the winner's first confirmation run that reached the target come to lie beside it, where workers could keep them.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from autotune.config.command_line import parse_command_line, run_main
from autotune.config.experiment_file import train_command
from autotune.errors import ConfigError, StudyError
from autotune.execution.study_folder import shown_path
from autotune.remote.url import refuse_url


def export_command(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    line = parse_command_line("python -m autotune.export", "Write what a study found as DIR/experiment/NAME.yaml.", _EPILOG, arguments)
    given = dict(each.partition("=")[::2] for each in line.overrides)
    unknown = set(given) - {"study", "as", "folder", "overwrite"}
    if unknown or "study" not in given or "as" not in given or len(line.config_dirs) != 1:
        found = f"found {' '.join(sorted(unknown))}, " if unknown else ""
        raise ConfigError(f"{found}accepted is study=NAME as=EXPERIMENT --config-dir DIR, and folder=outputs, overwrite=true")
    for key, location in (("folder", given.get("folder", "")), ("--config-dir", line.config_dirs[0])):
        refuse_url(location, key)
    name, exported = given["study"], given["as"]
    study_folder = Path(given.get("folder", "outputs")) / name
    if not re.fullmatch(r"[A-Za-z0-9_][\w-]*", exported):
        raise ConfigError(f"as: found {exported!r}, accepted are letters, digits, '_' and '-'")
    text = _best_yaml(study_folder)
    base = re.search(r"^defaults:\s*\n-\s*(\S+)|^defaults:\s*\[?\s*([\w-]+)", text, re.MULTILINE)
    if base is not None and exported in base.groups():
        raise ConfigError(f"as: found {exported}, the experiment that the study started from; accepted is another name")
    path = Path(line.config_dirs[0]).expanduser() / "experiment" / f"{exported}.yaml"
    if path.exists() and path.read_text(encoding="utf-8") != text and given.get("overwrite") != "true":
        raise ConfigError(f"{path}: is there already and says something else; accepted is another name, or overwrite=true")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        weights = _copy_weights(study_folder / "best.safetensors", path.with_suffix(".safetensors"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"wrote {' and '.join(map(str, [path, *weights]))}")
    folders, allowed = _needed(study_folder)
    print(f"run it: {train_command(exported, list(dict.fromkeys([line.config_dirs[0], *folders])), allowed)}")
    return 0


_EPILOG = """keys:
  study=NAME       a study of this folder
  as=EXPERIMENT    the experiment's name
  folder=outputs   where studies are kept
  overwrite=true   replace an experiment of that name"""


def _copy_weights(source: Path, to: Path) -> list[Path]:
    """Put the weights beside the experiment, as a whole or not at all, and say where; those of an earlier export must not stay."""
    if not source.is_file():  # workers on other machines could not leave them in the study's folder
        to.unlink(missing_ok=True)
        return []
    part = to.with_name(f".{to.name}.part")
    shutil.copyfile(source, part)
    part.replace(to)
    return [to]


def _needed(study_folder: Path) -> tuple[list[str], list[str]]:
    """Folders of configuration files, and what they may name, that the study itself was started with."""
    path = study_folder / "best.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return [shown_path(Path(each)) for each in known.get("config_dirs", [])], known.get("allowed_targets", [])


def _best_yaml(folder: Path) -> str:
    path = folder / "best.yaml"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if folder.is_dir():
        raise StudyError(f"study={folder.name}: has nothing confirmed to export yet ({path} is not there)")
    known = ", ".join(sorted(each.parent.name for each in folder.parent.glob("*/best.yaml")))
    raise StudyError(f"study={folder.name}: no such study in {folder.parent}; " + (f"accepted are {known}" if known else "there is none"))


def main() -> None:
    """Entry point of ``python -m autotune.export``."""
    run_main(export_command)


if __name__ == "__main__":
    main()
