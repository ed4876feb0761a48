"""A machine of eight GPUs, made up: which of them trials, the rounds of a race and the pairs of its
claim are trained on, and when.

Ray is told of eight GPUs, and the driver that this machine has them; the trainings sleep, and note
the devices that they may use.
"""

import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.config.command_line import EXIT_INTERRUPTED
from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.search.study import confirmations, read_study
from tests.execution.conftest import Commands
from tests.support.patience import PATIENCE_SECONDS, wait_until

NUM_GPUS = 8
BASELINE = 0

_TRAININGS = """
import json, os, time
from pathlib import Path

def train(report, seed, lr, seconds, notes):
    began = time.time()
    Path(notes, f"{seed}.began").touch()
    # workers start one after another where CPUs are few
    while len([*Path(notes).glob("*.began")]) < 8 and time.time() < began + 60:
        time.sleep(0.1)
    time.sleep(seconds * (1 + lr))
    if len([*Path(notes).glob("*.json")]) > 8 + 7 + 7 and Path(notes, "..", "kill").exists():
        Path(notes, "..", "kill").unlink(missing_ok=True)
        os.kill(os.getpid(), 9)
    seen = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
    note = {"lr": lr, "seed": seed, "seen": seen, "began": began, "ended": time.time()}
    Path(notes, f"{os.getpid()}-{seed}.json").write_text(json.dumps(note))
    report(metric=0.95)
"""

_EXPERIMENT = """# @package _global_
training: {_target_: noting.train, notes: '???', lr: 0.9, seconds: 0.5}
target: {metric: accuracy, value: 0.9, max_train_seconds: 100}
search_space:
  - training.lr: interval(0.01,0.9)
"""

_DRIVER = f"""
import sys
from autotune.config.command_line import run_command
from autotune.execution import cluster
from autotune.training.capabilities import Capabilities
from autotune.tune_study import tune_command

fake = Capabilities(
    num_cpus={NUM_GPUS}, num_gpus={NUM_GPUS}, gpu_name="made up", compute_capability=(9, 0),
    has_compiler=True, has_torchao=False
)
cluster.capabilities_of = lambda config, launcher: fake
sys.exit(run_command(tune_command, sys.argv[1:]))
"""


@dataclass(frozen=True)
class Note:
    """What a training noted."""

    lr: float
    seed: int
    seen: Mapping[str, str]
    began: float
    ended: float


def most_at_once(notes: Iterable[Note]) -> int:
    """The most trainings that were under way at the same time."""
    ends = sorted(end for note in notes for end in ((note.began, 1), (note.ended, -1)))
    return max(itertools.accumulate(step for _, step in ends))


@dataclass(frozen=True)
class Study:
    """What a study left: its trainings' notes and its confirmation runs."""

    notes: Sequence[Note]
    runs: Mapping[tuple[int, int], TrialResult]

    def device(self, note: Note) -> str:
        return note.seen["CUDA_VISIBLE_DEVICES"]

    @property
    def searched(self) -> list[Note]:
        seeds = {run.seed for run in self.runs.values()}
        return [note for note in self.notes if note.seed not in seeds]

    @property
    def rounds(self) -> list[dict[int, Note]]:
        """For each round of the race, the note of each arm."""
        numbers = sorted({number for _, number in self.runs})
        made = {
            number: {arm: run for (arm, each), run in self.runs.items() if each == number}
            for number in numbers
        }
        of_run = {(note.seed, note.lr): note for note in self.notes}
        return [
            {arm: of_run[run.seed, run.values["training.lr"]] for arm, run in arms.items()}
            for arms in made.values()
        ]


@dataclass(frozen=True)
class Machine:
    """Runs autotune's commands in a folder of their own on the machine of eight GPUs."""

    commands: Commands
    folder: Path

    @property
    def arguments(self) -> list[str]:
        size = [
            f"cluster.num_cpus={NUM_GPUS}",
            f"cluster.num_gpus={NUM_GPUS}",
            f"training.notes={self.folder}/notes",
        ]
        return [
            "experiment=noting",
            "--config-dir",
            "conf",
            "allowed_targets=[noting]",
            "tracking=none",
            "study.name=n",
            *size,
        ]

    def run(self, *arguments: str) -> None:
        ran = self.commands.python("driver.py", *self.arguments, *arguments, folder=self.folder)
        assert ran.returncode == 0, ran.stderr

    @property
    def notes(self) -> list[Note]:
        return [
            Note(**json.loads(path.read_text())) for path in (self.folder / "notes").glob("*.json")
        ]

    def study(self) -> Study:
        return Study(self.notes, confirmations(read_study("n", self.folder / "outputs" / "n")))


@pytest.fixture
def machine(commands: Commands, tmp_path: Path) -> Machine:
    for name, text in (
        ("noting.py", _TRAININGS),
        ("driver.py", _DRIVER),
        ("conf/experiment/noting.yaml", _EXPERIMENT),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "notes").mkdir()
    return Machine(commands, tmp_path)


_SEARCH = ["search=random", "search.num_trials=8"]
_RACE = [
    "confirm.budget_fraction=null",
    "confirm.num_candidates=7",
    "confirm.num_seeds=6",
    "confirm.max_runs=32",
]


@pytest.mark.slow
def test_trials_rounds_and_pairs_share_eight_gpus_and_no_gpu_has_two(machine: Machine) -> None:
    machine.run(*_SEARCH, *_RACE, "training.seconds=2")  # a busy machine starts all meanwhile
    study = machine.study()
    check_none_share(study)
    assert (
        most_at_once(study.searched)
        == len({study.device(note) for note in study.searched})
        == NUM_GPUS
    )
    pairs = [arms for arms in study.rounds if BASELINE in arms]
    first, *_ = [arms for arms in study.rounds if BASELINE not in arms]
    assert most_at_once(first.values()) == len(first) == 7
    assert [(len(arms), len({study.device(note) for note in arms.values()})) for arms in pairs] == [
        (2, 1)
    ] * 6
    assert most_at_once(note for arms in pairs for note in arms.values()) == 6


def check_none_share(study: Study) -> None:
    by_device = {
        name: [note for note in study.notes if study.device(note) == name]
        for name in map(study.device, study.notes)
    }
    assert {*by_device} == {str(index) for index in range(NUM_GPUS)}
    assert [most_at_once(notes) for notes in by_device.values()] == [1] * NUM_GPUS


@pytest.mark.slow
def test_a_killed_run_is_made_again_on_its_gpu_and_an_interrupted_race_makes_none_twice(
    machine: Machine,
) -> None:
    study = [*machine.arguments, *_SEARCH, *_RACE, "training.seconds=2"]
    (machine.folder / "kill").touch()
    process = machine.commands.start(*study, module="driver", folder=machine.folder)
    # trials, a round and some of the next
    wait_until(lambda: len(machine.notes) > 8 + 7 + 2, process=process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == EXIT_INTERRUPTED
    num_before = len(machine.study().runs)
    machine.run(*_SEARCH, *_RACE, "training.seconds=2")
    left = machine.study()
    check_none_share(left)
    assert not (machine.folder / "kill").exists()
    assert 7 <= num_before < len(left.runs)
    assert {run.outcome for run in left.runs.values()} == {Outcome.REACHED}
    noted = Counter((note.seed, note.lr) for note in left.notes)
    assert {noted[run.seed, run.values["training.lr"]] for run in left.runs.values()} == {1}
    pairs = [arms for arms in left.rounds if BASELINE in arms]
    assert [(len(arms), len({left.device(note) for note in arms.values()})) for arms in pairs] == [
        (2, 1)
    ] * 6
