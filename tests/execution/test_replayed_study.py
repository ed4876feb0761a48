"""A study's own recording, replayed, gives the decisions that the study took."""

from pathlib import Path
from typing import Any

import pytest

from autotune.config.command_line import run_command
from benchmarks.replay.__main__ import replay_command
from tests.support.studies import rows_of

pytestmark = pytest.mark.slow

_SEARCH = ("search.num_trials=12", "stopping=cap")
_STUDY = (
    "experiment=cnn_smoke",
    "study.seed=5",
    "tracking=none",
    "confirm=none",
    "target.value=0.9",
    "evaluate_every_samples=1000",
    "epochs=10",
    "optimizer.lr=interval(1e-3,1)",
    "batch_size=choice(32,64,128)",
    "cluster.num_cpus=1",
    "cluster.cpus_per_worker=1",
)


def _decisions(path: Path) -> list[tuple[str, ...]]:
    return [
        tuple(row[name] for name in ("trial", "from_train_seconds", "train_seconds", "outcome"))
        for row in rows_of(path)
    ]


@pytest.mark.parametrize("search", ["freeze_thaw", "tpe"])
def test_the_same_decisions(
    search: str, commands: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.succeed(*_STUDY, *_SEARCH, f"search={search}", "study.name=live", folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    recorded = [
        "recording=outputs/live/recording",
        f"search={search}",
        "seed=5",
        "within=null",
        "repeats=any",
        *_SEARCH,
    ]
    assert run_command(replay_command, recorded) == 0
    live, replayed = (
        _decisions(tmp_path / "outputs/live/trace.csv"),
        _decisions(tmp_path / "trace.csv"),
    )
    assert len({trial for trial, *_ in live}) == 12
    assert any(outcome == "PAUSED" for *_, outcome in live) == (search == "freeze_thaw")
    assert [(trial, outcome) for trial, *_, outcome in replayed] == [
        (trial, outcome) for trial, *_, outcome in live
    ]
    assert [(float(begun), float(stood)) for _, begun, stood, _ in replayed] == [
        pytest.approx((float(begun), float(stood)), rel=1e-12) for _, begun, stood, _ in live
    ]
