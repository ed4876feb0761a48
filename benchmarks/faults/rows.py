"""The faults: a row each, whose function lets it happen to a study as often as is wanted."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.killing import KILLED, Killed
from benchmarks.faults.servers import Postmaster, Proxy, mlflow_server
from benchmarks.faults.study import MAX_SECONDS, EndedError, Session, Study, prefer
from benchmarks.faults.training import MEMORY_GROUP

STOP_SECONDS = 3.0


@dataclass(frozen=True)
class Row:
    """A fault, and what is to come of it."""

    name: str
    what: str
    inject: Callable[[Study], None]
    count: int = 10
    part_seconds: float = 0.012
    overrides: Sequence[str] = ()
    outcomes: Collection[str] | None = None
    """Outcomes that a trial may have in which the fault happened, if it has a result at all;
    None: any."""
    ends_study: bool = False
    """Whether each fault ends the study, so that the next one takes a new session; such rows
    begin first, then those of long trainings."""
    is_alone: bool = False
    """Whether no other study may run beside it, since it needs the machine's time."""
    environment: dict[str, str] = field(default_factory=dict)
    database: str = "mlflow.db"
    """MLflow's, in the study's folder."""
    killed: Killed | None = None
    """What a row of the killing bench trains, which runs only where it is named."""


# Ends of the driver, and of Ray.


def _signal(
    number: signal.Signals, *, times: int = 1, to_group: bool = False
) -> Callable[[Study], None]:
    def send(session: Session) -> None:
        for time_number in range(times):
            if time_number:
                time.sleep(0.5)
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if to_group else os.kill)(session.process.pid, number)

    def inject(study: Study) -> None:
        for session in study.at_random_moments():
            session.inject(lambda session=session: send(session))
            session.end(is_killed=number is signal.SIGKILL)

    return inject


def _gcs_killed(study: Study) -> None:
    """Kill Ray's control service while trials are trained."""
    for session in study.while_training():
        process = study.process(r"gcs_server ")
        if process is not None:
            session.inject(lambda process=process: os.kill(process, signal.SIGKILL))
            session.end()


# Within a training.


def _token(
    kind: str, then: Callable[[int], None] = lambda process: None, *, more: int = 70
) -> Callable[[Study], None]:
    def inject(study: Study) -> None:
        for session in study.while_training(more=more):
            try:
                process = study.drop_token(kind)
            except EndedError:
                session.end(is_timed=False)
                continue
            session.inject(lambda process=process: then(process))
            session.goes_on()

    return inject


def _let_go_on(process: int) -> None:
    time.sleep(STOP_SECONDS)
    os.kill(process, signal.SIGCONT)


