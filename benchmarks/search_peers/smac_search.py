"""SMAC3 over a recording, by ask and tell: its algorithm-configuration facade with its own adaptive
capping.

That is what SMAC has for a runtime objective: the cost is the seconds to target, and each trial it
asks for carries the runtime at which it is to be cut off, here ``cap_seconds``. A trial that was
cut off costs its cutoff, one that never reaches the target ``max_train_seconds``, and both are told
TIMEOUT; a diverged one is CRASHED.

Source: SMAC3 2.4, Scenario.adaptive_capping and Intensifier; Hutter et al., "ParamILS" (JAIR 36,
2009), section 4, on capping.
"""

import logging
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import ConfigSpace as Space
from smac import AlgorithmConfigurationFacade, Scenario
from smac.main.exceptions import ConfigurationSpaceExhaustedException
from smac.runhistory import StatusType, TrialInfo, TrialValue

from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.policy import Answer, Decision, Done
from autotune.recording import Recording
from autotune.search.points import derived_seed
from autotune.search.scheduler import PointPlacement
from benchmarks.replay.simulation import started
from benchmarks.search_peers.domains import FlatDomains, Number, Options


class SmacSearch:
    """SMAC with the verbs of ``Scheduler``."""

    def __init__(self, recording: Recording, *, seed: int, place: PointPlacement) -> None:
        self._flat = FlatDomains(recording.space)
        self._max_seconds = recording.target.max_train_seconds
        self._place = place
        self._space = Space.ConfigurationSpace(seed=derived_seed(seed, "fallback"))
        self._space.add(
            [_as_config_space(name, domain) for name, domain in self._flat.domains.items()]
        )
        scenario = Scenario(
            self._space,
            # nothing is written there: it is never told to save
            output_directory=Path(tempfile.gettempdir()) / "smac_search",
            deterministic=True,
            n_trials=2**31,
            adaptive_capping=True,
            runtime_cutoff=math.ceil(self._max_seconds),
            seed=derived_seed(seed, "sampler 0"),
        )
        intensifier = AlgorithmConfigurationFacade.get_intensifier(scenario, max_config_calls=1)
        self._smac = AlgorithmConfigurationFacade(
            scenario, intensifier=intensifier, logging_level=False, overwrite=True
        )
        # lines about each point of a finite space that it has had
        logging.getLogger("smac").setLevel(logging.CRITICAL)
        self._infos: list[TrialInfo] = []
        self._num_told = 0

    def suggest(self) -> Answer:
        """The recorded point nearest to SMAC's.

        One drawn by chance where a finite space has no more for it.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                asked = self._smac.ask()
            except (ConfigurationSpaceExhaustedException, StopIteration):
                asked = TrialInfo(self._space.sample_configuration(), seed=0)
        placed = self._place(self._flat.suggestion(dict(asked.config)))
        if placed is None:
            return Done("exhausted")
        self._infos.append(
            self._running_instead(
                asked, Space.Configuration(self._space, values=self._flat.values(placed))
            )
        )
        cutoff = float(asked.additional_info.get("cutoff", self._max_seconds))
        return started(len(self._infos) - 1, placed, cap_seconds=cutoff)

    def observe(self, number: int, evaluation: Evaluation) -> Decision:
        """Goes on: the cutoff is all the capping there is."""
        return Decision.CONTINUE

    def finish(self, result: TrialResult) -> None:
        """Tell the runtime, and whether it is one."""
        seconds = result.stopped_at - result.started_at
        if result.outcome is Outcome.REACHED:
            status, cost = StatusType.SUCCESS, seconds
        elif result.outcome is Outcome.CAPPED:
            status, cost = StatusType.TIMEOUT, seconds
        else:
            status, cost = (
                (StatusType.CRASHED if result.outcome is Outcome.DIVERGED else StatusType.TIMEOUT),
                self._max_seconds,
            )
        # of equal costs SMAC makes several incumbents, which its capping then refuses
        if status is not StatusType.SUCCESS:
            self._num_told += 1
            cost *= 1 + 1e-9 * self._num_told
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._smac.tell(
                self._infos[result.trial],
                TrialValue(cost=cost, time=seconds, status=status),
                save=False,
            )

    def _running_instead(self, asked: TrialInfo, config: Space.Configuration) -> TrialInfo:
        """Note that the recorded point is what runs: SMAC would wait for its own one for ever."""
        history = self._smac.runhistory
        # there is no verb that takes a trial back
        running = history._running_trials  # noqa: SLF001
        running[:] = [each for each in running if each.config != asked.config]
        info = TrialInfo(config, seed=asked.seed)
        history.add_running_trial(info)
        return info


def _as_config_space(name: str, domain: Number | Options) -> Any:
    if isinstance(domain, Options):
        positions = list(range(len(domain.labels)))
        if domain.are_ordered:
            return Space.OrdinalHyperparameter(name, positions)
        return Space.CategoricalHyperparameter(name, positions)
    if domain.is_whole:
        return Space.UniformIntegerHyperparameter(
            name, int(domain.low), int(domain.high), log=domain.is_log
        )
    return Space.UniformFloatHyperparameter(name, domain.low, domain.high, log=domain.is_log)
