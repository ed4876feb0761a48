"""Search policies of which a test gives only what it is about."""

from typing import Any

import optuna

from autotune.measurement import Target
from autotune.objective import AmortisedTime
from autotune.search.samplers import quiet_optuna
from autotune.search.scheduler import Scheduler
from autotune.search.stopping import NeverStop
from autotune.space import SearchSpace


def policy_over(space: SearchSpace, target: Target, *, seed: int = 0, **settings: Any) -> Scheduler:
    """A policy that draws points at random until it is told to end.

    Without a baseline, and every trial goes on.
    """
    quiet_optuna()
    given: dict[str, Any] = {
        "study": optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)),
        "baseline": None,
        "stopping": NeverStop(),
        "objective": AmortisedTime(num_trainings=1),
        "num_trials": None,
        "max_errors_in_a_row": 3,
    }
    return Scheduler(space=space, target=target, seed=seed, **{**given, **settings})
