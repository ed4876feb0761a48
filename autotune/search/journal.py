"""A study's journal: Optuna's file of JSON lines, with a digest in each line, so that damage is found before a study goes on with it.

The digest of a line is made of the digest before it and of the line itself, so that a line that was changed, removed or moved shows in
all that follow; ``.study.log.end`` beside the file holds how many lines there are and the last digest, so that missing last lines show,
too. Optuna and ``optuna-dashboard`` read the file as they read any journal: for them a digest is one more key. A digest finds what disks,
copies and editors do; it is no signature, and keeps nobody from writing a whole journal of their own.

A first version of the journal had no digests: the first digest in a file is also made of all lines before it. After it a line without
digest is another program's. What ``optuna-dashboard`` notes there is accepted, and becomes part of the next digest; all else is refused.
"""

import copy
import json
import os
import re
import stat
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from logging import getLogger
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import StudyError
from autotune.files import FORMATS
from autotune.sharing import SharedTexts

JOURNAL = "study.log"
END_FILE = ".study.log.end"
"""File beside a journal that says where it ended: its number of records, their size and the last digest."""

logger = getLogger("autotune.search")

_FORMAT_VERSION = FORMATS["journal"]
"""Version of the digests, which each of them begins with; a reader refuses later ones."""
_DIGEST = re.compile(rb',"digest":"([0-9]{1,9})-([0-9a-f]{32})"\}\n\Z')
_MAX_DIGEST_BYTES = 64
"""Length of a line's end in which its digest stands."""
_QUICK_BYTES = 8 << 20
"""Size of a journal that is read in about a second, which is that of some 1,500 trials."""
_END_BYTES = 128
"""Size of the file of the end. It never changes, so that overwriting it in place takes no space and is done at once."""

_CREATE_TRIAL = 4
_NUM_OPERATIONS = 11
_USER_ATTRIBUTE, _SYSTEM_ATTRIBUTE = (2, 8), (3, 9)
"""Optuna's codes of operations: those that set an attribute of a study or of a trial."""
_NOTES = ("dashboard:", "artifacts:", "preference:")
"""What the keys of system attributes begin with that ``optuna-dashboard`` sets."""


@dataclass(frozen=True, kw_only=True)
class JournalCheck:
    """What a journal holds, and what is wrong with it."""

    num_records: int
    """Number of whole lines."""
    num_trials: int
    """Number of trials that were created, in whatever state they are now."""
    num_without_digest: int
    """Number of lines that no digest covers: those of a first version of the journal, or notes at the very end."""
    digest: str | None
    """Digest of the last line that has one, in hexadecimal; None if none has."""
    faults: tuple[str, ...]
    """What is wrong, in a line each: file, line number and what was found; empty if all lines are as they were written."""


