"""What a search minimises: a number made of one trial's result.

Of two configurations the better one is the one with the lower score. An objective whose score can only grow while a trial
trains also has ``lower_bound``, and then running trials can be stopped at the best score so far. What all of autotune's own say
besides is ``quantity`` and ``unit``, for those who read their scores, and ``unmeasured``: an objective that needs a reading which a
machine does not give is refused before anything is trained there, and never becomes another one.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from autotune.errors import ConfigError
from autotune.measurement import Device, Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.pareto import weighted_product


class Objective(Protocol):
    """Contract of ``objective:`` in the configuration."""

    def score(self, result: TrialResult) -> float:
        """The number to minimise, for a result that REACHED the target."""
        ...


@runtime_checkable
class BoundedObjective(Objective, Protocol):
    """An objective that only grows with the time a trial has spent."""

    def lower_bound(self, evaluation: Evaluation) -> float:
        """The least score that a trial can still get, in the unit of ``score``."""
        ...


def unmeasured(objective: Objective, device: Device) -> str | None:
    """What the objective needs and a training on this device would not tell; None where it can be scored."""
    asked = getattr(objective, "unmeasured", None)
    return None if asked is None else asked(device)


def check_measured(objective: Objective, devices: Iterable[Device]) -> None:
    """Refuse an objective that a training on any of these devices could not be scored by.

    Raises:
        ConfigError: with the machine, what it does not tell, and what is accepted.
    """
    for device in devices:
        _require(unmeasured(objective, device))


@dataclass(frozen=True, kw_only=True)
class _Amortised(ABC):
    """What grows with a training, build spread over the trainings of a process.

    Raises:
        ConfigError: ``num_trainings`` is less than one.
    """

    num_trainings: int

    def __post_init__(self) -> None:
        if self.num_trainings < 1:
            raise ConfigError(f"objective.num_trainings: found {self.num_trainings}, accepted is a whole number from 1")

    @abstractmethod
    def lower_bound(self, evaluation: Evaluation) -> float:
        """What was spent up to an evaluation."""

    def score(self, result: TrialResult) -> float:
        """What was spent up to the target.

        Raises:
            ValueError: the trial did not reach the target, so it has no score.
        """
        return self.lower_bound(_at_target(result))

    def unmeasured(self, device: Device) -> str | None:
        """Nothing: seconds are measured everywhere."""
        return None

    def _seconds(self, evaluation: Evaluation) -> float:
        return evaluation.build_seconds / self.num_trainings + evaluation.warm_seconds


@dataclass(frozen=True, kw_only=True)
class AmortisedTime(_Amortised):
    """Seconds to target when the exported configuration is trained ``num_trainings`` times by one process.

    Build time (loading, compiling) is paid once by the process and shared by its trainings: with 1 this is the cold time to
    target, with a large number the warm one.
    """

    quantity: ClassVar[str] = "time to target"
    unit: ClassVar[str] = "s"

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Amortised seconds spent up to an evaluation."""
        return self._seconds(evaluation)


@dataclass(frozen=True, kw_only=True)
class DeviceSeconds(_Amortised):
    """Amortised seconds to target times the devices that a training takes: one for each of its workers."""

    quantity: ClassVar[str] = "device time to target"
    unit: ClassVar[str] = "device-s"

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Amortised device-seconds spent up to an evaluation."""
        return self._seconds(evaluation) * evaluation.num_workers


@dataclass(frozen=True, kw_only=True)
class Cost(_Amortised):
    """Money to target: device-seconds at the price of an hour of their kind.

    Args:
        price_per_hour: of one worker's device, by kind: ``cpu``, or a GPU's name as its driver tells it; None for no price.
        currency: what prices are in.

    Raises:
        ConfigError: a price is not a number above 0.
    """

    price_per_hour: Mapping[str, float] | None
    currency: str

    quantity: ClassVar[str] = "cost to target"

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, price in self._prices.items():
            if not 0 < price < float("inf"):
                raise ConfigError(f"cluster.price_per_hour: found {price} for {kind!r}, accepted is above 0")

    @property
    def unit(self) -> str:
        """The currency."""
        return self.currency

    @property
    def _prices(self) -> Mapping[str, float]:
        return self.price_per_hour or {}

    def unmeasured(self, device: Device) -> str | None:
        """A price, where there is none of this kind of device."""
        if device.kind in self._prices:
            return None
        if device.kind is None:
            return f"{device.where} does not say on what kind of device it was trained, so it has no price"
        known = f"only prices of {', '.join(map(repr, self._prices))}" if self._prices else "no price"
        return (
            f"{device.where} trains on {device.kind!r}, and cluster.price_per_hour has {known}; accepted is a price of a device-hour, as "
            f"in 'cluster.price_per_hour={{{device.kind}: 2.5}}'"
        )

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Money spent up to an evaluation.

        Raises:
            ConfigError: the kind of device has no price.
        """
        _require(self.unmeasured(device_of(evaluation)))
        return self._seconds(evaluation) * evaluation.num_workers / 3600 * self._prices[str(evaluation.device_kind)]


