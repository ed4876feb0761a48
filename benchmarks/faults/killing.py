"""The killing bench: trainings of a minute each, of every kind, whose study is killed again and
again in every way, and started again by the same command until it is done.

A row is a kind of training with a number of ranks, or that with a confirmation or in a comparison.
In the two rows of jobs a baseline of three minutes, and its confirmation, are trained in jobs of
one minute, counted from the first step; they end by SIGTERM and by kill -9 some seconds later, or
without notice. Claims, besides those of every study of the fault bench:

* at most 12% of the steps that trainings made, by their own diary, had been made before;
* a run keeps its number, its seed and its folder;
* a step that is made again, or in an undisturbed study of the same seed, is equal to the bit;
* each run has one result, with all of its evaluations.

Lengths follow from ``--seconds``: of it a kill comes every third on average, a state every twelfth.
"""

import bisect
import contextlib
import csv
import functools
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.faults import long_command, records
from benchmarks.faults.long_command import EPOCHS, STEPS
from benchmarks.faults.study import ENDS, PATIENCE_SECONDS, REPOSITORY, EndedError, Session, Study

MAX_REPEATED = 0.12
NUM_SEEDS = 3
"""Pairs of runs of a comparison."""
_MAX_JOBS = {"sigterm": 4, "kill-node": 5}
"""Jobs that a training of three jobs' length may take, by how jobs end."""
_NOTICES = {"ctrl-c": signal.SIGINT, "sigterm": signal.SIGTERM, "sigusr1": signal.SIGUSR1}
_OF_RAY = {"kill-worker": r"^ray::TrialWorker", "kill-raylet": "raylet/raylet "}
_RANKS = {"kill-rank-0": 0, "kill-rank-1": 1}
WAYS = (*_NOTICES, "kill-driver", "kill-launcher", *_OF_RAY, *_RANKS, "kill-node")
_OWN_CODES = (1, 2, 130)
"""Exit codes of a driver that mean something else than "start me again" or that it is done."""
_LAUNCHER = "from autotune.execution.launcher import serve"
_SETTINGS = ("conf/config.yaml", "conf/cluster/local.yaml")
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What a row trains, and how it is killed."""

    kind: str
    """own, function, lightning, hugging_face or command."""
    num_ranks: int = 1
    unit_seconds: float = 60.0
    """Length of a training, or of a job."""
    num_trials: int = 12
    ways: Collection[str] = WAYS
    has_confirmation: bool = False
    is_comparison: bool = False
    job_end: str | None = None
    """How jobs end, where one training takes three of them; None: killed at random."""

    @property
    def seconds(self) -> float:
        """Length of a training."""
        return self.unit_seconds * (3 if self.job_end else 1)

    @property
    def notice_seconds(self) -> float:
        """Time from a notice to the end."""
        return max(self.unit_seconds / 4, 10.0)

    @property
    def max_kills(self) -> int:
        """Kills within which a study must be done: twice as many as an undisturbed one would
        meet.
        """
        num_runs = 2 * NUM_SEEDS if self.is_comparison else self.num_trials
        num_runs += 8 if self.has_confirmation else 0
        return 2 * 3 * num_runs * self.num_ranks // 2 + len(self.ways)

    def options(self, diary: Path, step_seconds: float) -> dict[str, dict[str, Any]]:
        """The files of a configuration folder, by their paths; the experiment is the last one."""
        here, point = "benchmarks.faults.long_training", {"rate": 0.1, "width": 8}
        given = {**point, "diary": str(diary), "seconds": step_seconds}
        experiment: dict[str, Any] = {
            "search_space": [
                {
                    f"{self.group}.rate": "interval(0.05,0.3)",
                    f"{self.group}.width": "choice(4,8,16)",
                }
            ],
            "target": {"value": 0.999, "max_train_seconds": 100 * self.seconds},
        }
        files = {}
        if self.kind == "own":
            names = ["model", "data", *(["parallelism"] if self.num_ranks > 1 else [])]
            option = {"parallelism": "ddp"}
            experiment["defaults"] = [
                {f"override /{name}": option.get(name, "killed")} for name in names
            ]
            experiment |= {"batch_size": 8, "epochs": EPOCHS}
            files["model/killed.yaml"] = {"_target_": f"{here}.OwnModel", **given}
            files["data/killed.yaml"] = {"_target_": f"{here}.data"}
        elif self.kind == "command":
            start = "torchrun --nproc_per_node={devices}" if self.num_ranks > 1 else "python"
            words = f"{{rate}} {{width}} {diary} {step_seconds} {self.unit_seconds / 12}"
            command = f"{start} {long_command.__file__} {words} {{trial_folder}}"
            experiment["training"] = {
                "_target_": "autotune.script.run",
                "command": command,
                **point,
            }
        else:
            experiment["training"] = {"_target_": f"{here}.{self.kind}", **given}
        return {**files, "experiment/killed.yaml": experiment}

    @property
    def group(self) -> str:
        """The key that searched values lie beneath."""
        return "model" if self.kind == "own" else "training"


class KilledStudy(Study):
    """A study, or a comparison, that is started again by the same command until it is done."""

    def __init__(self, name: str, killed: Killed, *, is_undisturbed: bool = False) -> None:
        super().__init__(name, 0, num_trials=1 if killed.job_end else killed.num_trials)
        self.killed, self.is_done = killed, False
        self.starts: list[float] = []
        self.kills: list[tuple[float, str]] = []
        self.codes: dict[str, list[int | None]] = defaultdict(list)
        """Exit codes, by what the driver had met last."""
        self.measured: dict[str, Any] = {}
        step_seconds = 0.0 if is_undisturbed else killed.seconds / (EPOCHS * STEPS)
        for path, content in killed.options(self.diary, step_seconds).items():
            file = self.home / "conf" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            header = "# @package _global_\n" if "search_space" in content else ""
            file.write_text(header + yaml.safe_dump(content, sort_keys=False))
        settings = {
            "checkpoint.every_minutes": f"{killed.unit_seconds / 12 / 60:.6f}",
            "cluster.notice_seconds": f"{killed.notice_seconds:g}",
        }
        missing = missing_keys()
        self.overrides = [f"{key}={value}" for key, value in settings.items() if key not in missing]
        self.faults += [f"{key}: there is no such key" for key in missing]

    def command(self, num_trials: int, *, num_cpus: int = 2) -> list[str]:
        """The one command line of the study."""
        killed = self.killed
        shared = [
            "--config-dir",
            str(self.home / "conf"),
            "experiment=killed",
            "allowed_targets=[benchmarks,autotune.script]",
            f"study.name={self.name}",
            "device=cpu",
            f"parallelism.num_workers={killed.num_ranks}",
            f"cluster.num_cpus={num_cpus}",
            f"tracking.uri='{self.tracking}'",
            "search.max_retries=10",  # one training may meet several kills of its processes
            *self.overrides,
        ]
        start = [sys.executable, "-m", "autotune"]
        if killed.is_comparison:
            configurations = ["a=[]", f"b=[{killed.group}.rate=0.2]"]
            return [*start, "compare", *shared, *configurations, f"num_seeds={NUM_SEEDS}"]
        few = ["confirm.num_candidates=1", "confirm.num_seeds=2", "confirm.max_runs=8"]
        return [
            *start,
            *shared,
            "search=random",
            "search.sampler._target_=benchmarks.faults.long_training.NumberedSampler",
            f"search.num_trials={num_trials}",
            "search.time_budget_seconds=null",
            "stopping=none",
            "confirm.budget_fraction=null",
            *(few if killed.has_confirmation else ["confirm=none"]),
        ]

    def start(self, *, more: int = 0) -> Session:
        """Start the study, unless a session still runs."""
        if self.session is None or not self.session.is_running:
            self.starts.append(time.monotonic())
            self.session = Session(self, self.command(self.num_trials))
        return self.session

    def run(self) -> None:
        """Kill it at random, or at the end of each job, until it is done."""
        killed, num_idle = self.killed, 0
        deck: list[str] = []
        while not self.is_done and num_idle < 3 and self._is_worth_it():
            session = self.start()
            since = max(self.starts[-1], self.kills[-1][0] if self.kills else 0.0)
            part = 1.0 if killed.job_end else self.random.uniform(0.5, 1.5) / 3
            try:
                self._train(session, since, part * killed.unit_seconds)
            except EndedError:
                self._end(session, is_timed=False)
                num_idle = 0 if self._steps(self.starts[-1]) else num_idle + 1
                continue
            if not deck:
                deck = [each for each in WAYS if each in killed.ways]
                self.random.shuffle(deck)
            self._kill(session, killed.job_end or deck.pop())
        if not self.is_done and num_idle < 3 and killed.job_end is None:
            # what it has left and lost is then seen
            self._end(self.start(), killed.max_kills * killed.unit_seconds, is_timed=False)
            self.faults.append(f"not done after {len(self.kills)} kills")
        if not self.is_done:
            self.faults.append(f"not done after {len(self.starts)} starts")

    def _is_worth_it(self) -> bool:
        """Whether another kill may still find the study within what is claimed."""
        if self.killed.job_end is None:
            return len(self.kills) < self.killed.max_kills
        return max(self._jobs().values(), default=0) <= _MAX_JOBS[self.killed.job_end] + 1

    def _jobs(self) -> Counter[str]:
        """Number of sessions in which each run has trained."""
        lines = self._named(self._steps())
        seen = {(key_of(line), bisect.bisect(self.starts, line["at"])) for line in lines}
        return Counter(str(key) for key, _ in seen)

    def _steps(self, since: float = 0.0) -> list[Line]:
        return [
            line for line in self.read_diary() if line["event"] == "step" and line["at"] > since
        ]

    def _named(self, lines: Iterable[Line]) -> list[Line]:
        """The lines with the names of their runs, as the storage has them where the training did
        not know.
        """
        stored = records.read_storage(self.name, self.folder, self.storage)
        names = {stored.point(name): name for name in stored.results}
        unnamed = "run" if self.killed.is_comparison else "trial-?"
        return [
            {**line, "run": line["run"] or names.get(records.point_of(line), unnamed)}
            for line in lines
        ]

    def _train(self, session: Session, since: float, seconds: float) -> None:
        def is_due() -> bool:
            steps = self._steps(since)
            return bool(steps) and time.monotonic() > steps[0]["at"] + seconds

        session.wait_for(is_due, 3 * PATIENCE_SECONDS + seconds)

    def _kill(self, session: Session, way: str) -> None:
        """Let one thing happen to the study, and wait for what must end because of it."""
        pid = session.process.pid
        if way in _NOTICES:
            call = os.killpg if way == "ctrl-c" else os.kill
            session.inject(lambda: call(pid, _NOTICES[way]))
        elif way == "kill-node":
            session.inject(lambda: _kill_all(self.processes()))
        else:
            found = pid if way == "kill-driver" else self._found(way)
            if found is None:
                return
            session.inject(lambda: _kill_all([found]))
        self.kills.append((session.fault_at, way))
        if way in _NOTICES:
            limit = self.killed.notice_seconds if self.killed.job_end else PATIENCE_SECONDS
            self._end(session, limit)
            code = self.codes[way][-1]
            if way == "sigusr1" and (code is None or code < 0 or code in _OWN_CODES):
                self.faults.append(f"exit code {code} after SIGUSR1")
        elif way in ("kill-driver", "kill-node", "kill-raylet"):
            self._end(session, is_killed=way != "kill-raylet")

    def _found(self, way: str) -> int | None:
        """Id of the process that is to be killed."""
        if way in _OF_RAY:
            return self.process(_OF_RAY[way])
        if way in _RANKS:
            pids = {
                line["pid"] for line in self._steps(self.starts[-1]) if _RANKS[way] == line["rank"]
            }
            return next((pid for pid in sorted(pids) if psutil.pid_exists(pid)), None)
        launchers = {}
        for pid in self.processes():
            with _gone():
                process = psutil.Process(pid)
                if _LAUNCHER in " ".join(process.cmdline()):
                    launchers[pid] = process.ppid()
        # what a launcher has forked has its command line
        return next((pid for pid, parent in launchers.items() if parent not in launchers), None)

    def _end(self, session: Session, seconds: float = PATIENCE_SECONDS, **how: bool) -> None:
        code = session.end(seconds, **how)
        self.codes[self.kills[-1][1] if self.kills else "nothing"].append(code)
        self.is_done = code in ENDS

    def finish(self) -> None:
        """Nothing: ``run`` ends when the study is done."""

    def check(self) -> None:
        """Hold the records against each other and against the diary, and the trainings against
        those of an undisturbed study.
        """
        if self.killed.is_comparison:
            self._check_comparison()
        elif self.is_done:
            super().check()
            stored = records.read_storage(self.name, self.folder, self.storage)
            self.disagreeing |= {
                f"{name} is {result['outcome']} with {len(result['evaluations'])} evaluations"
                for name, result in stored.results.items()
                if (result["outcome"], len(result["evaluations"])) != ("REACHED", EPOCHS)
            }
        steps = self._named(self._steps())
        repeated = repeats([line for line in steps if not line["rank"]], self.kills)
        num_steps = sum(not line["rank"] for line in steps)
        share = repeated.total() / max(num_steps, 1)
        jobs = self._jobs()
        self.measured |= {
            "repeated": round(share, 4),
            "repeated_by": {way: round(count / num_steps, 4) for way, count in repeated.items()},
            "kills": dict(Counter(way for _, way in self.kills)),
            "starts": len(self.starts),
            "exit_codes": {way: sorted(map(str, set(codes))) for way, codes in self.codes.items()},
            "steps": num_steps,
        }
        if share > MAX_REPEATED:
            self.faults.append(f"{share:.1%} of all steps were made before: {dict(repeated)}")
        self.disagreeing |= set(renamed(steps))
        undisturbed = self._undisturbed()
        self.disagreeing |= set(differing(steps, undisturbed))
        if self.killed.job_end:
            limit = _MAX_JOBS[self.killed.job_end]
            self.measured["jobs"] = dict(jobs)
            self.faults += [f"{run} took {n} jobs" for run, n in jobs.items() if n > limit]

    def _check_comparison(self) -> None:
        try:
            with (self.folder / "runs.csv").open(newline="") as file:
                rows = list(csv.DictReader(file))
        except OSError as error:
            rows = []
            self.lost.add(f"runs.csv: {error}")
        counts = Counter((row["side"], int(row["pair"])) for row in rows)
        wanted = {(side, pair) for side in "ab" for pair in range(NUM_SEEDS)}
        self.finished = len(counts)
        self.lost |= {f"runs.csv: {run}" for run in wanted - counts.keys()}
        self.doubled |= {f"runs.csv: {run} {n} times" for run, n in counts.items() if n > 1}
        self.disagreeing |= {
            f"runs.csv: {row['side']}-{row['pair']} is {row['outcome']}, {row['num_evaluations']}"
            for row in rows
            if (row["outcome"], row["num_evaluations"]) != ("REACHED", str(EPOCHS))
        }
        self.leftovers |= set(self._left_files())

    def _undisturbed(self) -> list[Line]:
        """The steps of the same study, which waits nowhere and is not killed."""
        study = KilledStudy(self.name, self.killed, is_undisturbed=True)
        try:
            code = study.start().end(10 * PATIENCE_SECONDS)
            if code not in ENDS:
                self.faults.append(f"the undisturbed study ended with {code}: {study.lines}")
            return study._named(study._steps())
        finally:
            study.close()


def missing_keys() -> list[str]:
    """The keys of states and notices that this version of autotune does not have."""
    known = "".join((REPOSITORY / path).read_text() for path in _SETTINGS)
    keys = ("checkpoint.every_minutes", "cluster.notice_seconds")
    return [key for key in keys if f"{key.partition('.')[2]}:" not in known]


def key_of(line: Line) -> tuple[Any, ...]:
    """What a line's training trains: a trial its values, another run also its seed."""
    is_trial = line["run"].startswith("trial-")
    return line["rate"], line["width"], None if is_trial else line["seed"]


