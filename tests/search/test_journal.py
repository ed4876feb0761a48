"""The journal's digests: what was changed, cut or moved is found when it is opened, and a full disk costs nothing that was written."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autotune.errors import StudyError
from autotune.search.journal import END_FILE, JOURNAL, check_journal
from autotune.search.study import open_study, read_study, told_storage_errors
from tests.fuzz import examples

Lines = list[bytes]


def open_in(folder: Path) -> optuna.Study:
    return open_study("first", folder, storage_url=None, make_sampler=optuna.samplers.RandomSampler, seed=0, definition={"a": 1})[0]


def run_trials(study: optuna.Study, num_trials: int) -> None:
    for _ in range(num_trials):
        trial = study.ask({"x": FloatDistribution(0, 1)})
        trial.set_user_attr("autotune:result", {"seconds": [1.0, 2.5], "error": 'quoted "digest":"1-0"}'})
        study.tell(trial, trial.params["x"])


def told(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(trial.number, trial.state.name, trial.params, trial.values, trial.user_attrs) for trial in study.trials]


def lines_of(folder: Path) -> Lines:
    return (folder / JOURNAL).read_bytes().splitlines(keepends=True)


def without_digests(lines: Lines) -> Lines:
    """A journal as the first version wrote it."""
    records = [json.loads(line) for line in lines]
    return [json.dumps({key: record[key] for key in record if key != "digest"}).encode() + b"\n" for record in records]


def as_any_program(folder: Path) -> optuna.Study:
    """The study as Optuna itself opens it, which knows nothing of digests."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return optuna.load_study(study_name="first", storage=storage)


def refusal(folder: Path) -> str:
    """The line with which a journal is refused, by whoever opens, reads or checks it; the journal stays as it is."""
    before = (folder / JOURNAL).read_bytes() if (folder / JOURNAL).is_file() else None
    with pytest.raises(StudyError) as reading:
        read_study("first", folder)
    with pytest.raises(StudyError) as caught:
        open_in(folder)
    assert str(reading.value) == str(caught.value)
    assert "\n" not in str(caught.value)
    assert "accepted is" in str(caught.value)
    assert before is None or (folder / JOURNAL).read_bytes() == before
    return str(caught.value)


