"""The command of a study that is done, run again: MLflow gets what it lacks of the study, once, and
nothing is trained.
"""

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

_STUDY = ("experiment=cnn_smoke", "study.name=pushed", "confirm=none", "search.num_trials=6")


@pytest.mark.slow
def test_what_mlflow_lacks_of_a_study_is_written_once(commands: Any, tmp_path: Path) -> None:
    searched = commands.run(*_STUDY, "tracking=none", folder=tmp_path)
    assert searched.returncode in (0, 3), searched.stderr
    trials = (tmp_path / "outputs/pushed/trials.csv").read_text()
    for _ in range(2):
        again = commands.run(*_STUDY, folder=tmp_path)
        assert again.returncode == searched.returncode, again.stderr
        client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        runs = client.search_runs([client.get_experiment_by_name("cnn_smoke").experiment_id])
        names = sorted(run.data.tags.get("autotune.run", "study") for run in runs)
        assert names == ["study", *(f"trial-{number}" for number in range(6))]
        assert not [run.info.status for run in runs if run.info.status == "RUNNING"]
    assert (tmp_path / "outputs/pushed/trials.csv").read_text() == trials, "nothing was trained"