def _with_memory_group(inject: Callable[[Study], None]) -> Callable[[Study], None]:
    """Make a control group with 400 MiB of memory, as version 2 or 1 of control groups, while
    the row runs.
    """

    def inject_within(study: Study) -> None:
        for root, limit in (
            ("/sys/fs/cgroup", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ):
            group = Path(root) / f"autotune-{study.home.name}"
            with contextlib.suppress(OSError):
                group.mkdir()
                if (group / limit).exists():
                    break
                group.rmdir()
        else:
            raise UnavailableError("no control group for memory can be made")
        (group / limit).write_text(str(400 << 20))
        study.environment[MEMORY_GROUP] = str(group)
        try:
            inject(study)
        finally:
            for number in (group / "cgroup.procs").read_text().split():
                os.kill(int(number), signal.SIGKILL)
            time.sleep(0.5)
            group.rmdir()

    return inject_within


class UnavailableError(Exception):
    """This machine cannot make the fault."""


# Disks.


@contextlib.contextmanager
def _small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "faults", str(folder)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise UnavailableError("no file system can be mounted (needs root)")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _full_disk(
    name: str, mebibytes: int, seconds: float | None = None, *, more: int = 70
) -> Callable[[Study], None]:
    """Fill a disk while trials are trained: for some seconds, or until the study ends in a line."""

    def inject(study: Study) -> None:
        folder = study.home / name
        study.has_whole_mlflow = name != "mlflow"
        study.stack.enter_context(_small_disk(folder, mebibytes))
        study.mend = lambda: (folder / "filler").unlink(missing_ok=True)
        for session in study.while_training(more=more):
            session.inject(lambda: _fill(folder))
            if seconds is None:
                session.end()
            else:
                time.sleep(seconds)
                study.mend()
                session.goes_on()

    return inject


# What lies on disk.


def _torn_journal(study: Study) -> None:
    """Kill the driver, and append half a line to the journal, as a write that was cut off leaves
    it.
    """
    for session in study.at_random_moments():
        os.kill(session.process.pid, signal.SIGKILL)
        session.end(is_killed=True)
        journal = study.folder / "study.log"
        lines = journal.read_bytes().splitlines() if journal.is_file() else []
        if not lines:
            continue
        line = study.random.choice(lines[1:] or lines)
        with journal.open("ab") as file:
            file.write(line[: study.random.randint(1, len(line) - 1)])
        study.injected += 1
        study.start(more=20).goes_on(is_start=True)


def _damages(content: bytes, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Ways in which a file of lines is damaged anywhere but in its last line."""
    lines = content.splitlines(keepends=True)
    place = chance.randint(len(lines) // 3, 2 * len(lines) // 3)
    result = next(
        index
        for index, line in enumerate(lines)
        if index > len(lines) // 3 and b"train_seconds" in line
    )

    def with_line(index: int, *new: bytes) -> bytes:
        return b"".join([*lines[:index], *new, *lines[index + 1 :]])

    line = lines[result]
    yield "garbage", with_line(place, bytes(chance.randrange(256) for _ in range(200)) + b"\n")
    yield "zero bytes", with_line(place, bytes(len(lines[place]) - 1) + b"\n")
    yield "a line that is torn", with_line(result, line[: len(line) // 2] + b"\n")
    yield (
        "a block of zero bytes",
        content[: len(content) // 2] + bytes(4096) + content[len(content) // 2 + 4096 :],
    )


def _corrupted_journal(study: Study) -> None:
    """Damage the journal of a study that has ended, which is then refused in a line.

    The journal is put back each time.
    """
    study.start(more=0).end(300, is_timed=False)
    journal, kept = study.folder / "study.log", study.home / "kept"
    shutil.copytree(study.folder, kept)
    for name, damaged in list(_damages(journal.read_bytes(), study.random))[: study.count]:
        assert damaged != journal.read_bytes(), name
        journal.write_bytes(damaged)
        session = Session(study, study.command(study.num_trials + 10), is_other=True)
        study.injected += 1
        session.fault_at = time.monotonic()
        with contextlib.suppress(EndedError):
            session.wait_for(lambda session=session: "done" in session.out, MAX_SECONDS)
            study.faults.append(f"{name} in the journal is not seen")
            os.killpg(session.process.pid, signal.SIGKILL)
        if session.end(MAX_SECONDS) != 2:
            study.faults.append(f"{name} in the journal: {study.lines[-1]}")
        elif journal.read_bytes() != damaged:
            study.faults.append(f"{name} in the journal: it was written to although it was refused")
        time.sleep(1)
        for number in study.processes():
            os.kill(number, signal.SIGKILL)
        shutil.rmtree(study.folder)
        shutil.copytree(kept, study.folder)


_BREAKS: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("no file", lambda path: path.unlink()),
    ("half of it", lambda path: os.truncate(path, path.stat().st_size // 2)),
    ("nothing", lambda path: os.truncate(path, 0)),
    ("garbage", lambda path: path.write_bytes(os.urandom(path.stat().st_size))),
    ("zero bytes", lambda path: path.write_bytes(bytes(path.stat().st_size))),
    ("a last byte less", lambda path: os.truncate(path, path.stat().st_size - 1)),
    ("a byte more", lambda path: path.write_bytes(path.read_bytes() + b"\0")),
    ("another header", lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])),
    ("a folder", lambda path: (path.unlink(), path.mkdir())),
    ("text", lambda path: path.write_text("state\n")),
    ("a bit that flipped", lambda path: path.write_bytes(_flipped(path.read_bytes()))),
)


def _flipped(content: bytes) -> bytes:
    place = len(content) - 9
    return content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :]


def _corrupted_states(study: Study) -> None:
    """Interrupt the study and damage the state of each paused trial, each in another way."""
    damaged: dict[Path, int | None] = {}

    def states() -> list[Path]:
        """States that can be damaged: all but those that were and have not been written anew
        since.
        """
        paths = [
            path for path in study.folder.glob("paused/trial-*/*") if not path.name.startswith(".")
        ]
        return [path for path in paths if _written_at(path) not in (None, damaged.get(path))]

    for _ in range(2 * study.count):
        if study.injected >= study.count:
            return
        session = study.start()
        with contextlib.suppress(EndedError):  # fewer will do where there are no three in time
            session.wait_for_trainings(1)
            session.wait_for(lambda: len(states()) >= 3, MAX_SECONDS)
        if session.is_running:
            os.kill(session.process.pid, signal.SIGKILL)
        session.end(is_killed=True)
        found = states()
        for path in found:
            _BREAKS[study.injected % len(_BREAKS)][1](path)
            damaged[path] = _written_at(path)
            study.injected += 1
        if found:
            study.start().goes_on(is_start=True)


def _written_at(path: Path) -> int | None:
    """When a file was last written, in nanoseconds; None if it is no file, or gone."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else None
    return None


def _corrupted_checkpoint(study: Study) -> None:
    """Damage what ``autotune train`` goes on from: it is refused in a line."""
    folder = study.home / "checkpoint"
    command = [
        sys.executable,
        "-m",
        "autotune",
        "train",
        "experiment=mlp",
        "device=cpu",
        "target.value=0.01",
        f"checkpoint.folder={folder}",
    ]
    subprocess.run(
        command,
        cwd=study.home,
        env=study.environment,
        capture_output=True,
        check=False,
        timeout=120,
    )
    kept = study.home / "kept"
    shutil.copytree(folder, kept)
    # that is a training that begins
    breaks = [(name, damage) for name, damage in _BREAKS if name != "no file"]
    for name, damage in breaks[: study.count]:
        damage(folder / "state.pt")
        session = Session(study, command, is_other=True)
        code = session.end()
        study.injected += 1
        if code in (0, 3):
            study.faults.append(f"{name} in place of the state is not seen")
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)


def _read_only(study: Study) -> None:
    """Start the study while its folder can only be read, in turn that of a study not yet begun
    and one that has ended.
    """
    for number in range(study.count):
        if number == study.count // 2:
            study.start(more=0).end(300, is_timed=False)
        for options in (
            ["--bind", str(study.folder), str(study.folder)],
            ["-o", "remount,bind,ro", str(study.folder)],
        ):
            if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
                raise UnavailableError("no file system can be mounted (needs root)")
        try:
            session = Session(study, study.command(study.num_trials + 10), is_other=True)
            code = session.end()
        finally:
            subprocess.run(["umount", "-l", str(study.folder)], check=True)
        study.injected += 1
        if code != 2:
            study.faults.append(f"exit code {code} with a folder that can only be read")


# The machine.


def _second_driver(study: Study) -> None:
    for session in study.while_training(more=100):
        other = Session(study, session.command, is_other=True)
        code = other.end()
        if session.is_running:
            study.injected += 1
            if code != 2:
                study.faults.append(f"a second driver ended with {code}")


def _hog(study: Study) -> None:
    def hog() -> None:
        hogs = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(os.cpu_count() or 1)
        ]
        time.sleep(2)
        for process in hogs:
            process.kill()
            process.wait()

    for session in study.while_training(more=200):
        session.inject(hog)
        session.goes_on()


