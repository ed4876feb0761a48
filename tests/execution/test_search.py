"""What Ray Tune keeps of trials that have ended: its own names for that, which a later Ray may change."""

from types import SimpleNamespace
from typing import Any

from ray.tune.execution.tune_controller import TuneController  # after the skip
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.utils.callback import _create_default_callbacks

from autotune.execution import search


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
