"""``autotune record --push``: MLflow gets what it lacks of a study, once, and nothing is
trained.
"""

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from autotune.__main__ import autotune_command

_STUDY = ("experiment=cnn_smoke", "study.name=pushed", "confirm=none", "search.num_trials=6")


def test_a_study_that_is_not_there_is_one_line(refusal: Any) -> None:
    said = refusal("record", "--push", *_STUDY, command=autotune_command)
    assert said == "study.name=pushed: no such study in outputs"


def test_without_push_nothing_is_recorded(refusal: Any) -> None:
    said = refusal("record", *_STUDY, command=autotune_command)
    assert said == (
        "autotune record: --push is missing; use autotune record --push experiment=NAME"
        " study.name=NAME"
    )


@pytest.mark.slow
def test_what_mlflow_lacks_of_a_study_is_written_once(commands: Any, tmp_path: Path) -> None:
    searched = commands.run(*_STUDY, "tracking=none", folder=tmp_path)
    assert searched.returncode in (0, 3), searched.stderr
    trials = (tmp_path / "outputs/pushed/trials.csv").read_text()
    for _ in range(2):
        said = commands.succeed("record", "--push", *_STUDY, folder=tmp_path)
        assert "MLflow holds all runs of study pushed that have ended" in said
        client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        runs = client.search_runs([client.get_experiment_by_name("cnn_smoke").experiment_id])
        names = sorted(run.data.tags.get("autotune.run", "study") for run in runs)
        assert names == ["study", *(f"trial-{number}" for number in range(6))]
        assert not [run.info.status for run in runs if run.info.status == "RUNNING"]
    assert (tmp_path / "outputs/pushed/trials.csv").read_text() == trials, "nothing was trained"
    commands.succeed("record", "--push", *_STUDY[:-1], "search.num_trials=12", folder=tmp_path)
    assert (tmp_path / "outputs/pushed/trials.csv").read_text() == trials, (
        "a study with trials left is not gone on with"
    )
