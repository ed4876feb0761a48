"""Objectives: the score that a search minimises, a number computed from one trial's result.

Of two configurations the one with the lower score is better. An objective whose score can only grow
while a trial trains also has ``lower_bound``, and then running trials can be stopped at the best
score so far. All of autotune's own objectives also have ``quantity`` and ``unit``, which describe
scores to readers, and ``unmeasured``: an objective that needs a reading which a machine does not
give is refused before anything is trained there, and is never replaced by another one.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from autotune.errors import ConfigError
from autotune.measurement import Device, Evaluation, TrialResult
from autotune.outcome import Outcome


class Objective(Protocol):
    """Interface of what ``objective:`` names in the configuration."""

    def score(self, result: TrialResult) -> float:
        """Score to minimise, of a trial that REACHED the target."""
        ...


@runtime_checkable
class BoundedObjective(Objective, Protocol):
    """An objective whose score only grows while a trial trains."""

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Lowest score that a trial can still get after this evaluation, in the unit of
        ``score``.
        """
        ...


def unmeasured(objective: Objective, device: Device) -> str | None:
    """Why the objective cannot score a training on this device; None if it can."""
    method = getattr(objective, "unmeasured", None)
    return None if method is None else method(device)


def check_measured(objective: Objective, devices: Iterable[Device]) -> None:
    """Refuse an objective that cannot score a training on one of the devices.

    Raises:
        ConfigError: the objective needs a reading that a device does not give; names the machine,
            the reading and what is accepted.
    """
    for device in devices:
        if (missing := unmeasured(objective, device)) is not None:
            raise ConfigError(f"objective: {missing}")


class _Growing(BoundedObjective):
    """Base of objectives that grow during a training."""

    def score(self, result: TrialResult) -> float:
        """Score of a trial: its lower bound when the target was reached.

        Raises:
            ValueError: the trial did not reach the target, so it has no score.
        """
        if result.outcome is not Outcome.REACHED or result.last is None:
            raise ValueError(
                f"trial {result.trial} ended {result.outcome}: only a trial that REACHED has a"
                " time to target"
            )
        return self.lower_bound(result.last)


@dataclass(frozen=True, kw_only=True)
class _Amortised(_Growing):
    """Base of objectives that spread the cost of build over the trainings of a process.

    Raises:
        ConfigError: ``num_trainings`` is less than one.
    """

    num_trainings: int
    """Number of trainings by one process that share the cost of its build phase."""

    def __post_init__(self) -> None:
        if self.num_trainings < 1:
            raise ConfigError(
                f"objective.num_trainings: found {self.num_trainings}, must be a whole number"
                " from 1"
            )

    def _amortised_seconds(self, evaluation: Evaluation) -> float:
        return evaluation.build_seconds / self.num_trainings + evaluation.warm_seconds


@dataclass(frozen=True, kw_only=True)
class AmortisedTime(_Amortised):
    """Seconds to target when the exported configuration is trained ``num_trainings`` times by one
    process.

    Build time (loading, compiling) is paid once by the process and shared by its trainings: the
    score is the cold time to target for one training, and approaches the warm time for many.
    """

    quantity: ClassVar[str] = "time to target"
    unit: ClassVar[str] = "s"

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Amortised seconds spent up to an evaluation."""
        return self._amortised_seconds(evaluation)


@dataclass(frozen=True, kw_only=True)
class DeviceSeconds(_Amortised):
    """Amortised seconds to target times the number of devices of a training: one for each of its
    workers.
    """

    quantity: ClassVar[str] = "device time to target"
    unit: ClassVar[str] = "device-s"

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Amortised device-seconds spent up to an evaluation."""
        return self._amortised_seconds(evaluation) * evaluation.num_workers


