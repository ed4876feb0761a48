"""The study's storage: opening, taking up and reading it.

The storage (Optuna's journal file in the study's folder, or a relational database by URL) is the one source of truth: what a
study is, every result, every confirmation run. All else in the folder is derived from it.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from autotune.config.schema import first_difference
from autotune.database_url import without_password
from autotune.errors import ConfigError, StudyError
from autotune.measurement import TrialResult
from autotune.search.database import open_database
from autotune.search.pausing import PausingSampler, pausing_sampler
from autotune.search.seeds import derived_seed

JOURNAL = "study.log"
_DEFINITION = "autotune:definition"
_CONFIRMED = "autotune:confirmed:"
_RACE = "autotune:race"


Study = optuna.Study
"""Optuna's own study: what passes between this package and the execution."""


def open_study(
    name: str,
    folder: Path,
    *,
    storage_url: str | None,
    make_sampler: Callable[[int], object],
    seed: int,
    definition: Mapping[str, Any],
) -> tuple[Study, PausingSampler | None]:
    """The study of that name, made where there is none yet, and its sampler where that pauses trials.

    Args:
        make_sampler: makes a sampler of a seed, Optuna's or one that pauses. A resumed sampler must not draw again what it drew at
            the start, so its seed depends on how many trials there are.
        seed: of the study.
        definition: what makes two runs the same study; plain data, kept in the storage.

    Raises:
        StudyError: there is one, and it was made for something else; the message names the first difference.
        ConfigError: the storage cannot be opened, or the sampler is neither.
    """
    quiet_optuna()
    study = optuna.create_study(
        storage=_storage(folder, storage_url),
        study_name=name,
        sampler=optuna.samplers.RandomSampler(),
        direction="minimize",
        load_if_exists=True,
    )
    known = study.user_attrs.get(_DEFINITION)
    asked: dict[str, Any] = json.loads(json.dumps(definition))  # as a storage gives it back: tuples are lists, keys are text
    if known is None:
        study.set_user_attr(_DEFINITION, asked)
    elif (difference := first_difference(known, asked)) is not None:
        raise StudyError(f"study.name={name}: was made for something else ({difference}); accepted is the same, or another study.name")
    sampler = make_sampler(derived_seed(seed, f"sampler {len(study.get_trials(deepcopy=False))}"))
    study.sampler = _optuna_sampler(sampler)
    return study, pausing_sampler(sampler)


def study_in_memory(sampler: object) -> Study:
    """A study that is kept nowhere, for a sampler of Optuna's or one that pauses trials.

    Raises:
        ConfigError: the sampler is neither.
    """
    quiet_optuna()
    return optuna.create_study(sampler=_optuna_sampler(sampler), direction="minimize")


def _optuna_sampler(sampler: object) -> optuna.samplers.BaseSampler:
    """The sampler, or one that is never asked where points are proposed by one that pauses."""
    if pausing_sampler(sampler) is not None:
        return optuna.samplers.RandomSampler()
    if not isinstance(sampler, optuna.samplers.BaseSampler):
        raise ConfigError(f"search.sampler: made {type(sampler).__name__}, accepted is an Optuna sampler")
    return sampler


def read_study(name: str, folder: Path, *, storage_url: str | None = None) -> Study:
    """A study that exists.

    Raises:
        StudyError: there is none of that name.
    """
    quiet_optuna()
    if storage_url is None and not (folder / JOURNAL).is_file():
        studies = sorted(path.parent.name for path in folder.parent.glob(f"*/{JOURNAL}"))
        known = f"accepted are {', '.join(studies)}" if studies else f"there is none in {folder.parent}"
        raise StudyError(f"study={name}: no such study; {known}")
    storage = _storage(folder, storage_url)
    try:
        return optuna.load_study(study_name=name, storage=storage)
    except KeyError as error:
        names = ", ".join(sorted(optuna.get_all_study_names(storage)))
        known = f"accepted are {names}" if names else "there is none"
        raise StudyError(f"study={name}: no such study in {without_password(storage_url or str(folder / JOURNAL))}; {known}") from error


def study_definition(study: Study) -> dict[str, Any]:
    """What the study was made for."""
    return dict(study.user_attrs.get(_DEFINITION, {}))


def store_confirmation(study: Study, arm: int, index: int, result: TrialResult) -> None:
    """Keep the result of one confirmation run: ``arm`` is the trial number, ``index`` that of the round, from zero."""
    study.set_user_attr(f"{_CONFIRMED}{arm}:{index}", result.as_dict())


def confirmations(study: Study) -> dict[tuple[int, int], TrialResult]:
    """All confirmation runs of a study, by arm and number of the round."""
    found: dict[tuple[int, int], TrialResult] = {}
    for key, value in study.user_attrs.items():
        if key.startswith(_CONFIRMED):
            arm, index = key.removeprefix(_CONFIRMED).split(":")
            found[int(arm), int(index)] = TrialResult.from_dict(value)
    return found


def store_race(study: Study, race: Mapping[str, Any]) -> None:
    """Keep how the latest confirmation was planned, as plain data: another process goes on with that one."""
    study.set_user_attr(_RACE, race)


def stored_race(study: Study) -> Mapping[str, Any] | None:
    """What ``store_race`` kept; None where nothing was."""
    race: Mapping[str, Any] | None = study.user_attrs.get(_RACE)
    return race


def _storage(folder: Path, url: str | None) -> BaseStorage:
    if url is None:
        folder.mkdir(parents=True, exist_ok=True)
        journal = folder / JOURNAL
        _drop_torn_line(journal)
        return JournalStorage(JournalFileBackend(str(journal), lock_obj=_lock(journal)))
    return open_database(url)


def _lock(journal: Path) -> JournalFileSymlinkLock:
    """The journal's lock. It is held for milliseconds; one that a killed process left is taken over after these seconds."""
    return JournalFileSymlinkLock(str(journal), grace_period=3)


def _drop_torn_line(journal: Path) -> None:
    """Cut off a last line that a killed process did not finish: the next one would be glued to it.

    A line that a running process is still writing looks the same, so the journal's own lock is taken before it is cut.
    """
    if not journal.is_file() or _whole_lines(journal) is None:
        return
    lock = _lock(journal)
    lock.acquire()
    try:
        size = _whole_lines(journal)
        if size is not None:
            os.truncate(journal, size)
    finally:
        lock.release()


def _whole_lines(journal: Path) -> int | None:
    """Bytes up to the end of the last whole line; None where that is the whole file."""
    content = journal.read_bytes()
    size = content.rfind(b"\n") + 1
    return size if size < len(content) else None


def quiet_optuna() -> None:
    """Keep Optuna's lines and its warnings of new features off the terminal; to be called before a sampler is made."""
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    optuna.logging.set_verbosity(logging.WARNING)
    logging.getLogger("optuna.samplers").setLevel(logging.ERROR)  # a line for every parameter that CMA-ES leaves to chance
    warnings.filterwarnings("ignore", module=r"optuna\..*")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
