"""Opens, resumes and reads a study's storage.

The storage (Optuna's journal file in the study's folder, or a relational database by URL) is the
only source of truth for the study's definition, every result and every confirmation run. All other
files in the folder are derived from it.

``storage.py`` opens both.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna

from autotune.config.schema import first_difference
from autotune.errors import DataError, StudyError
from autotune.files import FORMATS, check_format
from autotune.hiding import without_secrets, without_secrets_in
from autotune.measurement import Target, TrialResult
from autotune.recording import Recording, read_recording, write_recording
from autotune.remote import user_path
from autotune.search.randomness import derived_seed
from autotune.search.samplers import PausingSampler, optuna_sampler, quiet_optuna
from autotune.search.storage import JOURNAL, STORAGE_ERRORS, open_storage, reason
from autotune.search.stored_trials import baseline_number, finished_results

_DEFINITION = "autotune:definition"
_FORMAT = "autotune:format"
_CONFIRMED = "autotune:confirmed:"
_RACE = "autotune:race"
_RESULTS = ("best.json", "recording", "trials.csv")
"""What a study leaves in its folder once it has had a trial."""

_RUN_ID = r"[0-9a-f]{32}"  # of MLflow's


Study = optuna.Study
"""Optuna's own study, which ``autotune.search`` and ``autotune.execution`` share."""


def open_study(
    name: str,
    folder: Path,
    *,
    storage_url: str | None,
    make_sampler: Callable[[int], object],
    seed: int,
    definition: Mapping[str, Any],
) -> tuple[Study, PausingSampler | None]:
    """Open the study of a name, or create it, and return it with its sampler if that pauses trials,
    else with None.

    Args:
        make_sampler: makes a sampler from a seed: an Optuna sampler or one that pauses trials. A
            resumed sampler must not draw again what it drew at the start, so its seed depends on
            how many trials there are.
        seed: seed of the study.
        definition: settings that two runs of one study must have in common; plain data, kept in the
            storage.

    Raises:
        StudyError: the study exists with another definition, and the message names the first
            difference; or its journal is damaged; or the folder has results of a study, and the
            storage has none.
        ConfigError: the storage cannot be opened, or the sampler is of neither kind.
    """
    quiet_optuna()
    folder.mkdir(parents=True, exist_ok=True)
    storage, sampler_for_now = (
        open_storage(folder, storage_url, is_owner=True),
        optuna.samplers.RandomSampler(),
    )
    try:
        study = optuna.load_study(study_name=name, storage=storage, sampler=sampler_for_now)
        has_trials = bool(study.get_trials(deepcopy=False))
    except KeyError:
        study, has_trials = None, False
    if not has_trials:
        _check_has_no_results(name, folder, storage_url)
    if study is None:
        study = optuna.create_study(
            study_name=name, storage=storage, sampler=sampler_for_now, direction="minimize"
        )
    _check_format(name, study)
    stored = study.user_attrs.get(_DEFINITION)
    # as a storage returns it: tuples are lists, keys are text
    wanted: dict[str, Any] = json.loads(json.dumps(definition))
    if stored is None:
        study.set_user_attr(_FORMAT, FORMATS["study"])
        study.set_user_attr(_DEFINITION, wanted)
    elif (difference := first_difference(without_secrets_in(stored), wanted)) is not None:
        raise StudyError(
            f"study.name={name}: was made for something else ({difference}); accepted is the same,"
            f" or another study.name, with warm_start=[{name}] to learn from the trials of this one"
        )
    sampler = make_sampler(derived_seed(seed, f"sampler {len(study.get_trials(deepcopy=False))}"))
    study.sampler = optuna_sampler(sampler)
    return study, sampler if isinstance(sampler, PausingSampler) else None


def study_in_memory(sampler: object) -> Study:
    """A study that is only kept in memory, for an Optuna sampler or one that pauses trials.

    Raises:
        ConfigError: the sampler is of neither kind.
    """
    quiet_optuna()
    return optuna.create_study(sampler=optuna_sampler(sampler), direction="minimize")


def read_study(name: str, folder: Path, *, storage_url: str | None = None) -> Study:
    """Load an existing study.

    Raises:
        StudyError: no study has that name.
    """
    quiet_optuna()
    if storage_url is None and not (folder / JOURNAL).is_file():
        studies = sorted(path.parent.name for path in folder.parent.glob(f"*/{JOURNAL}"))
        known = (
            f"accepted are {', '.join(studies)}" if studies else f"there is none in {folder.parent}"
        )
        raise StudyError(f"study={name}: no such study; {known}")
    storage = open_storage(folder, storage_url)
    try:
        study = optuna.load_study(study_name=name, storage=storage)
    except KeyError as error:
        names = ", ".join(sorted(optuna.get_all_study_names(storage)))
        known = f"accepted are {names}" if names else "there is none"
        raise StudyError(
            f"study={name}: no such study in"
            f" {without_secrets(storage_url or str(folder / JOURNAL))}; {known}"
        ) from error
    _check_format(name, study)
    return study


