"""Syne Tune's multi-fidelity schedulers over a recording, through their own interface.

They maximise or minimise the target's metric, with train seconds as the resource: a scheduler of
theirs knows no time to target. Grace period and reduction factor: three halvings up to the target's
``max_train_seconds``, by their own factor.
"""

import logging
import warnings
from datetime import datetime
from typing import Any

import numpy as np
from syne_tune import config_space
from syne_tune.backend.trial_status import Trial as SyneTrial
from syne_tune.optimizer.baselines import ASHA, BOHB
from syne_tune.optimizer.scheduler import SchedulerDecision

from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.policy import Answer, Decision, Done
from autotune.recording import Recording
from autotune.search.points import derived_seed
from autotune.search.scheduler import PointPlacement
from benchmarks.replay.simulation import started
from benchmarks.search_peers.domains import FlatDomains, Number, Options

SCHEDULERS = {"asha": ASHA, "bohb": BOHB}
REDUCTION_FACTOR = 3
"""Syne Tune's own."""
NUM_HALVINGS = 3
_DECISIONS = {
    SchedulerDecision.CONTINUE: Decision.CONTINUE,
    SchedulerDecision.STOP: Decision.STOP,
    SchedulerDecision.PAUSE: Decision.PAUSE,
}


class SyneTuneSearch:
    """A scheduler of Syne Tune's with the verbs of ``Scheduler``.

    ``scheduler`` is one of ``SCHEDULERS``.
    """

    def __init__(
        self, recording: Recording, scheduler: str, *, seed: int, place: PointPlacement
    ) -> None:
        # a warning about an argument that its own ASHA passes
        logging.getLogger("syne_tune").setLevel(logging.ERROR)
        # its searchers draw from numpy's own generator too
        np.random.seed(derived_seed(seed, "syne tune"))
        target = recording.target
        self._flat = FlatDomains(recording.space)
        self._place = place
        self._space = {name: _as_syne_tune(domain) for name, domain in self._flat.domains.items()}
        self._random = FlatDrawing(self._space, derived_seed(seed, "fallback"))
        self._scheduler = SCHEDULERS[scheduler](
            self._space,
            metric="metric",
            time_attr="train_seconds",
            max_t=target.max_train_seconds,
            do_minimize=target.mode == "min",
            random_seed=derived_seed(seed, "sampler 0"),
            grace_period=target.max_train_seconds / REDUCTION_FACTOR**NUM_HALVINGS,
            reduction_factor=REDUCTION_FACTOR,
        )
        self._trials: list[SyneTrial] = []

    def suggest(self) -> Answer:
        """The recorded point nearest to the scheduler's.

        One drawn by chance where a finite space has no more for it.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            suggestion = self._scheduler.suggest()
        placed = self._place(
            self._flat.suggestion(self._random.draw() if suggestion is None else suggestion.config)
        )
        if placed is None:
            return Done("exhausted")
        number = len(self._trials)
        config = config_space.cast_config_values(self._flat.values(placed), self._space)
        self._trials.append(SyneTrial(trial_id=number, config=config, creation_time=datetime.min))
        self._scheduler.on_trial_add(self._trials[number])
        return started(number, placed)

    def observe(self, number: int, evaluation: Evaluation) -> Decision:
        """What the scheduler decides."""
        return _DECISIONS[
            self._scheduler.on_trial_result(self._trials[number], _as_result(evaluation))
        ]

    def finish(self, result: TrialResult) -> None:
        """Tell a trial that ended by itself."""
        trial = self._trials[result.trial]
        if result.outcome is Outcome.DIVERGED or result.last is None:
            self._scheduler.on_trial_remove(trial)
        elif result.outcome is not Outcome.STOPPED:
            self._scheduler.on_trial_complete(trial, _as_result(result.last))


class FlatDrawing:
    """Draws points of a Syne Tune space by chance."""

    def __init__(self, space: dict[str, Any], seed: int) -> None:
        self._space = space
        self._random_state = np.random.RandomState(seed)

    def draw(self) -> dict[str, Any]:
        """Values by name."""
        return {
            name: domain.sample(random_state=self._random_state)
            for name, domain in self._space.items()
        }


def _as_result(evaluation: Evaluation) -> dict[str, float]:
    return {"train_seconds": evaluation.train_seconds, "metric": evaluation.metric}


def _as_syne_tune(domain: Number | Options) -> Any:
    if isinstance(domain, Options):
        positions = list(range(len(domain.labels)))
        return (
            config_space.ordinal(positions, kind="equal")
            if domain.are_ordered
            else config_space.choice(positions)
        )
    if domain.is_whole:
        return (config_space.lograndint if domain.is_log else config_space.randint)(
            int(domain.low), int(domain.high)
        )
    return (config_space.loguniform if domain.is_log else config_space.uniform)(
        domain.low, domain.high
    )