def test_trials_of_a_state_are_found_as_optuna_finds_them(tmp_path: Path) -> None:
    study, other = open_in(tmp_path), open_in(tmp_path)
    states = [TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE, TrialState.FAIL]
    chance = random.Random(0)

    def numbers(of: optuna.Study) -> list[list[int]]:
        chosen = [*([state] for state in states), states[:2], [states[1], states[3]], None]
        return [[trial.number for trial in of.get_trials(deepcopy=False, states=some)] for some in chosen]

    for _ in range(60):
        acting = chance.choice([study, other])
        running = acting.get_trials(states=[TrialState.RUNNING])
        if chance.random() < 0.3:
            acting.enqueue_trial({"x": chance.random()})
        elif running and chance.random() < 0.5:
            acting.tell(chance.choice(running).number, *chance.choice([(1.0,), (None, TrialState.FAIL)]))
        else:
            acting.ask({"x": FloatDistribution(0, 1)})
        assert numbers(study) == numbers(as_any_program(tmp_path))
    study.get_trials(states=[TrialState.RUNNING])[0].user_attrs["mine"] = 1
    assert not study.get_trials(states=[TrialState.RUNNING])[0].user_attrs, "that was a copy"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the journal of five trials."""
    folder = tmp_path_factory.mktemp("journal")
    run_trials(open_in(folder), 5)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def test_optuna_reads_a_journal_with_digests_as_any_other(folder: Path) -> None:
    assert told(as_any_program(folder)) == told(read_study("first", folder))
    assert all("digest" in json.loads(line) for line in lines_of(folder))


def test_a_whole_journal_has_no_fault(folder: Path) -> None:
    check, lines = check_journal(folder), lines_of(folder)
    assert (check.faults, check.num_trials, check.num_records, check.num_without_digest) == ((), 5, len(lines), 0)
    assert f"1-{check.digest}" == json.loads(lines[-1])["digest"]


def _without_line(lines: Lines) -> Lines:
    return [*lines[:5], *lines[6:]]


def _swapped(lines: Lines) -> Lines:
    return [*lines[:5], lines[6], lines[5], *lines[7:]]


def _with_number_changed(lines: Lines) -> Lines:
    number = next(index for index, line in enumerate(lines) if b"2.5" in line)
    return [*lines[:number], lines[number].replace(b"2.5", b"2.4"), *lines[number + 1 :]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_line, "line 6: does not follow"),
        (_swapped, "line 6: does not follow"),
        (lambda lines: [*lines[:6], *lines[5:]], "line 7: does not follow"),
        (_with_number_changed, r"line \d+: does not follow"),
        (lambda lines: [*lines[:5], bytes(512) + b"\n", *lines[5:]], r"line 6: is not JSON: b'\\x00"),
        (lambda lines: [*lines[:5], bytes(512), *lines[5:]], r"line 6: is not JSON: b'\\x00"),
        (lambda lines: [*lines[:5], b"\xff\xfe garbage\n", *lines[6:]], "line 6: is not JSON"),
        (lambda lines: [*lines[:5], b"[" * 100_000 + b"\n", *lines[6:]], "line 6: is not JSON"),
        (lambda lines: [*lines, b"[4]\n"], r"line \d+: is no record of Optuna's"),
        (lambda lines: lines[:-3], r"ends after \d+ of \d+ lines"),
        (lambda lines: [b"".join(lines)[:-200]], r"ends after \d+ of \d+ lines"),
        (lambda lines: [], r"is empty or missing, and had \d+ lines"),
        (without_digests, r"line \d+: is not the one that \.study\.log\.end beside it tells of"),
        (
            lambda lines: [*lines[:5], lines[5].replace(b'"digest":"1-', b'"digest":"2-')],
            "line 6: has a digest of format 2.* a later autotune",
        ),
    ],
)
def test_what_is_not_as_it_was_written_is_refused_with_its_line(folder: Path, change: Callable[[Lines], Lines], said: str) -> None:
    (folder / JOURNAL).write_bytes(b"".join(change(lines_of(folder))))
    assert re.search(f"{re.escape(str(folder / JOURNAL))}: {said}", refusal(folder))
    assert re.search(said, "\n".join(check_journal(folder).faults))


def test_a_torn_last_line_is_no_fault_and_its_place_is_taken(folder: Path) -> None:
    whole = (folder / JOURNAL).read_bytes()
    (folder / JOURNAL).write_bytes(whole + lines_of(folder)[-1][:-1])
    assert check_journal(folder).faults == ()
    study = open_in(folder)
    assert len(study.trials) == 5
    run_trials(study, 1)
    assert (folder / JOURNAL).read_bytes().startswith(whole)
    assert len(read_study("first", folder).trials) == 6
    assert check_journal(folder).faults == ()


def test_an_end_that_was_written_before_the_last_lines_is_accepted(folder: Path) -> None:
    end = (folder / END_FILE).read_bytes()
    run_trials(open_in(folder), 1)
    (folder / END_FILE).write_bytes(end)  # as a process that was killed leaves it
    assert len(read_study("first", folder).trials) == 6
    run_trials(open_in(folder), 1)
    assert check_journal(folder).faults == ()


@pytest.mark.parametrize("end", [b"", bytes(128), b"[]", b'{"format_version": 1}', b"\xff", b"[" * 100_000])
def test_a_damaged_end_is_refused_and_what_is_there_is_opened_without_it(folder: Path, end: bytes) -> None:
    (folder / END_FILE).write_bytes(end)
    assert f"{END_FILE}: is damaged" in refusal(folder)
    assert check_journal(folder).faults
    (folder / JOURNAL).write_bytes(b"".join(lines_of(folder)[:-3]))
    (folder / END_FILE).unlink()
    assert len(open_in(folder).trials) == 5


def test_an_end_from_the_future_is_refused(folder: Path) -> None:
    (folder / END_FILE).write_bytes(b'{"format_version":2,"num_records":3,"num_bytes":4,"digest":""}')
    assert "is of format 2; accepted is 1: a later autotune wrote it" in refusal(folder)


def test_a_journal_of_the_first_version_goes_on_and_its_lines_are_covered_from_then_on(folder: Path) -> None:
    lines = without_digests(lines_of(folder))
    (folder / JOURNAL).write_bytes(b"".join(lines))
    (folder / END_FILE).unlink()
    assert check_journal(folder).num_without_digest == len(lines)
    study = open_in(folder)
    assert len(study.trials) == 5
    run_trials(study, 1)
    assert len(read_study("first", folder).trials) == 6
    assert check_journal(folder).faults == ()
    (folder / JOURNAL).write_bytes(b"".join(_with_number_changed(lines_of(folder))))
    assert f"line {len(lines) + 1}: does not follow" in refusal(folder)


@pytest.mark.parametrize(
    "line",
    [b"{}", b'{"op_code":77}', b'{"op_code":4,"worker_id":"a","study_id":0}', b'{"op_code":6,"worker_id":"a"}', b'{"op_code":null}', b"7"],
)
def test_a_line_of_the_first_version_that_optuna_cannot_replay_is_refused(folder: Path, line: bytes) -> None:
    lines = without_digests(lines_of(folder))
    (folder / JOURNAL).write_bytes(b"".join([*lines[:5], line + b"\n", *lines[5:]]))
    (folder / END_FILE).unlink()
    assert "line 6: is no record of Optuna's" in refusal(folder)


def test_notes_of_the_dashboard_are_accepted_while_a_study_runs_and_are_covered_by_the_next_digest(folder: Path) -> None:
    study, other = open_in(folder), as_any_program(folder)
    run_trials(study, 1)
    other._storage.set_study_system_attr(other._study_id, "dashboard:note_str:0", "promising")
    other.set_user_attr("remark", 1)
    run_trials(study, 1)
    other._storage.set_study_system_attr(other._study_id, "dashboard:note_str:0", "not so promising")
    assert check_journal(folder).faults == ()
    again = open_in(folder)
    assert len(again.trials) == 7
    assert again.user_attrs["remark"] == 1
    assert again._storage.get_study_system_attrs(again._study_id)["dashboard:note_str:0"] == "not so promising"
    lines = lines_of(folder)
    note = next(index for index, line in enumerate(lines) if b"promising" in line)
    (folder / JOURNAL).write_bytes(b"".join([*lines[:note], *lines[note + 1 :]]))
    assert f"line {note + 2}: does not follow" in refusal(folder)  # the remark is accepted as it is, and the next digest says that


@pytest.mark.parametrize("action", ["tell", "ask", "result", "delete"])
def test_what_another_program_does_to_trials_is_refused(folder: Path, action: str) -> None:
    open_in(folder).enqueue_trial({})
    other = as_any_program(folder)
    if action == "ask":
        other.ask()
    elif action == "tell":
        other._storage.set_trial_state_values(other.trials[-1]._trial_id, TrialState.FAIL)
    elif action == "result":
        other._storage.set_trial_user_attr(other.trials[-1]._trial_id, "autotune:result", {})
    else:
        optuna.delete_study(study_name="first", storage=other._storage)
    assert "has no digest, and is no note of optuna-dashboard's: another program wrote it" in refusal(folder)


def test_a_running_study_meets_what_another_program_does_in_one_line(folder: Path) -> None:
    study = open_in(folder)
    as_any_program(folder).enqueue_trial({})
    with pytest.raises(StudyError, match="another program wrote it"):
        run_trials(study, 1)
    (folder / JOURNAL).write_bytes(b"")
    with pytest.raises(StudyError, match="became shorter"):
        study.get_trials()
    with pytest.raises(StudyError, match="became shorter"):
        study.set_user_attr("a", 1)
    assert (folder / JOURNAL).read_bytes() == b""
    (folder / JOURNAL).unlink()
    with pytest.raises(StudyError, match="is gone"):
        study.get_trials()


@pytest.mark.parametrize("result", ["best.json", "trials.csv", "recording"])
@pytest.mark.parametrize("is_emptied", [False, True])
def test_results_without_their_journal_are_not_written_over(folder: Path, result: str, is_emptied: bool) -> None:
    (folder / END_FILE).unlink()
    (folder / JOURNAL).unlink()
    if is_emptied:
        (folder / JOURNAL).touch()
    open_in(Path(shutil.copytree(folder, folder.parent / "fresh")))
    (folder / result).touch()
    with pytest.raises(
        StudyError, match=rf"{folder} has {result} of an earlier study, and {folder / JOURNAL} has no trial of it; accepted"
    ):
        open_in(folder)
    with pytest.raises(StudyError, match=f"{folder} has {result} of an earlier study, and sqlite"):
        open_study("first", folder, storage_url=f"sqlite:///{folder / 'a.db'}", make_sampler=_no_sampler, seed=0, definition={})


def _no_sampler(seed: int) -> object:
    raise AssertionError("the study is refused before")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        descriptor = os.open(path.parent, os.O_RDONLY)  # a socket's whole path may be too long
        try:
            listening.bind(f"/proc/self/fd/{descriptor}/{path.name}")
        finally:
            os.close(descriptor)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.mkdir, "is a folder"),
        (os.mkfifo, "is a pipe"),
        (_socket, "is a socket"),
        (lambda path: path.symlink_to(path), "is a symbolic link"),
        (lambda path: path.symlink_to(path.with_name("absent")), "is a symbolic link"),
        (lambda path: path.symlink_to("/dev/null"), "is a symbolic link"),
    ],
)
def test_a_journal_of_the_wrong_kind_is_one_line(tmp_path: Path, make: Callable[[Path], None], said: str) -> None:
    make(tmp_path / JOURNAL)
    with pytest.raises(StudyError, match=f"{tmp_path / JOURNAL}: {said}; accepted is") as caught:
        open_in(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(StudyError, match=said):
        check_journal(tmp_path)


@pytest.fixture
def nobody(folder: Path) -> Iterator[Path]:
    """A folder with a journal, owned by a user without rights, who this process is meanwhile."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(0o777)
        copy = Path(shutil.copytree(folder, Path(outer) / "copy"))
        for path in (copy, *copy.iterdir()):
            os.chown(path, 65534, 65534)
        os.seteuid(65534)
        try:
            yield copy
        finally:
            os.seteuid(0)


