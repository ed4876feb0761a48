"""The searches that are compared, by name, each made for one recording.

A policy is anything with the verbs of ``Scheduler`` that a replay asks: ``suggest``, ``observe``
and ``finish``. Those of this package and of Optuna are made of the groups of ``conf/``; the others
drive a library by its own interface. A library that is not installed is named by
``missing_library``.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import optuna

from autotune.config.compose import Composed, Composer
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import AmortisedTime
from autotune.policy import Answer, Decision
from autotune.recording import Recording
from autotune.search.points import derived_seed
from autotune.search.samplers import make_sampler
from autotune.search.scheduler import PointPlacement
from benchmarks.replay.replayed_policy import replayed_policy


class Policy(Protocol):
    """What a replay asks of a search."""

    def suggest(self) -> Answer:
        """The next trial to train, or a paused one to continue."""
        ...

    def observe(self, number: int, evaluation: Evaluation) -> Decision:
        """Whether a running trial goes on after an evaluation."""
        ...

    def finish(self, result: TrialResult) -> object:
        """A trial ended."""
        ...


MakePolicy = Callable[..., Policy]
"""Called with a recording, and with ``seed``, ``place`` and ``study``: an Optuna study of
earlier trials, or None."""


@dataclass(frozen=True, kw_only=True)
class PolicyKind:
    """One of the searches that are compared."""

    make: MakePolicy
    library: str | None = None
    """Module that it needs besides this package, as it is imported."""
    takes_study: bool = True
    """Whether it can go on from an Optuna study that another search made."""
    make_with_paused: Callable[[int], MakePolicy] | None = None
    """For a search that pauses: makes one whose first so many trials are drawn by chance, and
    paused as soon as they may be."""


def missing_library(name: str) -> str | None:
    """The module that a policy needs and that is not installed; None where nothing is missing."""
    library = POLICIES[name].library
    return library if library is not None and importlib.util.find_spec(library) is None else None


def from_groups(search: str, stopping: str, *overrides: str) -> MakePolicy:
    """The policy of ``search=... stopping=...`` and what is set besides."""

    def make(
        recording: Recording, *, seed: int, place: PointPlacement, study: optuna.Study | None = None
    ) -> Policy:
        return replayed_policy(
            recording, _composed(search, stopping, *overrides), seed=seed, place=place, study=study
        )

    return make


def _with_paused(number: int) -> MakePolicy:
    """Freeze-thaw that is left to its model when it has paused so many trials: none of them is
    due to be trained on.
    """
    return from_groups(
        "freeze_thaw",
        "cap",
        f"+search.sampler.num_startup_trials={number}",
        "+search.sampler.reduction_factor=1e9",
    )


def _asha_pruned(
    recording: Recording, *, seed: int, place: PointPlacement, study: optuna.Study | None = None
) -> Policy:
    from benchmarks.search_peers.asha import AshaStopping  # Ray takes seconds to import

    rule = AshaStopping(recording.target)
    return replayed_policy(
        recording, _composed("tpe", "none"), seed=seed, place=place, stopping=rule, study=study
    )


def _told(search: str, ways: Callable[[Recording], Mapping[str, Any]]) -> MakePolicy:
    """A sampler of ``search=...`` that is told in a way of its own."""

    def make(
        recording: Recording, *, seed: int, place: PointPlacement, study: optuna.Study | None = None
    ) -> Policy:
        from benchmarks.search_peers.optuna_search import OptunaSearch  # it imports Ray

        assert study is None, "what it tells is not what a study of this package's holds"
        sampler = make_sampler(
            _composed(search, "none").config.search.sampler,
            (),
            seed=derived_seed(seed, "sampler 0"),
            space=recording.space,
            target=recording.target,
            objective=AmortisedTime(num_trainings=1),
        )
        return OptunaSearch(recording, sampler, place, **ways(recording))

    return make


def _as_stock(recording: Recording) -> Mapping[str, Any]:
    from benchmarks.search_peers import asha, optuna_search

    stopping = asha.AshaStopping(recording.target)
    return {"value_of": optuna_search.elapsed_seconds, "stopping": stopping}


def _with_hyperband(recording: Recording) -> Mapping[str, Any]:
    from benchmarks.search_peers import optuna_search

    return {"value_of": optuna_search.seconds_to_target, "pruner": optuna_search.hyperband()}


def _with_shortfalls(recording: Recording) -> Mapping[str, Any]:
    from benchmarks.search_peers import optuna_search

    return {"value_of": optuna_search.seconds_or_shortfall(recording.target), "is_capped": True}


def _syne_tune(scheduler: str) -> MakePolicy:
    def make(
        recording: Recording, *, seed: int, place: PointPlacement, study: optuna.Study | None = None
    ) -> Policy:
        from benchmarks.search_peers.syne_tune_search import SyneTuneSearch  # an optional library

        assert study is None, "Syne Tune knows no Optuna study"
        return SyneTuneSearch(recording, scheduler, seed=seed, place=place)

    return make


def _smac(
    recording: Recording, *, seed: int, place: PointPlacement, study: optuna.Study | None = None
) -> Policy:
    from benchmarks.search_peers.smac_search import SmacSearch  # an optional library

    assert study is None, "SMAC knows no Optuna study"
    return SmacSearch(recording, seed=seed, place=place)


POLICIES: dict[str, PolicyKind] = {
    "random": PolicyKind(make=from_groups("random", "none")),
    "random_cap": PolicyKind(make=from_groups("random", "cap")),
    "tpe": PolicyKind(make=from_groups("tpe", "none")),
    "tpe_cap": PolicyKind(make=from_groups("tpe", "cap")),
    "gp_cap": PolicyKind(make=from_groups("gp", "cap")),
    "gp_cap_told": PolicyKind(make=_told("gp", _with_shortfalls), takes_study=False),
    "tpe_hyperband": PolicyKind(make=_told("tpe", _with_hyperband), takes_study=False),
    "tpe_asha_stock": PolicyKind(make=_told("tpe", _as_stock), takes_study=False),
    "tpe_asha_pruned": PolicyKind(make=_asha_pruned),
    "freeze_thaw": PolicyKind(
        make=from_groups("freeze_thaw", "cap"), make_with_paused=_with_paused
    ),
    "syne_tune_asha": PolicyKind(make=_syne_tune("asha"), library="syne_tune", takes_study=False),
    "syne_tune_bohb": PolicyKind(make=_syne_tune("bohb"), library="syne_tune", takes_study=False),
    "smac": PolicyKind(make=_smac, library="smac", takes_study=False),
}


@lru_cache
def _composed(search: str, stopping: str, *overrides: str) -> Composed:
    return Composer(
        [f"search={search}", f"stopping={stopping}", "search.num_trials=null", *overrides]
    ).compose()
