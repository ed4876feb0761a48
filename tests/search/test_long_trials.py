"""Trials of very many evaluations, pauses and lost workers, in real journals and databases: what is
stored grows with the evaluations, and is read again as it was.
"""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy

from autotune.measurement import Evaluation, LearningCurve, Target
from autotune.outcome import Outcome
from autotune.policy import Decision, Resume, Start, Wait
from autotune.search.scheduler import Scheduler
from autotune.search.storage import JOURNAL
from autotune.search.study import confirmations, store_confirmation
from autotune.space import SearchSpace
from tests.search.test_study import database, open_in
from tests.support.pausing import PausesAtFirst
from tests.support.policies import policy_over
from tests.support.postgresql import running_postgresql
from tests.support.records import make_evaluation, make_result

MOST_TEXT_BYTES = 65_535
"""What a text column of MySQL's holds; a journal, SQLite and PostgreSQL hold more."""
MOST_BYTES_PER_EVALUATION = 600
"""Bytes in a journal for each evaluation and its report, however often its trial was paused."""
SPACE = SearchSpace.from_mapping({"epochs": {"type": "int", "low": 1, "high": 9}}, "")
PARAMETERS: dict[str, optuna.distributions.BaseDistribution] = {
    "epochs": optuna.distributions.IntDistribution(1, 9)
}
TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=1e9)


class PausesOften(PausesAtFirst):
    """Pauses every trial at every so many evaluations."""

    def __init__(self, every: int) -> None:
        super().__init__([SPACE.suggest(optuna.trial.FixedTrial({"epochs": 3}))])
        self._every = every

    def observe(self, number: int, evaluation: Evaluation, **settings: Any) -> Decision:
        if evaluation.step % self._every:
            return Decision.CONTINUE
        self.waiting.append(number)
        return Decision.PAUSE


def opened(
    folder: Path, url: str | None, sampler: PausesOften, *, num_trials: int = 1
) -> Scheduler:
    """A scheduler as a new process makes it."""
    study = open_in(folder, url=url)
    return policy_over(SPACE, TARGET, study=study, sampler=sampler, num_trials=num_trials)


def evaluation_after(step: int, **values: Any) -> Evaluation:
    given: dict[str, Any] = {
        "epoch": step / 7,
        "samples": step * 512,
        "metric": 0.9 - 0.8 / step,
        "loss": 2.3 / step,
        "samples_per_second": 10_000 / 3 + step,
        "energy_joules": step / 3,
    }
    return make_evaluation(step / 9, step=step, **{**given, **values})


def trained(
    policy: Scheduler, num_evaluations: int, *, lost_at: Sequence[int] = (), sizes: Any = None
) -> LearningCurve:
    """The evaluations of a trial that a scheduler has trained, paused and resumed, and that lost
    its worker at some of them: it then continues from its last pause.

    Args:
        sizes: gives a number after each pause, all of which are returned in a list.
    """
    answer, curve, state = policy.suggest(), LearningCurve(), LearningCurve()
    assert isinstance(answer, Start | Resume)
    number, to_lose = answer.trial.number, set(lost_at)
    while curve.num_evaluations < num_evaluations:
        evaluation = evaluation_after(curve.num_evaluations + 1)
        curve.add(evaluation)
        decision = policy.observe(number, evaluation)
        if decision is Decision.PAUSE:
            policy.pause(number, curve)
            state = LearningCurve(curve.numbered)
        elif curve.num_evaluations in to_lose:
            to_lose.remove(curve.num_evaluations)
            policy.store(number, curve)
            assert policy.lost(number, most=3, has_progressed=True)
            curve = LearningCurve(state.numbered)
            policy.rewind(number, curve)
        else:
            continue
        if sizes is not None:
            sizes()
        assert isinstance(policy.suggest(), Resume)
    return curve


def longest_text(study: optuna.Study) -> int:
    """Bytes of the longest attribute, as a database stores it."""
    of_trials = [trial.user_attrs | trial.system_attrs for trial in study.trials]
    values = [value for each in (study.user_attrs, *of_trials) for value in each.values()]
    return max(len(json.dumps(value)) for value in values)