def check_journal(folder: Path) -> JournalCheck:
    """Check every line of the journal in a study's folder, without changing anything; a torn last line is none, and no fault.

    Raises:
        StudyError: there is no journal, or it cannot be read.
    """
    path = folder / JOURNAL
    _check_is_file(path)
    faults: list[str] = []
    end = None
    try:
        end = _End.read(folder)
    except StudyError as error:
        faults.append(str(error))
    position, num_trials, num_without, digest = _Position(), 0, 0, None
    with _open(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            step = position.after(line)
            if step.fault is not None:
                faults.append(f"{path}: line {position.num_records + 1}: {step.fault}")
            num_trials += isinstance(step.record, dict) and step.record.get("op_code") == _CREATE_TRIAL
            num_without = num_without + 1 if step.digest is None else 0
            digest = step.digest or digest
            position = step.position
            if end is not None and (fault := end.fault(position)) is not None:
                faults.append(f"{path}: {fault}")
    if end is not None and position.num_records < end.num_records:
        faults.append(f"{path}: {end.shortage(position)}")
    return JournalCheck(
        num_records=position.num_records, num_trials=num_trials, num_without_digest=num_without, digest=digest, faults=tuple(faults)
    )


def check_readable(folder: Path) -> None:
    """Check every line of the journal in a study's folder, as ``open_journal`` does later, if there is one that is read within a second.

    Raises:
        StudyError: the journal cannot be read, or is not as autotune wrote it.
    """
    with suppress(OSError):
        if (folder / JOURNAL).lstat().st_size > _QUICK_BYTES:
            return
    for _ in _Journal(folder).read_logs(0):
        pass


def open_journal(folder: Path) -> JournalStorage:
    """Open the journal in a study's folder as Optuna's storage, and check all its lines; without one the storage is empty.

    A last line that a killed process did not finish is left out; the next record takes its place.

    Raises:
        StudyError: the journal cannot be read, or is not as autotune wrote it.
    """
    backend = _Journal(folder)
    try:
        return _JournalStorage(backend)
    except StudyError:
        raise
    except Exception as error:  # a line of a first version, without digest, that is JSON but nothing that Optuna can replay
        raise StudyError(f"{backend.last_line}: is no record of Optuna's; {_RESTORE}") from error


@dataclass(frozen=True)
class _Position:
    """A place between two lines of a journal."""

    num_records: int = 0
    num_bytes: int = 0
    digest: bytes = b""
    """Digest of all lines before."""
    has_digests: bool = False
    """Whether a line before has a digest."""

    def after(self, line: bytes) -> "_Step":
        """Read the line at this place."""
        signed = _DIGEST.search(line, max(0, len(line) - _MAX_DIGEST_BYTES))
        body = line if signed is None else line[: signed.start()] + b"}\n"
        record, fault = _parsed(line)
        digest = _digest(self.digest, body)
        if signed is not None and int(signed[1]) > _FORMAT_VERSION:
            fault = f"has a digest of format {int(signed[1])}, which a later autotune wrote; accepted is up to {_FORMAT_VERSION}"
        elif signed is not None and bytes.fromhex(signed[2].decode()) != digest:
            fault = fault or "does not follow from the lines before it: a line was changed, removed or moved"
            digest = bytes.fromhex(signed[2].decode())  # what follows is held against what was found
        elif signed is None and fault is None and "digest" in record:
            fault = "has a digest that autotune does not write: the line was changed"
        elif signed is None and fault is None and self.has_digests and not _is_note(record):
            fault = "has no digest, and is no note of optuna-dashboard's: another program wrote it"
        position = _Position(self.num_records + 1, self.num_bytes + len(line), digest, self.has_digests or signed is not None)
        return _Step(position, record, fault, None if signed is None else digest.hex())

    def signed(self, record: dict[str, Any]) -> tuple[bytes, "_Position"]:
        """The line of a record that is to be written at this place, with its digest, and the place after it."""
        body = json.dumps(record, separators=(",", ":")).encode()
        digest = _digest(self.digest, body + b"\n")
        line = b'%b,"digest":"%d-%b"}\n' % (body[:-1], _FORMAT_VERSION, digest.hex().encode())
        return line, _Position(self.num_records + 1, self.num_bytes + len(line), digest, True)


@dataclass(frozen=True)
class _Step:
    """A line that was read."""

    position: _Position
    """The place after it."""
    record: Any
    fault: str | None
    digest: str | None
    """The line's own digest; None if it has none."""


def _digest(before: bytes, body: bytes) -> bytes:
    return blake2b(before + body, digest_size=16).digest()


def _parsed(line: bytes) -> tuple[Any, str | None]:
    """The record in a line, and what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None, f"is not JSON: {line[:40]!r}"
    code = record.get("op_code") if isinstance(record, dict) else None
    if not isinstance(code, int) or not 0 <= code < _NUM_OPERATIONS:
        return record, f"is no record of Optuna's: {line[:40]!r}"
    return record, None


def _is_note(record: dict[str, Any]) -> bool:
    """Whether a record sets an attribute that autotune does not read: a note, or an attribute of the user's own."""
    code = record["op_code"]
    if code in _SYSTEM_ATTRIBUTE:
        return all(str(key).startswith(_NOTES) for key in _keys(record.get("system_attr")))
    return code in _USER_ATTRIBUTE and not any(str(key).startswith("autotune:") for key in _keys(record.get("user_attr")))


def _keys(attributes: object) -> list[Any]:
    return list(attributes) if isinstance(attributes, dict) else [""]


@dataclass(frozen=True)
class _End:
    """Where a journal ended when it was last written to; it may have become longer since, never shorter."""

    num_records: int
    num_bytes: int
    digest: str

    @classmethod
    def read(cls, folder: Path) -> "_End | None":
        """Read the file of the end; None if there is none, as beside a first version of the journal."""
        path = folder / END_FILE
        try:
            content, again = b"", path.read_bytes()
            while content != again:  # it was being written meanwhile
                content, again = again, path.read_bytes()
            fields = json.loads(content)
            version = fields["format_version"]
            end = cls(int(fields["num_records"]), int(fields["num_bytes"]), str(fields["digest"]))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StudyError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StudyError(f"{path}: is damaged; {_RESTORE}, or {_OVERRIDE}") from error
        if version != _FORMAT_VERSION:
            raise StudyError(f"{path}: is of format {version!r}; accepted is {_FORMAT_VERSION}: a later autotune wrote it")
        return end

    def write(self, folder: Path) -> None:
        """Write the file of the end in place. It is not flushed: after a power cut it may be old, and then it asks for less."""
        fields = {"format_version": _FORMAT_VERSION, **self.__dict__}
        descriptor = os.open(folder / END_FILE, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            os.pwrite(descriptor, json.dumps(fields, separators=(",", ":")).encode().ljust(_END_BYTES - 1) + b"\n", 0)
        finally:
            os.close(descriptor)

    def fault(self, position: _Position) -> str | None:
        """What is wrong with a journal at this place of it."""
        if position.num_records != self.num_records or (position.digest.hex(), position.num_bytes) == (self.digest, self.num_bytes):
            return None
        return f"line {self.num_records}: is not the one that {END_FILE} beside it tells of"

    def shortage(self, position: _Position) -> str:
        """What is wrong with a journal that ends at this place."""
        if not position.num_records:
            return f"is empty or missing, and had {self.num_records} lines"
        return f"ends after {position.num_records} of {self.num_records} lines"


class _JournalStorage(JournalStorage):
    """Optuna's storage of a journal, which looks for trials that wait or run among those only that had not ended before.

    Optuna looks for waiting trials whenever it is asked for a trial, and would look at every trial of the study.
    """

    def __init__(self, backend: BaseJournalBackend) -> None:
        self._unfinished: dict[int, tuple[int, list[int]]] = {}
        """How many trials of each study were looked at, and the ids of those that had not ended."""
        super().__init__(backend)

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        """The trials of a study in order, of some states only if these are given."""
        if states is None or any(state in states for state in TrialState if state.is_finished()):
            trials: list[FrozenTrial] = super().get_all_trials(study_id, deepcopy, states)
            return trials
        with self._thread_lock:
            self._sync_with_backend()
            known = self._replay_result._trials  # noqa: SLF001  # Optuna has no public way to a few of its trials at once
            numbers = self._replay_result._study_id_to_trial_ids[study_id]  # noqa: SLF001  # likewise
            num_seen, unfinished = self._unfinished.get(study_id, (0, []))
            if num_seen > len(numbers):  # another program discarded some
                num_seen, unfinished = 0, []
            unfinished = [number for number in (*unfinished, *numbers[num_seen:]) if not known[number].state.is_finished()]
            self._unfinished[study_id] = len(numbers), unfinished
            found = [known[number] for number in unfinished if known[number].state in states]
            return copy.deepcopy(found) if deepcopy else found


class _Journal(BaseJournalBackend):
    """The file of a journal, as Optuna's storage reads it and appends to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / JOURNAL
        self._lock = JournalFileSymlinkLock(str(self._path), grace_period=3)  # held for milliseconds; a killed process's is taken over
        self._position = _Position()
        """How far the storage has read."""
        self._shared = SharedTexts()

    @property
    def last_line(self) -> str:
        """The line that was read last, for an error message."""
        return f"{self._path}: line {self._position.num_records}"

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Read the records from a number on: zero, or that of the first record that was not read yet.

        Raises:
            StudyError: the file cannot be read, or is damaged.
        """
        if log_number_from != self._position.num_records:
            assert log_number_from == 0, "records are read in order, or all again"
            self._position = _Position()
        end = _End.read(self._folder) if log_number_from == 0 else None
        if not os.path.lexists(self._path):
            if self._position.num_bytes:
                raise _damage(self._path, "is gone")
        else:
            _check_is_file(self._path)
            yield from self._new_records(end)
        if end is not None and self._position.num_records < end.num_records:
            raise _damage(self._path, end.shortage(self._position), is_end=True)

    def _new_records(self, end: _End | None) -> Iterator[dict[str, Any]]:
        with _open(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            self._check_size(size)
            if size == self._position.num_bytes:
                return
            file.seek(self._position.num_bytes)
            for line in file:
                if not line.endswith(b"\n"):  # torn, or still being written
                    return
                step = self._position.after(line)
                if step.fault is not None:
                    raise _damage(self._path, f"line {step.position.num_records}: {step.fault}")
                if end is not None and (fault := end.fault(step.position)) is not None:
                    raise _damage(self._path, fault, is_end=True)
                self._position = step.position
                yield self._shared.of(step.record)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes < self._position.num_bytes:
            raise _damage(self._path, f"became shorter: {num_bytes:,} bytes, of {self._position.num_bytes:,} that were read")

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records, flushed to disk, or none of them.

        Raises:
            StorageInternalError: the file cannot be written, as on a full disk; what was in it is kept.
            StudyError: another program wrote to the file what no other program may.
        """
        try:
            self._lock.acquire()
            try:
                self._append(logs)
            finally:
                self._lock.release()
        except OSError as error:
            raise StorageInternalError(f"{self._path}: cannot be written ({error.strerror or error})") from None

    def _append(self, logs: list[dict[str, Any]]) -> None:
        position = self._position
        with open(self._path, "a+b", buffering=0, opener=_opened_without_links) as file:
            self._check_size(os.fstat(file.fileno()).st_size)
            file.seek(position.num_bytes)
            *lines, torn = file.read().split(b"\n")  # other programs' notes since the last reading, and a line that one was killed in
            for line in lines:
                step = position.after(line + b"\n")
                position = step.position
                if step.fault is not None:
                    raise _damage(self._path, f"line {position.num_records}: {step.fault}")
            if torn:
                logger.warning("%s: a last line that was not finished is dropped: %r", self._path, torn[:40])
                file.truncate(position.num_bytes)
            num_bytes, text = position.num_bytes, b""
            for record in logs:
                line, position = position.signed(record)
                text += line
            try:
                while text:
                    text = text[file.write(text) :]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(num_bytes)
                raise
        _End(position.num_records, position.num_bytes, position.digest.hex()).write(self._folder)


def _opened_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _check_is_file(path: Path) -> None:
    """Raise StudyError unless there is a file, which is no link and can be opened without waiting for another program."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise StudyError(f"{path}: cannot be read: {error.strerror}; {_ACCEPTED}") from error
    if not stat.S_ISREG(mode):
        raise StudyError(f"{path}: is {_KINDS.get(stat.S_IFMT(mode), 'a device')}; {_ACCEPTED}")


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a symbolic link"}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise StudyError(f"{path}: cannot be read: {error.strerror}; {_ACCEPTED}") from error
    with file:
        yield file


def _damage(path: Path, fault: str, *, is_end: bool = False) -> StudyError:
    return StudyError(f"{path}: {fault}; {f'{_RESTORE}, or {_OVERRIDE}' if is_end else _RESTORE}")


_ACCEPTED = "accepted is the file as autotune wrote it"
_RESTORE = f"{_ACCEPTED}, restored from a backup, or another study.name"
_OVERRIDE = f"what is left of it, once {END_FILE} beside it is deleted"
