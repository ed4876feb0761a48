"""A machine of eight GPUs, made up: which of them trials, the rounds of a race and the pairs of its
claim are trained on, and when.

Ray is told of eight GPUs, and the driver that this machine has them; the trainings sleep, and note
the devices that they may use.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from autotune.search.study import confirmations, read_study
from tests.execution.conftest import Commands

NUM_GPUS = 8
BASELINE = 0

_TRAININGS = """
import json, os, time
from pathlib import Path
from typing import Any

def train(report, seed, lr, seconds, notes):
    began = time.time()
    Path(notes, f"{seed}.began").touch()
    # workers start one after another where CPUs are few
    while len([*Path(notes).glob("*.began")]) < 8 and time.time() < began + 60:
        time.sleep(0.1)
    time.sleep(seconds * (1 + lr))
    device = os.environ["CUDA_VISIBLE_DEVICES"]
    note = {"lr": lr, "seed": seed, "device": device, "began": began, "ended": time.time()}
    Path(notes, f"{os.getpid()}-{seed}.json").write_text(json.dumps(note))
    report(metric=0.95)
"""

_EXPERIMENT = """# @package _global_
training: {_target_: noting.train, notes: '???', lr: 0.9, seconds: 0.5}
target: {metric: accuracy, value: 0.9, max_train_seconds: 100}
search_space:
  - training.lr: interval(0.01,0.9)
"""

_FAKE = f"""
import sys
from autotune.execution import cluster
from autotune.training.capabilities import Capabilities

fake = Capabilities(
    num_cpus={NUM_GPUS}, num_gpus={NUM_GPUS}, gpu_name="made up", compute_capability=(9, 0),
    has_compiler=True, has_torchao=False
)
cluster.capabilities_of = lambda config, launcher: fake
"""
_DRIVER = f"""{_FAKE}
from autotune.config.command_line import run_command
from autotune import tune_study
sys.exit(run_command(tune_study.tune_command, sys.argv[1:]))
"""


def most_at_once(notes: Iterable[dict[str, Any]]) -> int:
    """The most trainings that were under way at the same time."""
    ends = sorted(end for note in notes for end in ((note["began"], 1), (note["ended"], -1)))
    return max(itertools.accumulate(step for _, step in ends))


def devices(notes: Iterable[dict[str, Any]]) -> set[str]:
    return {note["device"] for note in notes}


@pytest.mark.slow
def test_trials_rounds_and_pairs_share_eight_gpus_and_no_gpu_has_two(
    commands: Commands, tmp_path: Path
) -> None:
    for name, text in (
        ("noting.py", _TRAININGS),
        ("driver.py", _DRIVER),
        ("conf/experiment/noting.yaml", _EXPERIMENT),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "notes").mkdir()
    arguments = [
        "experiment=noting",
        "--config-dir",
        "conf",
        "allowed_targets=[noting]",
        "tracking=none",
        "study.name=n",
        f"cluster.num_cpus={NUM_GPUS}",
        f"cluster.num_gpus={NUM_GPUS}",
        f"training.notes={tmp_path}/notes",
        "training.seconds=2",  # a busy machine starts all meanwhile
        "search=random",
        "search.num_trials=8",
        "confirm.budget_fraction=null",
        "confirm.num_candidates=7",
        "confirm.num_seeds=6",
        "confirm.max_runs=32",
    ]
    ran = commands.python("driver.py", *arguments, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr

    notes = [json.loads(path.read_text()) for path in (tmp_path / "notes").glob("*.json")]
    assert devices(notes) == {str(index) for index in range(NUM_GPUS)}
    for device in devices(notes):
        assert most_at_once(note for note in notes if note["device"] == device) == 1

    runs = confirmations(read_study("n", tmp_path / "outputs/n"))
    seeds = {run.seed for run in runs.values()}
    searched = [note for note in notes if note["seed"] not in seeds]
    assert most_at_once(searched) == len(devices(searched)) == NUM_GPUS

    of_run = {(note["seed"], note["lr"]): note for note in notes}
    rounds: dict[int, dict[int, Any]] = defaultdict(dict)
    for (trial, number), run in sorted(runs.items()):
        rounds[number][trial] = of_run[run.seed, run.values["training.lr"]]
    pairs = [by_trial.values() for by_trial in rounds.values() if BASELINE in by_trial]
    first = next(rounds[number] for number in sorted(rounds) if BASELINE not in rounds[number])
    assert most_at_once(first.values()) == len(first) == 7
    assert [(len(pair), len(devices(pair))) for pair in pairs] == [(2, 1)] * 6
    assert most_at_once(note for pair in pairs for note in pair) == 6


_FUNCTION = """
import json, os, time
from pathlib import Path
import autotune

def train(lr, devices):
    began = time.time()
    time.sleep(3 + lr)
    if os.environ.get("RANK", "0") == "0":
        note = {
            "device": os.environ.get("CUDA_VISIBLE_DEVICES"), "devices": devices, "began": began,
            "ended": time.time(), "size": os.environ.get("WORLD_SIZE"),
        }
        Path("notes", autotune.trial().name + ".json").write_text(json.dumps(note))
    autotune.report(0.95)

settings = {
    "target": autotune.target("accuracy", at_least=0.9, max_seconds=100), "search": "random",
    "baseline": {"lr": 0.9}, "name": "n", "seed": 2, "tracking": "none",
    "confirm": {"num_candidates": 1, "max_runs": 8},
}
"""


def noted(tmp_path: Path, runs: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (tmp_path / "notes").glob(f"{runs}-*.json")]


@pytest.mark.slow
def test_trials_of_one_and_of_two_devices_go_side_by_side_and_share_none(
    commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    call = """
if __name__ == "__main__":
    space = {"lr": autotune.uniform(0, 1), "devices": [1, 2]}
    cluster = {"num_cpus": 4}
    autotune.tune(train, space=space, trials=12, cluster=cluster, **settings)
"""
    (tmp_path / "tune.py").write_text(_FUNCTION + call)
    ran = commands.python("tune.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    notes = noted(tmp_path, "trial")
    assert len(notes) == 12
    assert {(note["devices"], note["size"]) for note in notes} == {(1, "1"), (2, "2")}
    of_devices = [note for note in notes for _ in range(note["devices"])]
    assert most_at_once(of_devices) == 4
    one, two = ([note for note in notes if note["devices"] == number] for number in (1, 2))
    assert any(most_at_once([first, other]) == 2 for first in one for other in two)


@pytest.mark.slow
def test_trials_share_a_gpu_where_they_are_to_and_confirmation_runs_do_not(
    commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    call = """
if __name__ == "__main__":
    space = {"lr": autotune.uniform(0, 1)}
    cluster = {"num_cpus": 8, "num_gpus": 2}
    result = autotune.tune(train, space=space, trials=8, cluster=cluster, devices=0.5, **settings)
    print(*result.trials_dataframe()["trials_per_gpu"])
"""
    (tmp_path / "tune.py").write_text(_FAKE + _FUNCTION + call)
    ran = commands.python("tune.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("2 2 2 2 2 2 2 2\n")
    assert "shared by 2 trials (8)" in ran.stdout
    for runs, num_sharing in (("trial", 2), ("confirm", 1)):
        notes = noted(tmp_path, runs)
        assert devices(notes) == {"0", "1"}
        for device in devices(notes):
            of_device = (note for note in notes if note["device"] == device)
            assert most_at_once(of_device) == num_sharing
