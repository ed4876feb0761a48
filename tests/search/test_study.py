"""Opening and reading studies in real journals and real databases, of which one does not answer,
restarts, or stays away.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.errors import ConfigError, StudyError
from autotune.outcome import Outcome
from autotune.search.study import (
    confirmations,
    open_study,
    read_study,
    store_confirmation,
    study_definition,
)
from tests.support.records import make_result

DEFINITION = {
    "target": {"metric": "accuracy", "value": 0.9},
    "search_space": {"model.widths": [[8, 16], [16, 32]]},
}


def open_in(
    folder: Path,
    name: str = "first",
    definition: Mapping[str, Any] = DEFINITION,
    url: str | None = None,
) -> optuna.Study:
    return open_study(
        name,
        folder,
        storage_url=url,
        make_sampler=optuna.samplers.RandomSampler,
        seed=0,
        definition=definition,
    )[0]


def database(folder: Path) -> str:
    return f"sqlite:///{folder / 'studies.db'}"


@pytest.mark.parametrize("in_database", [False, True])
def test_a_study_opened_twice_is_one_study(tmp_path: Path, in_database: bool) -> None:
    url = database(tmp_path) if in_database else None
    first = open_in(tmp_path, url=url)
    first.tell(first.ask({"x": optuna.distributions.FloatDistribution(0, 1)}), 0.5)
    second = open_in(tmp_path, url=url)
    assert [trial.value for trial in second.trials] == [0.5]
    assert study_definition(second) == DEFINITION
    read = read_study("first", tmp_path, storage_url=url)
    assert [trial.params for trial in read.trials] == [trial.params for trial in first.trials]


def test_a_definition_is_the_same_after_a_pass_through_the_storage(tmp_path: Path) -> None:
    definition = {
        "space": {"batch_size": {"type": "choice", "choices": {32: {}, 64: {}}}},
        "widths": (8, 16),
    }
    open_in(tmp_path, definition=definition)
    open_in(tmp_path, definition=definition)


def test_a_study_made_for_something_else_is_refused(tmp_path: Path) -> None:
    open_in(tmp_path)
    other = (
        r"use the same, or another study\.name, with warm_start=\[first\] to learn from the"
        r" trials of this one"
    )
    with pytest.raises(
        StudyError,
        match=(
            rf"study\.name=first: was made for something else \(seed: None there, 1 here\); {other}"
        ),
    ):
        open_in(tmp_path, definition={**DEFINITION, "seed": 1})
    with pytest.raises(StudyError, match=r"target\."):
        open_in(tmp_path, definition={**DEFINITION, "target": {"metric": "accuracy", "value": 0.8}})
    assert study_definition(open_in(tmp_path)) == DEFINITION


def test_the_time_limit_of_trials_may_be_raised_and_is_never_lowered(tmp_path: Path) -> None:
    def limited(seconds: float, **target: Any) -> dict[str, Any]:
        limit = {"metric": "accuracy", "max_train_seconds": seconds, **target}
        return {"configuration": {"target": limit, "epochs": 3}, "search_space": {}}

    open_in(tmp_path, definition=limited(60.0))
    assert study_definition(open_in(tmp_path, definition=limited(90.0))) == limited(90.0)
    with pytest.raises(
        StudyError,
        match=(
            r"^study\.name=first: .*target\.max_train_seconds: 90\.0 there, 60\.0 here; it"
            r" \(max_seconds of autotune\.target\) may be raised, not lowered\)"
        ),
    ):
        open_in(tmp_path, definition=limited(60.0))
    with pytest.raises(StudyError, match=r"target\.metric: 'accuracy' there, 'loss' here"):
        open_in(tmp_path, definition=limited(120.0, metric="loss"))
    assert study_definition(open_in(tmp_path, definition=limited(90.0))) == limited(90.0)


def test_a_missing_study_is_told_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        StudyError, match=f"study=third: no such study; there is none in {tmp_path}"
    ):
        read_study("third", tmp_path / "third")
    open_in(tmp_path / "second", name="second")
    open_in(tmp_path / "first", name="first")
    with pytest.raises(StudyError, match="study=third: no such study; use one of first, second"):
        read_study("third", tmp_path / "third")
    assert not (tmp_path / "third").exists()
    with pytest.raises(
        StudyError, match=r"study=third: no such study in .*study\.log; use one of first"
    ):
        read_study("third", tmp_path / "first")


def test_confirmation_runs_are_kept_by_arm_and_seed(tmp_path: Path) -> None:
    study = open_in(tmp_path)
    assert confirmations(study) == {}
    runs = {
        (arm, index): make_result(arm, Outcome.MISSED, values={"model.widths": [8, 16]}, seed=index)
        for arm, index in ((0, 0), (0, 1), (12, 0))
    }
    for (arm, index), run in runs.items():
        store_confirmation(study, arm, index, run)
    assert confirmations(read_study("first", tmp_path)) == runs


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:secret@127.0.0.1:1/db", "refused"),
        ("postgresql+absent://me:secret@127.0.0.1/db", "refused|absent"),
        ("sqlite:////proc/absent/a.db", "unable to open"),
        ("s3://bucket/db", "s3"),
        ("nonsense", r"search\.storage: nonsense: cannot be opened .*URL"),
    ],
)
def test_a_database_that_cannot_be_opened_is_one_line(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        open_in(tmp_path, url=url)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "it must be null, or a database" in str(caught.value)
