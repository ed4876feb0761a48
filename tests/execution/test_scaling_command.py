"""``python -m autotune scale``: what it refuses, and a whole scaling with real Ray."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from autotune.scale import scale_command
from tests.execution.conftest import Refusal

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["workers=2"], "workers: found '2', accepted is a list of at least two numbers of workers, as in workers=[1,2,4]"),
        (["workers=[1,x]"], "workers: found '[1,x]', accepted is a list"),
        (["workers=[0,1]"], "workers: found '[0,1]', accepted is a list"),
        (["workers=[2,2]"], "workers: found [2, 2], accepted are at least two different numbers"),
        (["workers=[1,2]", "workers=[1,4]"], "workers: found twice"),
        (["mode=strang"], "mode: found 'strang', accepted is one of strong, weak, both"),
        (["num_seeds=0"], "num_seeds: found '0', accepted is a whole number from 1"),
        (["workers=[1,1000]", "batch_size=1000"], "strong-1000: cannot run here: parallelism.num_workers=1000 needs as many CPUs"),
        (["workers=[1,2]", "batch_size=33"], "batch_size: found 33, accepted with 2 workers that share a batch is a multiple of that"),
        (["workers=[2,3]", "batch_size=33"], "workers: 3 has no whole batch beside 33 on 2"),
        (["worker=[1,2]"], "worker: no such key (did you mean workers=...?)"),
        (["optimizer.lr=0.1,0.2"], "optimizer.lr"),
    ],
)
def test_bad_input_is_one_line(refusal: Refusal, arguments: list[str], said: str) -> None:
    assert said in refusal("experiment=cnn_smoke", *arguments, command=scale_command)


def test_a_dry_run_names_the_runs_and_trains_nothing(commands: Any, tmp_path: Path) -> None:
    command = ("experiment=cnn_smoke", "workers=[1,2]", "parallelism=tensor", "model=mlp", "mode=strong", "dry_run=true")
    ended = commands.run(*command, folder=tmp_path, module="autotune.scale")
    assert ended.returncode == 0, ended.stderr
    assert "strong-2" in ended.stdout
    assert "parallelism=tensor" in ended.stdout
    assert "alone-" not in ended.stdout, "workers that share layers have the whole batch, as one worker has"
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_scaling_ends_with_tables_files_a_figure_and_runs(commands: Any, tmp_path: Path) -> None:
    command = ("experiment=cnn_smoke", "workers=[1,2]", "num_seeds=2", "target.value=0.85", "study.name=s", "cluster.num_cpus=2")
    ended = commands.run(*command, folder=tmp_path, module="autotune.scale")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "strong scaling" in ended.stdout
    assert "weak scaling" in ended.stdout
    found = json.loads((tmp_path / "outputs/s/scaling.json").read_text())
    assert [(each["mode"], each["num_workers"]) for each in found["points"]] == [("strong", 1), ("strong", 2), ("weak", 1), ("weak", 2)]
    one, two, _, weak = found["points"]
    assert (two["batch_size"], weak["batch_size"]) == (one["batch_size"], 2 * one["batch_size"])
    assert all(each["num_reached"] == 2 for each in found["points"])
    assert all(0 < each["computation_share"] <= 1 for each in found["points"])
    assert two["device_seconds"] == pytest.approx(2 * two["time_to_target_seconds"])
    assert (tmp_path / "outputs/s/figures/scaling.html").stat().st_size > 5_000
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert sum(run.data.tags["autotune.phase"] == "scale" for run in runs) == 8
    (parent,) = [run for run in runs if run.data.tags["autotune.phase"] == "scaling"]
    assert parent.data.metrics["strong_2_time_to_target_seconds"] == pytest.approx(two["time_to_target_seconds"])
