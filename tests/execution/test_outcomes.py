"""Models that run out of memory, diverge, hang, crash or are wrong: how their trials end, and
that the study goes on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.search.study import finished_results, read_study
from tests.support.patience import exit_code
from tests.support.studies import rows_of, runs_of

pytestmark = pytest.mark.slow

_MODEL = '''
import math, os, pathlib, time
import torch


class Odd(torch.nn.Module):
    """Does what its mode says at the third step of its training."""

    def __init__(self, mode, input_shape, num_classes):
        super().__init__()
        self.mode, self.num_steps = mode, 0
        self.layer = torch.nn.Linear(math.prod(input_shape), num_classes)

    def forward(self, inputs):
        outputs = self.layer(inputs.flatten(1))
        if not torch.is_grad_enabled():
            return outputs
        self.num_steps += 1
        if self.num_steps != 3:
            return outputs
        if self.mode == "out_of_memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if self.mode == "hangs":
            wait_for_what_never_comes()
        if self.mode == "aborts":
            os.abort()
        if self.mode == "bug":
            raise KeyError("embedding")
        if self.mode == "diverges":
            with torch.no_grad():
                self.layer.weight.fill_(math.nan)
        return outputs


def wait_for_what_never_comes():
    time.sleep(600)
'''
_MODES = ("works", "out_of_memory", "diverges", "hangs", "aborts")
_SEED = 76
"""Of a study whose first eight trials have every mode, a working one last."""
_DEADLINE_SECONDS = 15


@dataclass(frozen=True)
class Study:
    folder: Path
    code: int

    @property
    def err(self) -> str:
        return (self.folder / "err.txt").read_text()

    @property
    def runs(self) -> list[Any]:
        return runs_of(self.folder)


def _write_user_files(folder: Path) -> None:
    (folder / "odd_models.py").write_text(_MODEL)
    for group in ("model", "experiment"):
        (folder / "my_conf" / group).mkdir(parents=True)
    (folder / "my_conf/model/odd.yaml").write_text("_target_: odd_models.Odd\nmode: works\n")
    (folder / "my_conf/experiment/odd.yaml").write_text(f"""# @package _global_
defaults:
  - override /model: odd
  - override /search: random
  - override /stopping: none
  - override /confirm: none
search_space: [{{model.mode: [{", ".join(_MODES)}]}}]
target: {{value: 0.7, max_train_seconds: 5}}
search:
  {{num_trials: 8, trial_deadline_seconds: {_DEADLINE_SECONDS}, repeats: true, max_retakes: 0}}
study: {{name: odd, seed: {_SEED}}}
""")
    (folder / "my_conf/experiment/wrong.yaml").write_text("""# @package _global_
defaults:
  - override /model: odd
model: {mode: bug}
search_space: [{optimizer.lr: {type: float, low: 1e-3, high: 1e-1, log: true}}]
search: {max_concurrent_trials: 1}
study: {name: wrong}
""")


@pytest.fixture(scope="module")
def studies(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Study]:
    """Both studies, run at the same time: one of them mostly waits for what hangs."""
    folders = {experiment: tmp_path_factory.mktemp(experiment) for experiment in ("odd", "wrong")}
    started = {}
    for experiment, folder in folders.items():
        _write_user_files(folder)
        arguments = (
            f"experiment={experiment}",
            "--config-dir",
            "my_conf",
            "allowed_targets=[odd_models]",
        )
        storage = ("search.storage=sqlite:///wrong.db",) if experiment == "wrong" else ()
        started[experiment] = commands.start(*arguments, *storage, folder=folder)
    return {
        experiment: Study(folders[experiment], exit_code(process))
        for experiment, process in started.items()
    }


@pytest.fixture(scope="module")
def odd(studies: dict[str, Study]) -> Study:
    return studies["odd"]


@pytest.fixture(scope="module")
def results(odd: Study) -> dict[int, TrialResult]:
    return finished_results(read_study("odd", odd.folder / "outputs/odd"))


def test_every_kind_of_end_is_an_outcome_and_the_study_goes_on(
    odd: Study, results: dict[int, TrialResult]
) -> None:
    assert odd.code == 0, odd.err
    assert odd.err == ""
    wanted = {
        "works": Outcome.REACHED,
        "out_of_memory": Outcome.OUT_OF_MEMORY,
        "diverges": Outcome.DIVERGED,
        "hangs": Outcome.TIMED_OUT,
        "aborts": Outcome.ERRORED,
    }
    found = {
        number: (result.values["model.mode"], result.outcome) for number, result in results.items()
    }
    assert found == {number: (mode, wanted[mode]) for number, (mode, _) in found.items()}
    assert len(found) == 8
    assert {mode for mode, _ in found.values()} == set(_MODES)
    assert found[max(found)][1] is Outcome.REACHED, (
        "a trial after all others runs in a process that works"
    )
    rows = {
        int(row["trial"]): row["outcome"] for row in rows_of(odd.folder / "outputs/odd/trials.csv")
    }
    assert rows == {number: outcome.value for number, (_, outcome) in found.items()}


def test_an_end_without_a_result_says_what_happened(
    results: dict[int, TrialResult], odd: Study
) -> None:
    errors: dict[str, Any] = {
        result.values["model.mode"]: result.error for result in results.values()
    }
    assert errors["works"] is None
    assert "Tried to allocate 20.00 GiB" in errors["out_of_memory"]
    assert "not ended at its deadline" in errors["hangs"]
    assert "in wait_for_what_never_comes" in errors["hangs"]
    assert errors["aborts"].startswith("the worker died")
    assert (
        "SIGABRT" in errors["aborts"]
        or "connection error code" in errors["aborts"]
        or "unexpectedly" in errors["aborts"]
    )
    assert not list((odd.folder / "outputs/odd").glob("hang-*")), (
        "what a watchdog left is in the trial's error"
    )


def test_a_bug_ends_the_study_with_its_traceback(studies: dict[str, Study]) -> None:
    wrong = studies["wrong"]
    assert wrong.code == 1
    first, *traceback = wrong.err.splitlines()
    assert first.startswith("autotune: 3 trials in a row failed; the first was trial 0: KeyErr")
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "KeyError: 'embedding'"
    assert any("odd_models.py" in line for line in traceback)
    assert [run.info.status for run in wrong.runs] == ["FAILED"] * 4
    study = optuna.load_study(study_name="wrong", storage=f"sqlite:///{wrong.folder}/wrong.db")
    assert [each.state for each in study.trials] == [TrialState.FAIL] * 3
    assert not (wrong.folder / "outputs/wrong/best.json").exists()
