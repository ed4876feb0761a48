"""Each trial of a user's function has a process to itself, and finds nothing of another."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from autotune.config.schema import TrialConfig
from autotune.execution.process_group import ProcessGroup
from autotune.execution.task import WorkerReport
from autotune.measurement import Target
from autotune.outcome import Outcome
from tests.support.records import make_trial_task

_LEAVING = """
import json, os, random
import torch
import autotune

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
seen, dice = [], random.Random(0)

def train(folder):
    found = {
        "model": model.weight.item(),
        "list": len(seen),
        "variable": os.environ.get("LEFT_BEHIND"),
        "dtype": str(torch.get_default_dtype()),
        "random": dice.random(),
        "folder": os.getcwd(),
    }
    begun = autotune.checkpoint().load().get("epoch", 0)
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps({"found": found, "process": os.getpid(), "epoch": begun}) + "\\n")
    torch.nn.init.ones_(model.weight)
    seen.append(bytearray(1 << 20))
    os.environ["LEFT_BEHIND"] = "yes"
    torch.set_default_dtype(torch.float64)
    os.chdir(folder)
    for epoch in range(begun, 3):
        autotune.checkpoint().save({"epoch": epoch + 1})
        autotune.report(epoch / 100, epoch=epoch + 1)
"""


def test_each_trial_has_a_process_to_itself_and_finds_nothing_of_another(
    trial_config: Callable[..., TrialConfig], tmp_path: Path
) -> None:
    (tmp_path / "leaving.py").write_text(_LEAVING)
    (tmp_path / "paused").mkdir()
    config = trial_config(
        training={"_target_": "leaving.train", "folder": str(tmp_path / "paused")},
        target=Target(metric="score", value=0.5, mode="max", max_train_seconds=1e9),
        allowed_targets=("leaving",),
    )

    def begin(name: str, **fields: Any) -> None:
        state = str(tmp_path / "paused" / name)
        group.begin(make_trial_task(config, tmp_path, name=name, state_folder=state, **fields))

    def report() -> WorkerReport:
        report = group.next_report()
        assert report is not None
        return report

    def epochs_to_the_end() -> list[float]:
        reports = [report()]
        while reports[-1].outcome is None:
            reports.append(report())
        assert reports[-1].outcome is Outcome.MISSED
        return [each.evaluation.epoch for each in reports if each.evaluation is not None]

    with closing(ProcessGroup()) as group:
        begin("first")
        assert epochs_to_the_end() == [1, 2, 3]
        begin("second")
        assert report().can_pause
        group.keep()
        group.end()
        begin("third")
        assert epochs_to_the_end() == [1, 2, 3]
        begin("second", is_resumed=True)
        assert epochs_to_the_end() == [2, 3]
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [call["found"] for call in calls] == [calls[0]["found"]] * 4
    assert [call["epoch"] for call in calls] == [0, 0, 0, 1], "the resumed one has one more call"
    assert len({call["process"] for call in calls}) == 4
