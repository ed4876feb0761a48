"""One whole study with real Ray: its files, its runs in MLflow, its export, and that running it
again changes nothing.
"""

import io
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from rich.console import Console

from autotune.config.compose import Composer
from autotune.export import export_command
from autotune.files import STUDY_FILES
from autotune.search.study import confirmations, read_study
from autotune.train import train_command
from autotune.training.checkpoint import read_weights
from autotune.tune_study import tune_command
from tests.support.studies import rows_of, runs_of

_NUM_TRIALS = 6
_SLOW_BASELINE = "optimizer.lr=0.002"
"""Three times as long to the target as the default: some trial of any search is faster, so that
there is a gain to confirm."""
_COMMAND = (
    "experiment=cnn_smoke",
    "study.name=whole",
    f"search.num_trials={_NUM_TRIALS}",
    "target.value=0.88",
    "runtime.num_threads=1",
    _SLOW_BASELINE,
)
_FIGURES = {f"{name}.html" for name in ("confirmation", "search", "curves", "phases")}
_RUN_STATUS = {
    "LOST": "KILLED",
    "OUT_OF_MEMORY": "FAILED",
    "DIVERGED": "FAILED",
    "ERRORED": "FAILED",
}


@dataclass(frozen=True)
class Whole:
    """A finished study and the folder it was started in."""

    working_folder: Path
    ended: subprocess.CompletedProcess[str]

    @property
    def folder(self) -> Path:
        return self.working_folder / "outputs/whole"

    @property
    def best(self) -> dict[str, Any]:
        return json.loads((self.folder / "best.json").read_text(), parse_constant=_refuse)

    @property
    def rows(self) -> list[dict[str, str]]:
        return rows_of(self.folder / "trials.csv")

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.working_folder}/mlflow.db")

    @property
    def runs(self) -> list[Any]:
        return runs_of(self.working_folder)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.fixture(scope="module")