@pytest.fixture(params=["journal", "sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | None]:
    """A study's storage of each kind."""
    if request.param == "postgresql":
        with running_postgresql() as server:
            yield server.new_database("long")
    else:
        yield None if request.param == "journal" else database(tmp_path)


@pytest.mark.parametrize(
    ("num_evaluations", "num_pauses", "most_kept"),
    [(600, 30, 250), pytest.param(10_000, 100, 4000, marks=pytest.mark.slow)],
)
def test_what_a_long_trial_stores_grows_with_its_evaluations_and_is_read_again(
    tmp_path: Path,
    url: str | None,
    num_evaluations: int,
    num_pauses: int,
    most_kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autotune.measurement.MAX_EVALUATIONS", most_kept)
    every, sizes = num_evaluations // num_pauses, [0]
    journal = tmp_path / JOURNAL
    policy = opened(tmp_path, url, PausesOften(every))
    # amid the evaluations after a pause, before and after every second one is left out
    lost_at = [int(each * most_kept) + every // 2 + 1 for each in (0.5, 1, 1.5, 2.1)]
    curve = trained(
        policy,
        num_evaluations - 3,
        lost_at=lost_at,
        sizes=(lambda: sizes.append(journal.stat().st_size)) if url is None else None,
    )
    policy.store(0, curve)
    policy.interrupt(0)
    again = opened(tmp_path, url, PausesOften(every))
    ((trial, begun),) = again.begun
    assert begun.numbered == curve.numbered

    assert isinstance(again.suggest(), Resume)
    for _ in range(3):
        curve.add(evaluation_after(curve.num_evaluations + 1))
    result = make_result(
        0, Outcome.MISSED, *curve.evaluations, values=trial.suggestion.values, seed=trial.seed
    )
    again.finish(result, curve)
    store_confirmation(again.study, 0, 0, result)
    last = opened(tmp_path, url, PausesOften(every))
    assert last.results == {0: result}
    assert confirmations(last.study) == {(0, 0): result}
    reported = last.study.trials[0].intermediate_values
    assert {step - 1 for step in reported} >= set(curve.numbered)
    assert all(reported[at + 1] == each.metric for at, each in curve.numbered.items())
    assert longest_text(last.study) <= MOST_TEXT_BYTES
    if url is None:
        in_all = journal.stat().st_size
        assert in_all < MOST_BYTES_PER_EVALUATION * num_evaluations
        grown = [after - before for before, after in pairwise(sizes)]
        assert max(grown[-10:]) <= max(grown[1:11]), "a pause writes what came since the last one"


def test_each_pause_and_each_end_of_a_trial_is_written_to_a_journal_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, written, flush = opened(tmp_path, None, PausesOften(2)), [0], os.fsync

    def counted(file: int) -> None:
        written[0] += 1
        flush(file)

    monkeypatch.setattr(os, "fsync", counted)
    curve = trained(policy, 8)
    assert written == [1 + 4], "the trial, and its pauses"
    policy.finish(make_result(0, Outcome.MISSED, *curve.evaluations, values={"epochs": 3}))
    assert written == [1 + 4 + 2], "all of its result, and that it has ended"


def test_what_is_next_is_decided_without_reading_evaluations_from_a_database(
    tmp_path: Path,
) -> None:
    policy, read = opened(tmp_path, database(tmp_path), PausesOften(2), num_trials=2), list[str]()
    trained(policy, 4)

    @sqlalchemy.event.listens_for(sqlalchemy.Engine, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        read.append(statement)

    assert policy.suggest() == Wait()
    sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", note)
    assert read
    assert not [each for each in read if "intermediate" in each or "attributes" in each]


@pytest.mark.parametrize("lost_before", range(1, 12))
def test_a_trial_that_ends_where_it_continued_has_the_evaluations_of_its_state(
    tmp_path: Path, lost_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.measurement.MAX_EVALUATIONS", 8)
    policy = opened(tmp_path, None, PausesOften(10**9))
    assert isinstance(policy.suggest(), Start)
    curve, state = LearningCurve(), LearningCurve()
    for step in range(1, 13):
        curve.add(evaluation_after(step))
        if step == lost_before:
            state = LearningCurve(curve.numbered)
        if step in (3, 12):
            policy.store(0, curve)
    policy.rewind(0, state)
    result = make_result(0, Outcome.MISSED, *state.evaluations, values={"epochs": 3})
    policy.finish(result, state)
    assert opened(tmp_path, None, PausesOften(1)).results == {0: result}


def test_evaluations_of_very_many_metrics_and_very_long_errors_fit_into_a_column(
    tmp_path: Path,
) -> None:
    policy = opened(tmp_path, None, PausesOften(10**9))
    assert isinstance(policy.suggest(), Start)
    many = {f"accuracy of the class number {index:04}": index / 7 for index in range(3000)}
    evaluations = [
        evaluation_after(step, metrics=metrics)
        for step, metrics in enumerate([many, {}, many, dict([*many.items()][:300])], 1)
    ]
    error = f"Traceback\n{'é😀' * 90_000}\nValueError: last"
    result = make_result(
        0, Outcome.ERRORED, *evaluations, values={"epochs": 3}, error=error, stopped_at=9.0
    )
    policy.finish(result)
    store_confirmation(policy.study, 0, 0, result)
    again = opened(tmp_path, None, PausesOften(1))
    assert longest_text(again.study) <= MOST_TEXT_BYTES
    for read in (again.results[0], confirmations(again.study)[0, 0]):
        assert read.evaluations == result.evaluations
        assert read.error is not None
        assert read.error.startswith("Traceback\né😀")
        assert read.error.endswith("😀\nValueError: last")
        assert "\n[...]\n" in read.error


def test_what_earlier_versions_stored_is_read(tmp_path: Path) -> None:
    study = open_in(tmp_path)
    evaluations = [evaluation_after(step) for step in range(1, 6)]
    dicts = [each.as_dict() for each in evaluations]
    results = [
        make_result(number, Outcome.MISSED, *evaluations, values={"epochs": 3})
        for number in range(2)
    ]
    for result, num_at_pause in zip(results, (0, 3), strict=True):
        ended = study.ask(PARAMETERS)
        if num_at_pause:
            ended.set_user_attr("autotune:paused", dicts[:num_at_pause])
        ended.set_user_attr("autotune:result", result.as_dict())
        study.tell(ended, state=optuna.trial.TrialState.PRUNED)
    paused = study.ask(PARAMETERS)
    paused.set_user_attr("autotune:paused", dicts[:4])
    study.set_user_attr("autotune:confirmed:1:0", results[1].as_dict())

    sampler = PausesOften(10**9)
    policy = opened(tmp_path, None, sampler)
    assert policy.results == dict(enumerate(results))
    assert confirmations(study) == {(1, 0): results[1]}
    ((_, begun),) = policy.begun
    assert begun.evaluations == tuple(evaluations[:4])
    assert isinstance(policy.suggest(), Resume)
    # its state is gone
    policy.rewind(2, LearningCurve())
    result = make_result(2, Outcome.MISSED, *evaluations[:1], values={"epochs": 3})
    policy.finish(result)
    assert opened(tmp_path, None, PausesOften(1)).results[2] == result