def test_a_journal_that_may_not_be_read_or_written_is_one_line(nobody: Path) -> None:
    (nobody / JOURNAL).chmod(0o000)
    assert "cannot be read: Permission denied" in refusal_without_reading(nobody)
    (nobody / JOURNAL).chmod(0o444)
    assert len(read_study("first", nobody).trials) == 5
    study = open_in(nobody)
    said = r"cannot be written \(Permission denied\); what was in it is kept, .* goes on with: again"
    with pytest.raises(StudyError, match=said), told_storage_errors("again"):
        run_trials(study, 1)


def refusal_without_reading(folder: Path) -> str:
    with pytest.raises(StudyError) as caught:
        open_in(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_one_line_and_the_study_goes_on_from_all_that_was_written(small_disk: Path) -> None:
    study = open_in(small_disk)
    written: list[str] = []

    def write_until_it_is_full() -> None:
        while len(written) < 1000:
            study.set_user_attr(f"note {len(written)}", "x" * 1000)
            written.append(f"note {len(written)}")

    said = r"study\.log: cannot be written \(No space left on device\); what was in it is kept, and the study goes on with: again$"
    with pytest.raises(StudyError, match=said), told_storage_errors("again"):
        write_until_it_is_full()
    assert len(written) > 10
    assert check_journal(small_disk).faults == ()
    assert {key for key in open_in(small_disk).user_attrs if key.startswith("note")} == set(written)
    subprocess.run(["mount", "-o", "remount,size=256k", small_disk], check=True)
    again = open_in(small_disk)
    run_trials(again, 3)
    assert len(read_study("first", small_disk).trials) == 3
    assert check_journal(small_disk).faults == ()


def _flipped(content: bytes, place: int, change: int) -> bytes:
    place %= len(content) + 1
    return content[:place] + bytes(each ^ (change % 255 + 1) for each in content[place : place + 1]) + content[place + 1 :]


def _inserted(content: bytes, place: int, number: int) -> bytes:
    place %= len(content) + 1
    return content[:place] + number.to_bytes(4, "big")[-1 - number % 4 :] + content[place:]


def _filled(content: bytes, place: int, number: int) -> bytes:
    place %= len(content) + 1
    return content[:place] + bytes(number % 600) + content[place:]


def _of_lines(change: Callable[[Lines, int, int], Lines]) -> Callable[[bytes, int, int], bytes]:
    def changed(content: bytes, place: int, number: int) -> bytes:
        lines = content.splitlines(keepends=True) or [b""]
        return b"".join(change(lines, place % len(lines), number % len(lines)))

    return changed


MUTATIONS = (
    _flipped,
    _inserted,
    _filled,
    lambda content, place, _: content[: place % (len(content) + 1)],
    _of_lines(lambda lines, line, _: [*lines[:line], *lines[line + 1 :]]),
    _of_lines(lambda lines, line, number: [*lines[:line], lines[number], *lines[line:]]),
    _of_lines(lambda lines, line, number: [lines[{line: number, number: line}.get(each, each)] for each in range(len(lines))]),
)
"""What a disk, a copy or an editor may do to a journal, at a place that is given by two numbers."""


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        mutation = draw(st.sampled_from(MUTATIONS))
        content = mutation(content, draw(st.integers(0, 2**20)), draw(st.integers(0, 2**20)))
    return content


def opened(content: bytes, end: bytes | None) -> tuple[list[tuple[Any, ...]], str, tuple[str, ...]]:
    """Trials of a journal, or the line with which it is refused; then the faults that are found in it."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / JOURNAL).write_bytes(content)
        if end is not None:
            (Path(name) / END_FILE).write_bytes(end)
        faults = check_journal(Path(name)).faults
        try:
            return told(read_study("first", Path(name))), "", faults
        except StudyError as error:
            return [], str(error), faults


@pytest.mark.parametrize("has_end", [True, False])
def test_a_mutated_journal_is_refused_in_one_line_or_has_exactly_what_is_whole(written: Path, has_end: bool) -> None:
    content, end = (written / JOURNAL).read_bytes(), (written / END_FILE).read_bytes() if has_end else None
    expected = told(read_study("first", written))

    @examples(150)
    @given(mutated(content))
    def check(changed: bytes) -> None:
        found, refused, faults = opened(changed, end)
        whole = changed[: changed.rfind(b"\n") + 1]
        assert "\n" not in refused
        if not has_end and whole and b'"digest":' not in whole:
            return  # a journal of the first version, as far as anyone can tell
        is_intact = whole == content if has_end else content.startswith(whole)
        assert bool(faults) is not is_intact
        if not refused:
            assert is_intact
            assert found == expected or whole != content
        else:
            assert not is_intact or "no such study" in refused  # which is cut before it is named

    check()


@pytest.mark.parametrize(
    "digest", ['"(1-571dd4fdc0987ad2ca7fc7016e3fe9a2"', '"1-g71dd4fdc0987ad2ca7fc7016e3fe9a2"', '"1-57"', "[]", "null"]
)
def test_a_digest_that_is_none_is_refused_also_where_it_is_the_only_one(written: Path, digest: str) -> None:
    line, _, _ = lines_of(written)[0].rpartition(b'"digest":')
    _, refused, faults = opened(line + f'"digest":{digest}}}\n'.encode(), None)
    assert [fault.rpartition("study.log: ")[2] for fault in faults] == [
        "line 1: has a digest that autotune does not write: the line was changed"
    ]
    assert "has a digest that autotune does not write" in refused


def test_a_mutated_journal_without_digests_is_never_a_traceback(written: Path) -> None:
    content = b"".join(without_digests(lines_of(written)))

    @examples(150)
    @given(mutated(content))
    def check(changed: bytes) -> None:
        _, refused, faults = opened(changed, None)
        assert "\n" not in refused
        assert refused or not faults

    check()