@dataclass(frozen=True, kw_only=True)
class Cost(_Amortised):
    """Money to target: device-seconds at the price of an hour of their kind.

    Args:
        price_per_hour: price of an hour of one worker's device, by kind: ``cpu`` or the name that a
            GPU's driver gives; None for no prices.
        currency: currency of the prices.

    Raises:
        ConfigError: a price is not a number above 0.
    """

    price_per_hour: Mapping[str, float] | None
    currency: str

    quantity: ClassVar[str] = "cost to target"

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, price in self._prices.items():
            if not 0 < price < math.inf:
                raise ConfigError(
                    f"cluster.price_per_hour: found {price} for {kind!r}, must be above 0"
                )

    @property
    def unit(self) -> str:
        """Currency of the prices."""
        return self.currency

    @property
    def _prices(self) -> Mapping[str, float]:
        return self.price_per_hour or {}

    def unmeasured(self, device: Device) -> str | None:
        """Why a training on the device has no cost: its kind is unknown or has no price.

        None if it has one.
        """
        if device.kind in self._prices:
            return None
        if device.kind is None:
            return (
                f"{device.where} does not say on what kind of device it was trained, so it has no"
                " price"
            )
        known = (
            f"only prices of {', '.join(map(repr, self._prices))}" if self._prices else "no price"
        )
        return (
            f"{device.where} trains on {device.kind!r}, and cluster.price_per_hour has {known};"
            f" use a price of a device-hour, as in 'cluster.price_per_hour={{{device.kind}:"
            " 2.5}'"
        )

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Money spent up to an evaluation, in ``currency``.

        Raises:
            ConfigError: the kind of device has no price.
        """
        check_measured(self, [device_of(evaluation)])
        return (
            self._amortised_seconds(evaluation)
            * evaluation.num_workers
            / 3600
            * self._prices[str(evaluation.device_kind)]
        )


@dataclass(frozen=True, kw_only=True)
class Energy(_Amortised):
    """Joules to target by the energy counters of the training's devices: prepare + train + build
    / ``num_trainings``.
    """

    quantity: ClassVar[str] = "energy to target"
    unit: ClassVar[str] = "J"

    def unmeasured(self, device: Device) -> str | None:
        """Why the device's energy is unknown; None if its energy counter can be read."""
        if device.energy_fault is None:
            return None
        kind = {None: "the device", "cpu": "the CPU"}.get(device.kind, device.kind)
        return (
            f"the energy that {kind} uses is not known on {device.where} ({device.energy_fault});"
            " accepted there are objective=time, device_seconds and cost"
        )

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Joules used up to an evaluation.

        Raises:
            ConfigError: the energy was not measured.
        """
        check_measured(self, [device_of(evaluation)])
        assert evaluation.energy_joules is not None
        assert evaluation.build_joules is not None
        return evaluation.build_joules / self.num_trainings + evaluation.energy_joules


@dataclass(frozen=True, kw_only=True)
class Pareto(_Growing):
    """Several objectives at once: the study reports their Pareto front, and the search minimises
    one weighted product of them.

    Args:
        objectives: objectives by name; each must have ``lower_bound``.
        preferences: named weightings, each a weight for every objective; an objective that is not
            named has weight 0. Each preference picks the point of the front with the least weighted
            product.
        search_for: the preference whose weighted product is the score.

    Raises:
        ConfigError: an objective or a preference is not accepted.
    """

    objectives: Mapping[str, BoundedObjective]
    preferences: Mapping[str, Mapping[str, float]]
    search_for: str

    unit: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if len(self.objectives) < 2:
            raise ConfigError(
                f"objective.objectives: found {', '.join(self.objectives) or 'none'}, must be"
                " at least two"
            )
        for name, objective in self.objectives.items():
            if not isinstance(objective, BoundedObjective):
                raise ConfigError(
                    f"objective.objectives.{name}: has no lower_bound, must be an objective"
                    " that only grows"
                )
        for name, weights in self.preferences.items():
            known = set(weights) <= set(self.objectives)
            if (
                not known
                or not all(0 <= weight < math.inf for weight in weights.values())
                or not sum(weights.values()) > 0
            ):
                raise ConfigError(
                    f"objective.preferences.{name}: found {dict(weights)}, must be weights of"
                    f" {', '.join(self.objectives)} from 0, one of them above 0"
                )
        if self.search_for not in self.preferences:
            raise ConfigError(
                f"objective.search_for: found {self.search_for}, must be one of"
                f" {', '.join(self.preferences) or 'none'}"
            )

    @property
    def quantity(self) -> str:
        """Formula of the weighted product that is the score."""
        weights = self._weights(self.search_for)
        factors = zip(self.objectives, weights, strict=True)
        return "product " + " x ".join(
            f"{name}^{weight / sum(weights):.2g}" for name, weight in factors if weight
        )

    def unmeasured(self, device: Device) -> str | None:
        """Why one of the objectives cannot score a training on the device; None if all can."""
        faults = [unmeasured(objective, device) for objective in self.objectives.values()]
        return next(filter(None, faults), None)

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Weighted product of the objectives' lower bounds at an evaluation.

        It grows with each of them.
        """
        return weighted_product(self.values(evaluation), self._weights(self.search_for))

    def values(self, evaluation: Evaluation) -> tuple[float, ...]:
        """Lower bound of every objective at an evaluation, in the order of ``objectives``."""
        return tuple(objective.lower_bound(evaluation) for objective in self.objectives.values())

    def picks(self, points: Mapping[int, Sequence[float]]) -> dict[str, int]:
        """Trial that each preference picks from the values of trials.

        ``points`` must not be empty.
        """
        return {
            name: min(
                points, key=lambda trial: weighted_product(points[trial], self._weights(name))
            )
            for name in self.preferences
        }

    def _weights(self, preference: str) -> tuple[float, ...]:
        return tuple(self.preferences[preference].get(name, 0.0) for name in self.objectives)


def weighted_product(values: Sequence[float], weights: Sequence[float]) -> float:
    """Product of non-negative values, each raised to the power of its share of the sum of
    weights.

    Units drop out of its ratios: 5% less of one objective is worth as much as 5% less of another
    with the same weight, so no objective has to be scaled by a range or a reference point. It grows
    with each value, so the point with the least product is on the Pareto front, and lower bounds of
    the values give a lower bound of it. It cannot pick a point of the front in a dent, above the
    straight line between two others on logarithmic axes.

    Source: the weighted product method (Miller and Starr, Executive Decisions and Operations
    Research, 1969); it is the weighted sum of logarithms.
    """
    return math.prod(
        math.pow(value, weight / sum(weights))
        for value, weight in zip(values, weights, strict=True)
    )


def pareto_front(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other point dominates, in order of their first coordinate.

    A point dominates another one if it is nowhere higher and somewhere lower; equal points are on
    the front together.
    """

    def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
        return list(one) != list(other) and all(map(operator.le, one, other))

    order = sorted(range(len(points)), key=lambda index: tuple(points[index]))
    return [
        index for index in order if not any(dominates(point, points[index]) for point in points)
    ]


def device_of(evaluation: Evaluation, where: str = "this training") -> Device:
    """Device of a training according to one of its evaluations.

    ``where`` names the training in messages.
    """
    is_known = evaluation.energy_joules is not None and evaluation.build_joules is not None
    fault = None if is_known else "it was not measured"
    return Device(kind=evaluation.device_kind, where=where, energy_fault=fault)