def _check_format(name: str, study: Study) -> None:
    """Raise StudyError for a study that a newer autotune made."""
    try:
        check_format("study", study.user_attrs.get(_FORMAT), f"study.name={name}")
    except DataError as error:
        raise StudyError(str(error)) from error


def study_definition(study: Study) -> dict[str, Any]:
    """The definition that the study was created with: settings that all its runs have in common."""
    return dict(study.user_attrs.get(_DEFINITION, {}))


def stored_recording(
    entry: str, *, studies: Path, storage_url: str | None
) -> tuple[str, Recording] | None:
    """Name and recording of a study that was interrupted or still runs, made of its storage.

    None if its folder has all, or it has none.

    Args:
        entry: name of the study, or its folder.
        studies: folder that contains the studies' folders.

    Raises:
        StudyError: the database has no study of that name, or the storage does not hold what a
            study writes.
        DataError: its search space is none.
    """
    places = (user_path(entry), studies / entry)
    folder = next((folder for folder in places if (folder / JOURNAL).is_file()), None)
    recordings = [
        place / path
        for place in places
        for path in ("study.yaml", "recording/study.yaml")
        if (place / path).is_file()
    ]
    if folder is not None:
        is_recorded = any(
            path.stat().st_mtime >= (folder / JOURNAL).stat().st_mtime for path in recordings
        )
    else:
        is_recorded = (
            bool(recordings) or storage_url is None or re.fullmatch(_RUN_ID, entry) is not None
        )
    if is_recorded:
        return None
    name = (folder or studies / entry).resolve().name
    study = read_study(name, folder or studies / name, storage_url=None if folder else storage_url)
    definition = study_definition(study)
    with TemporaryDirectory(prefix="autotune-") as recording:
        try:
            write_recording(
                Path(recording),
                results=list(finished_results(study).values()),
                target=Target(**definition["configuration"]["target"]),
                space=definition["search_space"],
                source=f"autotune study {name}",
                baseline=baseline_number(study),
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reason_told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise StudyError(
                f"study={name}: the storage does not hold what a study writes ({reason_told})"
            ) from error
        return name, read_recording(Path(recording))


def store_confirmation(study: Study, arm: int, index: int, result: TrialResult) -> None:
    """Store the result of one confirmation run: ``arm`` is the trial number, ``index`` the
    number of the round, from zero.
    """
    study.set_user_attr(f"{_CONFIRMED}{arm}:{index}", result.as_dict())


def confirmations(study: Study) -> dict[tuple[int, int], TrialResult]:
    """Results of all confirmation runs of a study, by arm (trial number) and number of the
    round.
    """
    results: dict[tuple[int, int], TrialResult] = {}
    for key, value in study.user_attrs.items():
        if key.startswith(_CONFIRMED):
            arm, index = key.removeprefix(_CONFIRMED).split(":")
            results[int(arm), int(index)] = TrialResult.from_dict(value)
    return results


def store_race(study: Study, race: Mapping[str, Any]) -> None:
    """Store the plan of the latest confirmation race, as plain data, so that another process can
    continue that race.
    """
    study.set_user_attr(_RACE, race)


def stored_race(study: Study) -> Mapping[str, Any] | None:
    """The plan of the latest confirmation race, as ``store_race`` stored it.

    None if there is none.
    """
    race: Mapping[str, Any] | None = study.user_attrs.get(_RACE)
    return race


def _check_has_no_results(name: str, folder: Path, storage_url: str | None) -> None:
    """Raise StudyError if a folder has results of a study whose trials are not in its storage:
    they would be written over.
    """
    found = next((result for result in _RESULTS if (folder / result).exists()), None)
    if found is not None:
        storage = folder / JOURNAL if storage_url is None else without_secrets(storage_url)
        raise StudyError(
            f"study.name={name}: {folder} has {found} of an earlier study, and {storage} has no"
            " trial of it; accepted is the storage with them (restored from a backup, or named by"
            " search.storage), or another study.name"
        )


@contextmanager
def told_storage_errors(resume_command: str) -> Iterator[None]:
    """Report a study storage that fails in one line, with the command that resumes the study once
    it works again.

    Raises:
        StudyError: the storage failed within the context.
    """
    try:
        yield
    except STORAGE_ERRORS as error:
        raise StudyError(
            f"search.storage: {reason(error)}; what was in it is kept, and the study goes on with:"
            f" {resume_command}"
        ) from error