def repeats(steps: Sequence[Line], kills: Sequence[tuple[float, str]]) -> Counter[str]:
    """Number of steps that had been made before, by the last kill before they were made again."""
    seen, times, counts = set(), [at for at, _ in kills], Counter[str]()
    for line in sorted(steps, key=lambda line: line["at"]):
        step = (*key_of(line), line["step"])
        if step in seen:
            index = bisect.bisect(times, line["at"])
            counts[kills[index - 1][1] if index else "nothing"] += 1
        seen.add(step)
    return counts


def renamed(steps: Iterable[Line]) -> Iterator[str]:
    """Tell which trainings had more than one name, seed or folder."""
    found: dict[tuple[Any, ...], dict[tuple[Any, ...], None]] = defaultdict(dict)
    for line in steps:
        found[key_of(line)][line["run"], line["seed"], line["folder"]] = None
    for key, names in found.items():
        if len(names) > 1:
            shown = ", ".join(f"{run} (seed {seed})" for run, seed, _ in names)
            yield f"{key} was {shown}" if len({n[:2] for n in names}) > 1 else f"{key} moved"


def differing(steps: Iterable[Line], others: Iterable[Line]) -> Iterator[str]:
    """Tell which trainings have a step that differs from what it was before, or in another study;
    and which trials that one does not have.
    """
    expected = {_what(line): line["digest"] for line in others}
    trials = {what[:3] for what in expected}
    told = set()
    for line in steps:
        what = _what(line)
        run = f"{line['run']} (rate {line['rate']:.3g}, seed {line['seed']})"
        if line["digest"] != expected.setdefault(what, line["digest"]) and run not in told:
            told.add(run)
            yield f"{run}: step {line['step']} differs"
        elif line["run"].startswith("trial-") and what[:3] not in trials and run not in told:
            told.add(run)
            yield f"{run}: no such trial in the undisturbed study"


def _what(line: Line) -> tuple[Any, ...]:
    return line["rate"], line["width"], line["seed"], line["rank"], line["step"]


def _kill_all(processes: Iterable[int]) -> None:
    for process in processes:
        with _gone():
            os.kill(process, signal.SIGKILL)


_gone = functools.partial(contextlib.suppress, ProcessLookupError, psutil.Error)


_KINDS = ("own", "function", "lightning", "hugging_face", "command")
KILLED = {
    **{
        f"killed-{kind}{'-2' * (ranks - 1)}".replace("_", "-"): Killed(kind=kind, num_ranks=ranks)
        for kind in _KINDS
        for ranks in (1, 2)
    },
    **{f"confirmed-{kind}": Killed(kind=kind, has_confirmation=True) for kind in _KINDS[:2]},
    **{f"compared-{kind}": Killed(kind=kind, is_comparison=True) for kind in _KINDS[:2]},
    **{
        f"jobs-{end}": Killed(kind="function", has_confirmation=True, job_end=end)
        for end in _MAX_JOBS
    },
}
"""The rows by name."""