@dataclass(frozen=True, kw_only=True)
class Energy(_Amortised):
    """Joules to target, by the counters of the training's own devices: prepare and train, and build spread over the trainings."""

    quantity: ClassVar[str] = "energy to target"
    unit: ClassVar[str] = "J"

    def unmeasured(self, device: Device) -> str | None:
        """The energy, where no counter of it can be read."""
        if device.energy_fault is None:
            return None
        kind = {None: "the device", "cpu": "the CPU"}.get(device.kind, device.kind)
        return (
            f"the energy that {kind} uses is not known on {device.where} ({device.energy_fault}); accepted there are objective=time, "
            f"device_seconds and cost"
        )

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Joules used up to an evaluation.

        Raises:
            ConfigError: they were not measured.
        """
        _require(self.unmeasured(device_of(evaluation)))
        assert evaluation.energy_joules is not None
        assert evaluation.build_joules is not None
        return evaluation.build_joules / self.num_trainings + evaluation.energy_joules


@dataclass(frozen=True, kw_only=True)
class Pareto:
    """Several objectives at once: what no trial beats in all of them is the front, and the search minimises one weighing of them.

    Args:
        objectives: by name; each must have ``lower_bound``.
        preferences: weights by objective, by name of the preference; an objective that one does not name has weight 0. Each picks the
            point of the front with the least weighted product (``autotune.pareto``).
        search_for: the preference whose product is the score.

    Raises:
        ConfigError: an objective or a preference that cannot be.
    """

    objectives: Mapping[str, BoundedObjective]
    preferences: Mapping[str, Mapping[str, float]]
    search_for: str

    unit: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if len(self.objectives) < 2:
            raise ConfigError(f"objective.objectives: found {', '.join(self.objectives) or 'none'}, accepted are at least two")
        for name, objective in self.objectives.items():
            if not isinstance(objective, BoundedObjective):
                raise ConfigError(f"objective.objectives.{name}: has no lower_bound, accepted is an objective that only grows")
        for name, weights in self.preferences.items():
            known = set(weights) <= set(self.objectives)
            if not known or not all(0 <= weight < float("inf") for weight in weights.values()) or not sum(weights.values()) > 0:
                raise ConfigError(
                    f"objective.preferences.{name}: found {dict(weights)}, accepted are weights of {', '.join(self.objectives)} from 0, "
                    f"one of them above 0"
                )
        if self.search_for not in self.preferences:
            raise ConfigError(f"objective.search_for: found {self.search_for}, accepted are {', '.join(self.preferences) or 'none'}")

    @property
    def quantity(self) -> str:
        """The product that is the score."""
        shares = zip(self.objectives, self._weights(self.search_for), strict=True)
        total = sum(self._weights(self.search_for))
        return "product " + " x ".join(f"{name}^{weight / total:.2g}" for name, weight in shares if weight)

    def unmeasured(self, device: Device) -> str | None:
        """What the first of the objectives that cannot be scored needs."""
        return next((missing for each in self.objectives.values() if (missing := unmeasured(each, device)) is not None), None)

    def score(self, result: TrialResult) -> float:
        """The weighted product at the target.

        Raises:
            ValueError: the trial did not reach the target, so it has no score.
        """
        return self.lower_bound(_at_target(result))

    def lower_bound(self, evaluation: Evaluation) -> float:
        """The weighted product of what was spent up to an evaluation: it grows with each of them."""
        return weighted_product(self.values(evaluation), self._weights(self.search_for))

    def values(self, evaluation: Evaluation) -> tuple[float, ...]:
        """Every objective up to an evaluation, in their order."""
        return tuple(each.lower_bound(evaluation) for each in self.objectives.values())

    def picks(self, points: Mapping[int, Sequence[float]]) -> dict[str, int]:
        """Of points by trial, the one that each preference picks; points are not none."""
        return {name: min(points, key=lambda trial: weighted_product(points[trial], self._weights(name))) for name in self.preferences}

    def _weights(self, preference: str) -> tuple[float, ...]:
        return tuple(self.preferences[preference].get(name, 0.0) for name in self.objectives)


def _at_target(result: TrialResult) -> Evaluation:
    if result.outcome is not Outcome.REACHED or result.last is None:
        raise ValueError(f"trial {result.trial} ended {result.outcome}: only a trial that REACHED has a time to target")
    return result.last


def _require(missing: str | None) -> None:
    if missing is not None:
        raise ConfigError(f"objective: {missing}")


def device_of(evaluation: Evaluation, where: str = "this training") -> Device:
    """The device of a training, as an evaluation tells it."""
    is_known = evaluation.energy_joules is not None and evaluation.build_joules is not None
    fault = None if is_known else "it was not measured"
    return Device(kind=evaluation.device_kind, where=where, energy_fault=fault)