def study(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    return Whole(folder, commands.run(*_COMMAND, folder=folder))


@pytest.fixture(scope="module")
def exported(study: Whole) -> Iterator[str]:
    """The folder of one's own that the best configuration was exported to, as the experiment
    ``found``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(study.working_folder)
        assert export_command(["study=whole", "as=found", "--config-dir", "my_conf"]) == 0
        yield "my_conf"


def test_a_study_ends_with_what_it_found_and_what_to_type_next(study: Whole) -> None:
    assert study.ended.returncode == 0, study.ended.stderr
    assert study.ended.stderr == ""
    said = study.ended.stdout
    assert re.search(r"baseline +[\d.]+ s \(mean of 2 runs\)", said)
    assert "python -m autotune export study=whole as=cnn_smoke_best --config-dir my_conf" in said
    assert f"search.num_trials={2 * _NUM_TRIALS}" in said


def test_its_folder_holds_every_file(study: Whole) -> None:
    files = {
        str(path.relative_to(study.folder)) for path in study.folder.rglob("*") if path.is_file()
    } - {".lock"}
    best = json.loads((study.folder / "best.json").read_text())["trial"]
    recording = {"study.yaml", "space.yaml", "trials.parquet", "curves.parquet"}
    assert files == {
        "best.yaml",
        "best.json",
        "best.safetensors",
        f".weights/trial-{best}.safetensors",
        "study.log",
        "trials.csv",
        "trace.csv",
        "autotune.log",
        "machine.yaml",
        "summary.json",
        "report.html",
        *(f"recording/{name}" for name in recording),
        *(f"figures/{name}" for name in _FIGURES),
    }
    assert {path.name for path in study.folder.iterdir()} <= {file.name for file in STUDY_FILES}
    assert {path.name for path in study.working_folder.iterdir()} <= {
        "outputs",
        "mlflow.db",
        "mlruns",
        "my_conf",
    }
    for name in _FIGURES:
        assert "Plotly.newPlot" in (study.folder / "figures" / name).read_text()


def test_best_json_adds_up(study: Whole) -> None:
    best = study.best
    assert (best["study"], best["experiment"]) == ("whole", "cnn_smoke")
    assert best["target"] == {
        "metric": "accuracy",
        "value": 0.88,
        "mode": "max",
        "max_train_seconds": 5.0,
    }
    for arm in (best["baseline"], best["best"]):
        assert arm["num_runs"] == arm["num_reached"] == len(arm["times_seconds"]) == 2
        assert all(seconds > 0 for seconds in arm["times_seconds"])
    speed_up = best["speed_up"]
    assert speed_up["ratio"] == pytest.approx(
        fmean(best["baseline"]["times_seconds"]) / fmean(best["best"]["times_seconds"])
    )
    assert speed_up["low"] <= speed_up["ratio"] <= speed_up["high"]
    assert sum(best["outcomes"].values()) == _NUM_TRIALS
    assert best["train_seconds_spent"] == pytest.approx(
        sum(float(row["train_seconds"]) for row in study.rows)
    )


def test_trials_csv_has_a_row_a_trial(study: Whole) -> None:
    rows = study.rows
    assert next(iter(rows[0])) == "trial"
    assert sorted(int(row["trial"]) for row in rows) == list(range(_NUM_TRIALS))
    assert Counter(row["outcome"] for row in rows) == Counter(study.best["outcomes"])
    for row in rows:
        assert (
            (row["outcome"] == "REACHED")
            == (row["time_to_target_seconds"] != "")
            == (row["score"] != "")
        )


def test_mlflow_has_the_study_and_its_runs(study: Whole) -> None:
    assert "RUNNING" not in {run.info.status for run in study.runs}
    [parent] = [run for run in study.runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in study.runs if "mlflow.parentRunId" in run.data.tags]
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["num_trials"] == _NUM_TRIALS
    assert len(parent.outputs.model_outputs) == 1
    phases = Counter(run.data.tags["autotune.phase"] for run in children)
    assert phases == {"search": _NUM_TRIALS, "confirm": 4}
    outcomes = {row["trial"]: row["outcome"] for row in study.rows}
    for run in children:
        outcome = run.data.tags["autotune.outcome"]
        assert run.info.status == _RUN_STATUS.get(outcome, "FINISHED")
        assert (
            run.data.tags["autotune.phase"] == "confirm"
            or outcomes[run.data.tags["autotune.trial"]] == outcome
        )
        assert {each.path for each in study.client.list_artifacts(run.info.run_id)} >= {
            "config.yaml",
            "overrides.yaml",
            "fingerprint.json",
        }
    assert {each.path for each in study.client.list_artifacts(parent.info.run_id)} >= {
        "best.yaml",
        "best.json",
        "trials.csv",
        "recording",
    }


def test_confirmation_takes_fresh_seeds_and_the_arms_in_turns(study: Whole) -> None:
    runs = confirmations(read_study("whole", study.folder))
    search_seeds = {int(row["seed"]) for row in study.rows}
    assert not {run.seed for run in runs.values()} & search_seeds
    ordered = sorted(runs, key=lambda arm_and_index: runs[arm_and_index].started_at)
    assert [index for _, index in ordered] == [0, 0, 1, 1]
    assert ordered[0][0] != ordered[2][0]
    for index in range(2):
        assert len({run.seed for (_, each), run in runs.items() if each == index}) == 1
    assert all(run.test_metric is not None for run in runs.values())


def test_the_export_composes_to_the_trials_own_configuration(study: Whole, exported: str) -> None:
    wanted = {"autotune.trial": str(study.best["trial"]), "autotune.phase": "search"}
    [run] = [run for run in study.runs if wanted.items() <= run.data.tags.items()]
    path = study.client.download_artifacts(
        run.info.run_id, "config.yaml", str(study.working_folder / "my_conf")
    )
    trained = yaml.safe_load(Path(path).read_text())
    composed = Composer(["experiment=found"], [exported]).compose().trial.as_dict()
    assert json.loads(json.dumps(composed)) == trained


def test_the_export_has_the_weights_of_a_confirmation_run_that_reached_the_target(
    study: Whole, exported: str
) -> None:
    _, metadata = read_weights(Path(exported) / "experiment" / "found.safetensors")
    best = json.loads((study.folder / "best.json").read_text())
    assert metadata["origin"]["study"] == "whole"
    assert re.fullmatch(rf"confirm-{best['trial']}-\d", metadata["origin"]["run"])
    assert metadata["evaluation"]["metric"] >= best["target"]["value"]


def test_the_export_trains_to_the_target(exported: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_command(["experiment=found", "--config-dir", exported]) == 0
    assert "outcome REACHED" in capsys.readouterr().out


def test_an_export_does_not_replace_another(study: Whole, exported: str, commands: Any) -> None:
    path = Path(exported) / "experiment/found.yaml"
    before = path.read_text()
    assert export_command(["study=whole", "as=found", "--config-dir", exported]) == 0, (
        "the same again is no conflict"
    )
    path.write_text("# mine\n")
    refused = commands.run(
        "export",
        "study=whole",
        "as=found",
        "--config-dir",
        exported,
        folder=study.working_folder,
    )
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert path.read_text() == "# mine\n"
    assert (
        export_command(["study=whole", "as=found", "--config-dir", exported, "overwrite=true"]) == 0
    )
    assert path.read_text() == before


def test_the_same_command_again_finds_the_same_and_runs_nothing(
    study: Whole, commands: Any
) -> None:
    before, rows, runs = (
        study.best,
        study.rows,
        {run.info.run_id: run.info.status for run in study.runs},
    )
    said = commands.succeed(*_COMMAND, folder=study.working_folder)
    assert re.search(r"^  report ", said, re.MULTILINE)
    assert "trial 0  " not in said, "no trial ran"
    assert study.best == before
    assert study.rows == rows
    assert {run.info.run_id: run.info.status for run in study.runs} == runs


@pytest.mark.slow
def test_every_file_of_a_finished_study_is_made_again_from_its_storage(
    study: Whole, tmp_path: Path
) -> None:
    shutil.copytree(study.folder, tmp_path / "whole")
    written = [
        Path(name)
        for name in ("trials.csv", "best.yaml", "recording/study.yaml", "recording/curves.parquet")
    ]
    for path in (*written, Path("best.json"), Path("summary.json")):
        (tmp_path / "whole" / path).unlink()
    assert (
        tune_command(
            [*_COMMAND, f"study.folder={tmp_path}", "tracking=none"],
            console=Console(file=io.StringIO()),
        )
        == 0
    )
    for path in written:
        before, after = (
            (folder / path).read_bytes() for folder in (study.folder, tmp_path / "whole")
        )
        assert after == before, path
    best = json.loads((tmp_path / "whole" / "best.json").read_text())
    assert [best[key] for key in ("trial", "baseline", "best", "speed_up")] == [
        study.best[key] for key in ("trial", "baseline", "best", "speed_up")
    ]
