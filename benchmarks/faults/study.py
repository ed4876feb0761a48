"""A study under faults: started, met by a fault at a moment of its life, resumed, and at its end
held against all that was ever told.

Every study has a folder of its own with a short name (Ray's sockets lie in it), in which Ray's
sessions and temporary files go too, and an environment variable by which its processes are found,
whoever their parent is.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import records

MAX_SECONDS = 30.0
"""Longest time from a fault to the line that tells it, or to the next thing that is trained."""
PATIENCE_SECONDS = 60.0
"""Time after which a study that a fault has stopped counts as hung, and is killed."""
LEFTOVER_SECONDS = 10.0
"""Time that processes have to end after their driver has."""
NUM_TRIALS = 60
REPOSITORY = Path(__file__).parent.parent.parent
_MARK = "FAULTS_STUDY"
_OF_LIBRARIES = re.compile(r"^torchinductor_|wandb-(media|artifacts)$")
"""Temporary folders that importing a library makes: torch, and wandb, which Ray imports where it
is installed."""
ENDS = (0, 3)
"""Exit codes of a study that ended by itself: finished, nothing reached the target."""


class Study:
    """One study of a row of the bench.

    Args:
        name: of the row.
        count: injections that are wanted.
        overrides: of the command, besides the bench's own.
        part_seconds: length of one of the parts of a training; longer ones where a fault lasts.
        environment: of its processes, besides the bench's own.
        outcomes: that a trial may have in which a fault happened, if it has a result at all; None:
            any.
        is_alone: whether no other study runs.
    """

    def __init__(
        self,
        name: str,
        count: int,
        *,
        overrides: Sequence[str] = (),
        part_seconds: float = 0.012,
        environment: Mapping[str, str] | None = None,
        outcomes: Collection[str] | None = None,
        num_trials: int = NUM_TRIALS,
        is_alone: bool = False,
    ) -> None:
        self.name, self.count, self.outcomes, self.is_alone = name, count, outcomes, is_alone
        self.home = Path(tempfile.mkdtemp(prefix="fault-", dir="/tmp"))
        self.folder = self.home / "outputs" / name
        self.folder.mkdir(parents=True)
        for folder in ("r", "t", "diary/tokens", "diary/taken"):
            (self.home / folder).mkdir(parents=True)
        self.diary = self.home / "diary" / "lines"
        self._diary_lines: list[dict[str, Any]] = []
        self._diary_bytes = 0
        self.storage: str | None = None
        self.tracking = f"sqlite:///{self.home}/mlflow.db"
        self.overrides, self.part_seconds, self.num_trials = (
            list(overrides),
            part_seconds,
            num_trials,
        )
        own = {
            _MARK: str(self.home),
            "RAY_TMPDIR": str(self.home / "r"),
            "TMPDIR": str(self.home / "t"),
            "PYTHONPATH": str(REPOSITORY),
        }
        self.environment = {
            **os.environ,
            "AUTOTUNE_MAX_RETAKES": "0",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            **own,
            **(environment or {}),
        }
        for variable in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
            self.environment.pop(variable, None)
        self.random = random.Random(name)
        self.shared_memory = _shared_memory()
        self.injected = 0
        self.seconds: list[float] = []
        """From each fault to the end of the process, or to the next thing that was trained."""
        self.lines: list[str] = []
        self.lost: set[str] = set()
        self.doubled: set[str] = set()
        self.disagreeing: set[str] = set()
        self.leftovers: set[str] = set()
        self.faults: list[str] = []
        """What else is not as it should be: tracebacks, no line, too late."""
        self.told: dict[str, records.Run] = {}
        """Runs whose result a record had when a process of the study ended."""
        self.num_unfinished = 0
        """Trials that were to be gone on with when a process of the study ended."""
        self.points: list[tuple[float, set[records.Point]]] = []
        """What had a result at the end of each process, with the time of that."""
        self.finished = 0
        self.session: Session | None = None
        self.mend: Callable[[], None] = lambda: None
        """Called before the study is resumed: ends a fault that would last."""
        self.has_whole_mlflow = True
        """Whether no fault keeps the study from ending its runs in MLflow's database as it ends."""
        self.stack = contextlib.ExitStack()
        """Servers and file systems that the study needs until its records have been read."""

    def command(self, num_trials: int, *, num_cpus: int = 2) -> list[str]:
        """The command line that starts or resumes the study with so many trials, on so many
        CPUs.
        """
        node = (
            "_target_: benchmarks.faults.training.train, rate: 0.03, width: 8, part_seconds:"
            f" {self.part_seconds}"
        )
        storage = [f"search.storage='{self.storage}'"] if self.storage else []
        return [
            sys.executable,
            "-m",
            "autotune",
            "experiment=cnn",
            f"study.name={self.name}",
            "allowed_targets=[benchmarks]",
            "device=cpu",
            f"training={{{node}, diary: {self.diary}}}",
            "search_space=[]",
            "training.rate=interval(0.005,0.3)",
            "training.width=choice(4,8,16)",
            "target.metric=loss",
            "target.mode=min",
            "target.value=0.01",
            "target.max_train_seconds=5",
            f"search.num_trials={num_trials}",
            "search.time_budget_seconds=null",
            "confirm.max_runs=8",
            f"cluster.num_cpus={num_cpus}",
            "confirm.budget_fraction=null",
            f"tracking.uri='{self.tracking}'",
            *storage,
            *self.overrides,
        ]

    def start(self, *, more: int = 40) -> "Session":
        """Start the study, or resume it with room for ``more`` new trials.

        A session that still runs is returned as it is.

        Every second session has one CPU and so one worker of Ray's, which takes less of the time of
        the rows beside it.
        """
        if self.session is not None and self.session.is_running:
            return self.session
        self.mend()
        known = len([name for name in self.told if name.startswith("trial-")])
        num_trials = max(self.num_trials, known + self.num_unfinished + more)
        self.session = Session(self, self.command(num_trials, num_cpus=2 - len(self.points) % 2))
        return self.session

    def at_random_moments(self) -> Iterator["Session"]:
        """Sessions, each at another moment of its life, until there were as many injections as
        wanted.

        One in five is still starting, as many confirm or conclude, and the others search.
        """
        for attempt in range(3 * self.count):
            if self.injected >= self.count:
                return
            session = self.start(more=12 if attempt % 5 == 4 else 60)
            try:
                if attempt % 5 == 3:
                    time.sleep(self.random.uniform(0.5, 6))
                elif attempt % 5 == 4:
                    session.wait_for(lambda session=session: "confirmation run" in session.out)
                    time.sleep(self.random.uniform(0, 3))
                else:
                    session.wait_for_trainings(self.random.randint(1, 10))
                    time.sleep(self.random.uniform(0, 0.2))
            except EndedError:
                session.end()
                continue
            if session.is_running:
                yield session

    def while_training(self, *, more: int = 70) -> Iterator["Session"]:
        """Sessions that are training, until there were as many injections as wanted.

        One that goes on is given again.

        Seventy trials have room for ten faults, so that the session then ends by itself soon.
        """
        for _ in range(3 * self.count):
            if self.injected >= self.count:
                return
            session = self.start(more=more)
            try:
                session.wait_for_trainings(self.random.randint(1, 5), since=time.monotonic())
            except EndedError:
                # MLflow may have hundreds of runs to take
                session.end(PATIENCE_SECONDS * 5, is_timed=False)
                continue
            yield session

    def read_diary(self) -> list[dict[str, Any]]:
        """All lines that trainings have written; each is read once."""
        with contextlib.suppress(FileNotFoundError), self.diary.open("rb") as file:
            file.seek(self._diary_bytes)
            *lines, torn = file.read().split(b"\n")
            self._diary_bytes = file.tell() - len(torn)
            self._diary_lines += [json.loads(line) for line in lines if line.endswith(b"}")]
        return self._diary_lines

    def drop_token(self, kind: str) -> int:
        """Have the next training fail, and return its process.

        Raises:
            EndedError: the study ended before.
        """
        assert self.session is not None
        name = f"{kind}-{self.injected}"
        token = self.home / "diary" / "tokens" / name
        token.touch()

        def taken() -> dict[str, Any] | None:
            return next((line for line in self.read_diary() if line.get("token") == name), None)

        try:
            self.session.wait_for(lambda: taken() is not None)
        finally:
            token.unlink(missing_ok=True)
        line = taken()
        assert line is not None
        return int(line["pid"])

    def processes(self) -> dict[int, str]:
        """The study's processes that have not ended, by id, with their command lines.

        They are known by an environment variable; those that have written their name over it, as
        Ray's workers do, by their open files.
        """
        mark, found = f"{_MARK}={self.home}".encode(), {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue
                files = (str(file.readlink()) for file in (path / "fd").iterdir())
                if mark in (path / "environ").read_bytes().split(b"\0") or any(
                    file.startswith(f"{self.home}/") for file in files
                ):
                    found[int(path.name)] = (
                        (path / "cmdline").read_text().replace("\0", " ").strip()[:120]
                    )
        found.pop(os.getpid(), None)
        return found

    def process(self, pattern: str) -> int | None:
        """Id of a process of the study whose command line matches; None if there is none."""
        return next(
            (number for number, line in self.processes().items() if re.search(pattern, line)), None
        )

    def take_snapshot(self) -> None:
        """Keep what the records tell, so that it can be asked for at the end."""
        stored = records.read_storage(self.name, self.folder, self.storage)
        self.told |= stored.runs()
        self.num_unfinished = stored.num_unfinished
        self.points.append((time.monotonic(), {stored.point(name) for name in stored.results}))
        # its last row is torn where the disk was full
        with contextlib.suppress(OSError, TypeError, ValueError):
            self.told |= dict(records.read_table(self.folder))

    def finish(self) -> None:
        """Resume the study without a fault until it ends."""
        for _ in range(3):
            end = self.start(more=5).end(PATIENCE_SECONDS * 5, is_timed=False)
            if end in ENDS:
                break
        else:
            self.faults.append(
                f"does not go on to its end: exit code {end}:"
                f" {self.lines[-1] if self.lines else ''}"
            )
        self.mend()

    def check(self) -> None:
        """Hold the records of the ended study against each other, and against all that was ever
        told; and look for what it has left.
        """
        stored = records.read_storage(self.name, self.folder, self.storage)
        self.finished = len([name for name in stored.results if name.startswith("trial-")])
        others: dict[str, list[tuple[str, records.Run]]] = {}
        for source, read, path in (
            ("trials.csv", records.read_table, self.folder),
            ("recording", records.read_recording, self.folder / "recording"),
        ):
            try:
                others[source] = read(path)
            except (OSError, KeyError) as error:
                self.disagreeing.add(f"{source}: cannot be read: {error}")
        others["MLflow"], still_open = records.read_mlflow(self.tracking, self.name, stored.results)
        names = {source: {name for name, _ in told} for source, told in others.items()}
        names["storage"] = set(stored.results)
        for name, run in self.told.items():
            wanted = (
                names
                if name.startswith("trial-")
                else {source: names[source] for source in ("storage", "MLflow")}
            )
            self.lost |= {f"{source}: {name}" for source, has in wanted.items() if name not in has}
            if name in stored.results and run.contradicts(stored.runs()[name]):
                self.disagreeing.add(f"storage: {name} was {run}, is {stored.runs()[name]}")
        diary = self.read_diary()
        self.disagreeing |= {
            *records.contradictions(stored, others),
            *records.missing(stored, others),
            *records.stolen(stored, diary),
        }
        self.disagreeing |= set(records.read_best(self.folder, stored))
        self.doubled |= set(records.doubles(self.folder / "study.log", others))
        for at, points in self.points:
            again = [line for line in diary if line["event"] == "begin" and line["at"] > at]
            self.doubled |= {
                f"trained again: {line}" for line in again if records.point_of(line) in points
            }
        repeated = {
            number: again
            for number, again in stored.retried.items()
            if f"trial-{number}" in stored.results
        }
        self.doubled |= {
            f"trial-{number} has a result, and trial-{again} repeats it"
            for number, again in repeated.items()
        }
        self.disagreeing |= set(records.unexpected(stored, diary, self.outcomes))
        self.leftovers |= {f"MLflow run {name} is open" for name in still_open} | set(
            self._left_files()
        )
        if self.finished < self.num_trials:
            self.faults.append(f"{self.finished} trials of {self.num_trials}")

    def _left_files(self) -> Iterator[str]:
        yield from (
            f"Ray session {path.name}"
            for path in (self.home / "r").glob("**/session_2*")
            if path.is_dir()
        )
        yield from (
            f"temporary {path.name}"
            for path in (self.home / "t").iterdir()
            if not _OF_LIBRARIES.search(path.name)
        )
        for pattern in ("*.lock", "**/.*.part", "hang-*", "paused/*", "states/*"):
            yield from (
                str(path.relative_to(self.folder))
                for path in self.folder.glob(pattern)
                if path.name != ".lock"
            )
        yield from (
            f"shared memory {path.name}"
            for path in _shared_memory() - self.shared_memory
            if _is_left(path)
        )

    def close(self, *, keeps_files: bool = False) -> None:
        """Kill what still runs, and delete the study's folder unless ``keeps_files``."""
        self.mend()
        self.stack.close()
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if not keeps_files:
            shutil.rmtree(self.home, ignore_errors=True)


class EndedError(Exception):
    """A session ended before it could meet its fault."""


class Session:
    """One process of a study, from its start to its end.

    From its fault on the session gets CPU time before the studies of other rows (``prefer``), so
    that its seconds tell less of these.
    """

    def __init__(self, study: Study, command: Sequence[str], *, is_other: bool = False) -> None:
        self._study, self.command = study, command
        self._files = [
            Path(tempfile.mkstemp(dir=study.home, suffix=suffix)[1]) for suffix in (".out", ".err")
        ]
        self._begun = len(study.read_diary())
        self.fault_at = time.monotonic()
        self._is_other = is_other
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=study.home,
                env=study.environment,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        if is_other:
            prefer([self.process.pid])

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    @property
    def out(self) -> str:
        """What it has printed."""
        return self._files[0].read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        """What it has printed to stderr."""
        return self._files[1].read_text(encoding="utf-8", errors="replace")

    def wait_for(self, is_so: Callable[[], bool], seconds: float = 180.0) -> None:
        """Return once it is so.

        Raises:
            EndedError: the process ended, or it is not so in time.
        """
        until = time.monotonic() + seconds
        while not is_so():
            if not self.is_running or time.monotonic() > until:
                raise EndedError
            time.sleep(0.1)

    def wait_for_trainings(self, count: int, since: float = 0.0) -> None:
        """Return once so many trainings have begun in this session, after the time ``since``."""

        def is_so() -> bool:
            lines = self._study.read_diary()[self._begun :]
            return sum(line["event"] == "begin" and line["at"] > since for line in lines) >= count

        self.wait_for(is_so)

    def inject(self, fault: Callable[[], object]) -> None:
        """Let the fault happen to the running process, and count it.

        It is not counted where the process has ended.
        """
        self.fault_at = time.monotonic()
        if self.is_running:
            fault()
            self._study.injected += 1
            if not self._study.is_alone:
                prefer(self._study.processes())

    def goes_on(self, *, is_start: bool = False) -> bool:
        """Wait until something is trained after the fault, or the process ends, which is held
        against what an end must be.

        One that ``is_start``, and so takes the study up after the fault, may take longer to train
        than ``MAX_SECONDS``.
        """
        study = self._study
        with contextlib.suppress(EndedError):
            self.wait_for(self._has_trained, PATIENCE_SECONDS * (3 if is_start else 1))
        if not self._has_trained():
            self.end()
            return False
        study.seconds.append(time.monotonic() - self.fault_at)
        if study.seconds[-1] > MAX_SECONDS and not is_start:
            study.faults.append(f"went on after {study.seconds[-1]:.0f} s")
        return True

    def _has_trained(self) -> bool:
        return any(
            line["event"] == "begin" and line["at"] > self.fault_at
            for line in self._study.read_diary()[self._begun :]
        )

    def end(
        self, seconds: float = PATIENCE_SECONDS, *, is_killed: bool = False, is_timed: bool = True
    ) -> int | None:
        """Wait until the process has ended, and keep what it says.

        None if it had to be killed, which is a fault.
        """
        study, code = self._study, None
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            study.faults.append(
                f"hung for {seconds:.0f} s after the fault, the last line was:"
                f" {_last_line(self.out + self.err)}"
            )
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        took = time.monotonic() - self.fault_at
        is_line = self._is_other or (code is not None and not is_killed and code not in ENDS)
        if is_line and is_timed:
            study.seconds.append(took)
            if took > MAX_SECONDS:
                study.faults.append(f"the line came after {took:.0f} s")
        if is_line:
            self._check_end(code)
        if self._is_other:
            return code
        study.session = None
        if is_line:
            if study.has_whole_mlflow:
                still_open = records.open_runs(study.home / "mlflow.db")
                study.leftovers |= {
                    f"MLflow run {name} was open after: {study.lines[-1][:60]}"
                    for name in still_open
                }
        elif code in ENDS and (self.err.strip() or "Traceback" in self.out):
            study.faults.append(f"said though all is well: {_last_line(self.err)}")
        self._check_processes()
        study.take_snapshot()
        return code

    def _check_end(self, code: int | None) -> None:
        """An end by an error is one line on stderr.

        One by a signal is the command that resumes, on stdout.
        """
        study, err = self._study, [line for line in self.err.splitlines() if line.strip()]
        study.lines.append(_last_line(self.err) or _last_line(self.out))
        if "Traceback" in self.out + self.err:
            study.faults.append(
                f"a traceback: ...{(self.out + self.err).partition('Traceback')[2][-3000:]}"
            )
        elif code not in (1, 2, None) and not err:
            if "python -m autotune" not in self.out:
                study.faults.append(f"no command that resumes: {study.lines[-1]}")
        elif len(err) != 1 or not err[0].startswith("autotune: "):
            study.faults.append(f"{len(err)} lines, exit code {code}: {err[:3]}")

    def _check_processes(self) -> None:
        until = time.monotonic() + LEFTOVER_SECONDS
        while (left := self._study.processes()) and time.monotonic() < until:
            time.sleep(0.2)
        self._study.leftovers |= {f"process {line}" for line in left.values()}
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def prefer(processes: Collection[int]) -> None:
    """Have Linux share out CPU time in favour of the sessions of these processes, where it
    groups processes by session.
    """
    for process in processes:
        with contextlib.suppress(OSError):
            Path(f"/proc/{process}/autogroup").write_text("-10", encoding="utf-8")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _shared_memory() -> set[Path]:
    """Segments of shared memory.

    Those of PostgreSQL, and folders, which MLflow's server makes, are none of a study's.
    """
    return {
        path
        for path in Path("/dev/shm").iterdir()
        if not path.name.startswith("PostgreSQL") and not path.is_dir()
    }


def _is_left(segment: Path) -> bool:
    """Whether a segment of shared memory is still there and no process has it.

    Processes are asked by its inode: a semaphore gets its name after it was mapped under another
    one.
    """
    with contextlib.suppress(FileNotFoundError):
        found = segment.stat()
        mapped = f" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino} "
        for path in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                if mapped in path.read_text():
                    return False
    return segment.exists()
