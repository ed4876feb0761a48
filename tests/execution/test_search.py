"""What Ray Tune keeps of trials that have ended: its own names for that, which a later Ray may change."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.exceptions import StorageInternalError
from ray.tune import TuneError
from ray.tune.execution.tune_controller import TuneController  # after the skip
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.utils.callback import _create_default_callbacks

from autotune.errors import StudyError
from autotune.execution import search
from autotune.search.study import told_storage_errors


class EndedTrial:
    def is_finished(self) -> bool:
        return True


def test_ended_trials_leave_all_that_ray_keeps_them_in() -> None:
    controller = TuneController.__new__(TuneController)
    first, others = EndedTrial(), [EndedTrial() for _ in range(3)]
    controller._trials, of_ray = [first, *others], ("_stopped_trials", "_failed_trials", "_trials_to_cache")
    source = TuneController.__init__.__code__.co_names
    for name in of_ray:
        assert name in source, "Ray has it by another name now"
        setattr(controller, name, set(others))
    search._forget_ended(SimpleNamespace(get_trials=lambda: controller._trials, _tune_controller=controller))
    assert controller._trials == [first]
    assert [getattr(controller, name) for name in of_ray] == [set(), set(), set()]


def test_ray_adds_no_callback_of_its_own_that_keeps_trials() -> None:
    manager: Any = SimpleNamespace()
    callback = search._Callback(manager)
    made = _create_default_callbacks([callback], air_verbosity=None)
    assert [each for each in made if isinstance(each, TrialProgressCallback)] == [callback]
    trial = EndedTrial()
    for told in (callback.on_trial_result, callback.on_trial_complete, callback.on_trial_error):
        told(iteration=1, trials=[trial], trial=trial, result={})
    assert not any(trial in kept for kept in vars(callback).values() if isinstance(kept, dict | set))


def test_an_error_that_ray_wraps_keeps_what_caused_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*arguments: Any, **settings: Any) -> None:
        try:
            raise StorageInternalError("invalid data in the commit") from OSError("disk I/O error")
        except StorageInternalError:
            raise TuneError("a traceback")  # noqa: B904  # as Ray does

    monkeypatch.setattr(search.tune, "run", run)
    manager: Any = SimpleNamespace()
    with pytest.raises(StudyError, match=r"^search\.storage: disk I/O error; "), told_storage_errors("again"):
        search.run_search(manager, folder=tmp_path / "ray", interrupt=threading.Event(), check_ray=lambda: None)