def _clock_jumps(study: Study) -> None:
    """Set the wall clock of all processes of the study ahead by an hour and back, in turn.

    libfaketime is not used for it: with it, ``time.sleep`` fails, which sleeps until a time of the
    monotonic clock.
    """
    source, library, clock = (study.home / name for name in ("clock.c", "clock.so", "clock"))
    source.write_text(_WALL_CLOCK)
    try:
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnavailableError("needs a C compiler") from error
    clock.write_text("0")
    study.environment |= {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(clock)}
    offsets = itertools.cycle(("3600", "0", "-3600", "0"))
    for session in study.while_training():
        session.inject(lambda: clock.write_text(next(offsets)))
        time.sleep(1.5)
        session.goes_on()
    clock.write_text("0")


_WALL_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*real)(clockid_t, struct timespec *);
static int is_python;
static long offset, read_at = -1;

__attribute__((constructor)) static void find(void) {
    char path[4096] = "";
    real = dlsym(RTLD_NEXT, "clock_gettime");
    is_python = readlink("/proc/self/exe", path, sizeof path - 1) > 0
        && strstr(path, "python") != NULL;
}

static long seconds(void) {  /* read from the file once a second */
    struct timespec now;
    real(CLOCK_MONOTONIC, &now);
    if (now.tv_sec != read_at) {
        char text[32] = "";
        const char *path = getenv("FAULTS_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        read_at = now.tv_sec;
        if (file >= 0) {
            if (read(file, text, sizeof text - 1) > 0) offset = atol(text);
            close(file);
        }
    }
    return offset;
}

/* whether Ray's C++ asks, by itself or by the standard library */
static int is_of_ray(void *caller) {
    Dl_info code;
    return dladdr(caller, &code)
        && (strstr(code.dli_fname, "_raylet") || strstr(code.dli_fname, "libstdc++"));
}

static int get(clockid_t id, struct timespec *at, void *caller) {
    if (!real) find();
    int failed = real(id, at);
    int is_wall = id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
    if (!failed && is_python && is_wall && seconds() && !is_of_ray(caller)) at->tv_sec += offset;
    return failed;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    return get(id, at, __builtin_return_address(0));
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    int failed = get(CLOCK_REALTIME, &now, __builtin_return_address(0));
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *at) {
    struct timespec now;
    get(CLOCK_REALTIME, &now, __builtin_return_address(0));
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
"""A library for ``LD_PRELOAD`` that moves the wall clock by as many seconds as a file says, and no
other clock, for Python's processes.

Ray's own C++ code keeps its clock: it waits until a time of the kernel's wall clock
(``pthread_cond_timedwait``), which stays where it is, so with a clock an hour ahead it would wait
for an hour, as no program does whose machine's clock is set."""


# Stores.


def _mlflow(mode: str, seconds: float, *, more: int) -> Callable[[Study], None]:
    """Let the MLflow server be so for some seconds; only what met a request is counted."""

    def inject(study: Study) -> None:
        proxy = study.stack.enter_context(Proxy(study.stack.enter_context(mlflow_server())))
        study.tracking = proxy.url
        for session in study.while_training(more=more):
            before, session.fault_at, proxy.mode = proxy.num_faults, time.monotonic(), mode
            time.sleep(seconds)
            proxy.mode = "pass"
            study.injected += proxy.num_faults > before
            session.goes_on()

    return inject


def _mlflow_away_at_start(study: Study) -> None:
    proxy = study.stack.enter_context(Proxy(study.stack.enter_context(mlflow_server())))
    study.tracking, proxy.mode = proxy.url, "away"
    for _ in range(study.count):
        before, session = proxy.num_faults, study.start()
        prefer([session.process.pid])
        code = session.end()
        study.injected += proxy.num_faults > before
        if code != 2:
            study.faults.append(f"exit code {code} though the MLflow server does not answer")
    proxy.mode = "pass"


def _postgresql(study: Study) -> None:
    postmaster = study.stack.enter_context(Postmaster())
    study.storage = postmaster.new_database("studies")
    for session in study.while_training():
        session.inject(postmaster.restart)
        session.end()


_TPE = ("search=tpe",)
"""Optuna's sampler, which pauses no trial: of two rows of much the same fault, one has it, and
the other the default."""

ROWS = (
    Row("driver-killed", "kill -9 of the driver", _signal(signal.SIGKILL), ends_study=True),
    Row("sigterm", "SIGTERM", _signal(signal.SIGTERM), ends_study=True),
    Row("sighup", "SIGHUP", _signal(signal.SIGHUP), overrides=_TPE, ends_study=True),
    Row("ctrl-c", "Ctrl-C", _signal(signal.SIGINT, to_group=True), ends_study=True),
    Row(
        "ctrl-c-twice",
        "Ctrl-C twice within half a second",
        _signal(signal.SIGINT, times=2, to_group=True),
        overrides=_TPE,
        ends_study=True,
    ),
    Row(
        "gcs-killed",
        "kill -9 of the GCS",
        _gcs_killed,
        overrides=_TPE,
        ends_study=True,
    ),
    Row(
        "training-killed",
        "kill -9 of a training",
        _token("kill"),
        outcomes={"OUT_OF_MEMORY", "LOST"},
    ),
    Row(
        "training-stopped",
        "SIGSTOP of a training for three seconds",
        _token("stop", _let_go_on, more=100),
        part_seconds=0.15,
        overrides=["target.max_train_seconds=2"],
        environment={"AUTOTUNE_MAX_RETAKES": "2"},
        outcomes={"REACHED", "MISSED", "CAPPED", "STOPPED"},
    ),
    Row(
        "hang",
        "a training hangs in C, with the interpreter's lock",
        _token("hang"),
        overrides=["search.trial_deadline_seconds=3"],
        outcomes={"TIMED_OUT"},
    ),
    Row(
        "memory-limit",
        "a training is refused memory (RLIMIT_AS)",
        _token("memorylimit"),
        outcomes={"OUT_OF_MEMORY"},
    ),
    Row(
        "memory-killed",
        "a training is killed for its memory (control group)",
        _with_memory_group(_token("memorykill")),
        outcomes={"OUT_OF_MEMORY"},
    ),
    Row(
        "device-memory",
        "torch.OutOfMemoryError",
        _token("devicememory"),
        outcomes={"OUT_OF_MEMORY"},
    ),
    Row("nan", "an error that is NaN", _token("nan"), outcomes={"DIVERGED"}),
    Row(
        "disk-full",
        "no room in the study's folder",
        _full_disk("outputs/disk-full", 64),
        ends_study=True,
    ),
    Row(
        "disk-full-mlflow",
        "no room for MLflow's database for 3 s",
        _full_disk("mlflow", 32, 3.0, more=110),
        part_seconds=0.5,
        database="mlflow/mlflow.db",
    ),
    Row(
        "disk-full-paused",
        "no room for states of paused trials for 2 s",
        _full_disk("outputs/disk-full-paused/paused", 1, 2.0),
        part_seconds=0.25,
    ),
    Row("journal-torn", "a journal whose last line is torn", _torn_journal, ends_study=True),
    Row("journal-corrupted", "a journal that is damaged in the middle", _corrupted_journal),
    Row(
        "paused-corrupted",
        "states of paused trials that are damaged",
        _corrupted_states,
        part_seconds=0.02,
        ends_study=True,
    ),
    Row("checkpoint-corrupted", "a checkpoint that is damaged", _corrupted_checkpoint),
    Row("read-only", "a folder that can only be read", _read_only),
    Row("second-driver", "two drivers of one study", _second_driver, part_seconds=0.3),
    Row(
        "cpu-hog",
        "a busy process for each CPU for two seconds",
        _hog,
        part_seconds=0.05,
        is_alone=True,
        environment={"AUTOTUNE_MAX_RETAKES": "2"},
    ),
    Row(
        "clock-jumps",
        "the wall clock jumps by an hour, ahead and back",
        _clock_jumps,
        part_seconds=0.2,
    ),
    Row("mlflow-away-at-start", "no MLflow server when the study starts", _mlflow_away_at_start),
    Row(
        "mlflow-away",
        "no MLflow server for 20 s",
        _mlflow("away", 20, more=150),
        count=3,
        part_seconds=0.5,
    ),
    Row(
        "mlflow-slow",
        "an MLflow server that takes a second for each answer, for 5 s",
        _mlflow("slow", 5, more=150),
        part_seconds=0.5,
    ),
    Row(
        "mlflow-500",
        "an MLflow server that answers 500 for 10 s",
        _mlflow("500", 10, more=100),
        count=3,
        part_seconds=0.5,
    ),
    Row(
        "postgresql-killed",
        "kill -9 of PostgreSQL, and its restart",
        _postgresql,
        part_seconds=0.1,
        ends_study=True,
    ),
    *(
        Row(
            name,
            "killed in every way, started again until it is done",
            lambda study: study.run(),
            count=0,
            is_alone=True,
            killed=killed,
        )
        for name, killed in KILLED.items()
    ),
)
