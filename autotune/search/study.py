"""Opens, resumes and reads a study's storage.

The storage (Optuna's journal file in the study's folder, or a relational database by URL) is the only source of truth for the study's
definition, every result and every confirmation run. All other files in the folder are derived from it.

Between two statements a database may restart, or be unreachable for a while: the next connection is tried again and again, and the
study continues where it stood. A statement that fails midway is not repeated, since it may have been carried out.
"""

import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from autotune.config.schema import first_difference
from autotune.errors import ConfigError, StudyError
from autotune.measurement import TrialResult
from autotune.remote.url import check_listens, without_password
from autotune.search.randomness import derived_seed
from autotune.search.samplers import PausingSampler, optuna_sampler, pausing_sampler, quiet_optuna

JOURNAL = "study.log"
_DEFINITION = "autotune:definition"
_CONFIRMED = "autotune:confirmed:"
_RACE = "autotune:race"
LOGGER = logging.getLogger("autotune.search")
PATIENCE_SECONDS = 120.0
"""Longest time that a database may be unreachable before the study gives up."""
_TRY_EVERY_SECONDS = 1.0
_ACCEPTED_STORAGES = "null, or a database: sqlite:////DIR/studies.db, postgresql://USER@HOST/DATABASE (pip install 'autotune[postgresql]')"


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
    """Open the study of a name, or create it, and return it with its sampler if that pauses trials, else with None.

    Args:
        make_sampler: makes a sampler from a seed: an Optuna sampler or one that pauses trials. A resumed sampler must not draw again
            what it drew at the start, so its seed depends on how many trials there are.
        seed: seed of the study.
        definition: settings that two runs of one study must have in common; plain data, kept in the storage.

    Raises:
        StudyError: the study exists with another definition; the message names the first difference.
        ConfigError: the storage cannot be opened, or the sampler is of neither kind.
    """
    quiet_optuna()
    study = optuna.create_study(
        storage=_storage(folder, storage_url),
        study_name=name,
        sampler=optuna.samplers.RandomSampler(),
        direction="minimize",
        load_if_exists=True,
    )
    stored = study.user_attrs.get(_DEFINITION)
    wanted: dict[str, Any] = json.loads(json.dumps(definition))  # as a storage returns it: tuples are lists, keys are text
    if stored is None:
        study.set_user_attr(_DEFINITION, wanted)
    elif (difference := first_difference(stored, wanted)) is not None:
        raise StudyError(f"study.name={name}: was made for something else ({difference}); accepted is the same, or another study.name")
    sampler = make_sampler(derived_seed(seed, f"sampler {len(study.get_trials(deepcopy=False))}"))
    study.sampler = optuna_sampler(sampler)
    return study, pausing_sampler(sampler)


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
    """The definition that the study was created with: settings that all its runs have in common."""
    return dict(study.user_attrs.get(_DEFINITION, {}))


def store_confirmation(study: Study, arm: int, index: int, result: TrialResult) -> None:
    """Store the result of one confirmation run: ``arm`` is the trial number, ``index`` the number of the round, from zero."""
    study.set_user_attr(f"{_CONFIRMED}{arm}:{index}", result.as_dict())


def confirmations(study: Study) -> dict[tuple[int, int], TrialResult]:
    """Results of all confirmation runs of a study, by arm (trial number) and number of the round."""
    results: dict[tuple[int, int], TrialResult] = {}
    for key, value in study.user_attrs.items():
        if key.startswith(_CONFIRMED):
            arm, index = key.removeprefix(_CONFIRMED).split(":")
            results[int(arm), int(index)] = TrialResult.from_dict(value)
    return results


def store_race(study: Study, race: Mapping[str, Any]) -> None:
    """Store the plan of the latest confirmation race, as plain data, so that another process can continue that race."""
    study.set_user_attr(_RACE, race)


def stored_race(study: Study) -> Mapping[str, Any] | None:
    """The plan of the latest confirmation race, as ``store_race`` stored it; None if there is none."""
    race: Mapping[str, Any] | None = study.user_attrs.get(_RACE)
    return race


def _storage(folder: Path, url: str | None) -> BaseStorage:
    if url is None:
        folder.mkdir(parents=True, exist_ok=True)
        journal = folder / JOURNAL
        _drop_torn_line(journal)
        return JournalStorage(JournalFileBackend(str(journal), lock_obj=_lock(journal)))
    return _open_database(url)


def _lock(journal: Path) -> JournalFileSymlinkLock:
    """The journal's lock. It is held for milliseconds; a lock that a killed process left is taken over after the grace period."""
    return JournalFileSymlinkLock(str(journal), grace_period=3)


def _drop_torn_line(journal: Path) -> None:
    """Cut off a last line that a killed process did not finish: the next line would be appended to it.

    A line that a running process is still writing looks the same, so the journal's own lock is taken before the line is cut.
    """
    if not journal.is_file() or _whole_lines_bytes(journal) is None:
        return
    lock = _lock(journal)
    lock.acquire()
    try:
        size = _whole_lines_bytes(journal)
        if size is not None:
            os.truncate(journal, size)
    finally:
        lock.release()


def _whole_lines_bytes(journal: Path) -> int | None:
    """Size in bytes of a journal without an unfinished last line; None if its last line is finished."""
    content = journal.read_bytes()
    size = content.rfind(b"\n") + 1
    return size if size < len(content) else None


def _open_database(url: str) -> RDBStorage:
    """Open a database as Optuna's storage, and make its tables if there are none.

    Raises:
        ConfigError: the URL does not answer, refuses, or is no database; the message holds no password.
    """
    try:
        check_listens(url)
        storage = RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    except Exception as error:  # each kind of database raises its own client's errors
        raise ConfigError(
            f"search.storage: {without_password(url)}: cannot be opened ({_reason(error)}); accepted is {_ACCEPTED_STORAGES}"
        ) from error
    sqlalchemy.event.listen(storage.engine, "do_connect", _connect)
    weakref.finalize(storage, storage.engine.dispose)
    return storage


@contextmanager
def told_storage_errors(resume_command: str) -> Iterator[None]:
    """Report a lost study storage in one line, with the command that resumes the study once the storage is back.

    Raises:
        StudyError: the storage failed within the context.
    """
    try:
        yield
    except (StorageInternalError, sqlalchemy.exc.DBAPIError) as error:
        raise StudyError(
            f"search.storage: went away ({_reason(error)}); what was in it is kept, and the study goes on with: {resume_command}"
        ) from error


def _connect(dialect: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Open a connection, trying again until the database answers or ``PATIENCE_SECONDS`` have passed."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    has_warned = False
    while True:
        try:
            return dialect.connect(*arguments, **keywords)
        except dialect.loaded_dbapi.OperationalError as error:
            if time.monotonic() > deadline:
                raise
            if not has_warned:
                LOGGER.warning("search.storage does not answer (%s); it is waited for", _reason(error))
                has_warned = True
        time.sleep(_TRY_EVERY_SECONDS)


def _reason(error: BaseException) -> str:
    """The first line of an error's root cause, without passwords, cut to 200 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    return without_password(next(iter(str(error).strip().splitlines()), type(error).__name__))[:200]
