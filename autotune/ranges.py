"""Parameters that are numbers in a range: how they are written in a file, what they refuse, and how a sampler is asked for them.

A choice, which opens subspaces, is part of the tree in ``autotune.space``. A sampler is anything with Optuna's ``suggest_*`` methods.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, Protocol, TypeAlias

Scalar: TypeAlias = bool | int | float | str | None
Range: TypeAlias = "Float | Int | PowerOfTwo"


class SuggestsValues(Protocol):
    """The methods of an Optuna trial by which a search space asks for values."""

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> float:
        """Suggest a float in [low, high]."""
        ...

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Suggest a whole number in [low, high]."""
        ...

    def suggest_categorical(self, name: str, choices: Sequence[Scalar]) -> Scalar:
        """Suggest one of the choices."""
        ...


@dataclass(frozen=True, kw_only=True)
class Float:
    """A parameter that is a real number in [low, high], both included.

    Raises:
        ValueError: the bounds, ``log`` and ``step`` contradict each other.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, self.log)
        if self.step is not None:
            _check_step(self.low, self.high, self.log, self.step)

    def suggest(self, trial: SuggestsValues, name: str) -> float:
        """Ask the trial's sampler for a value of the parameter."""
        low, high = self.ends()
        return trial.suggest_float(name, low, high, step=self.step, log=self.log)

    def as_param(self, value: Any) -> tuple[str, Any] | None:
        """``value`` as the sampler's parameter: a prefix of its name, and the number; None if the value is not in the range."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return None
        if self.step is not None and not _on_grid(value, self.low, self.step):
            return None
        return "", float(value)

    def ends(self) -> tuple[Any, Any]:
        """Lowest and highest value; with a step, the highest value on the grid that starts at ``low``."""
        if self.step is None:
            return self.low, self.high
        low, high, step = (Decimal(repr(number)) for number in (self.low, self.high, self.step))
        return self.low, float(low + (high - low) // step * step)


@dataclass(frozen=True, kw_only=True)
class Int:
    """A parameter that is a whole number in [low, high], both included.

    Raises:
        ValueError: the bounds, ``log`` and ``step`` contradict each other.
    """

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, self.log)
        if self.step != 1:
            _check_step(self.low, self.high, self.log, self.step)

    def suggest(self, trial: SuggestsValues, name: str) -> int:
        """Ask the trial's sampler for a value of the parameter."""
        low, high = self.ends()
        return trial.suggest_int(name, low, high, step=self.step, log=self.log)

    def as_param(self, value: Any) -> tuple[str, Any] | None:
        """``value`` as the sampler's parameter: a prefix of its name, and the number; None if the value is not in the range.

        A float that is a whole number counts as an int: a config key of type float holds 20 as 20.0.
        """
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            return None
        return ("", value) if (value - self.low) % self.step == 0 else None

    def ends(self) -> tuple[Any, Any]:
        """Lowest and highest value; with a step, the highest value on the grid that starts at ``low``."""
        return self.low, self.high - (self.high - self.low) % self.step


@dataclass(frozen=True, kw_only=True)
class PowerOfTwo:
    """A parameter that is a power of two in [low, high], both included and both powers of two.

    The sampler sees the exponent under the name ``log2(<key>)``, so neighbouring values differ by a factor of two: for low 32 and high
    4096, for example, it suggests a whole number from 5 to 12.

    Raises:
        ValueError: a bound is not a power of two, or low is above high.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound < 1 or bound & (bound - 1):
                raise ValueError(f"{name} {bound} is not a power of two; accepted are 1, 2, 4, 8, ...")
        _check_range(self.low, self.high, log=False)

    def suggest(self, trial: SuggestsValues, name: str) -> int:
        """Ask the trial's sampler for a value of the parameter."""
        exponent = trial.suggest_int(log2_name(name), self.low.bit_length() - 1, self.high.bit_length() - 1)
        return int(2**exponent)

    def as_param(self, value: Any) -> tuple[str, Any] | None:
        """``value`` as the sampler's parameter: a prefix of its name, and the exponent; None if the value is not in the range."""
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high or value & (value - 1):
            return None
        return "log2", value.bit_length() - 1

    def ends(self) -> tuple[Any, Any]:
        """Lowest and highest value."""
        return self.low, self.high


_KINDS: dict[str, type[Float] | type[Int] | type[PowerOfTwo]] = {"float": Float, "int": Int, "power_of_two": PowerOfTwo}


def read_range(domain: Mapping[Any, Any]) -> Range:
    """Read a range from plain data such as ``{type: float, low: ..., high: ...}``.

    Raises:
        ValueError: the type or a field is unknown, missing or wrong; names the field, what was found and what is accepted.
    """
    kind = domain.get("type")
    if kind not in _KINDS:
        raise ValueError(f"type: found {short(kind)}, accepted are float, int, power_of_two, choice")
    made = _KINDS[kind]
    check_fields(domain, [entry.name for entry in fields(made)])
    for bound in ("low", "high"):
        if bound not in domain:
            raise ValueError(f"{bound} is missing; {kind} needs low and high")
    return made(**{key: _number(kind, key, value) for key, value in domain.items() if key != "type"})


def range_domain(parameter: Range) -> dict[str, Any]:
    """A range as plain data that ``read_range`` reads."""
    kind = next(name for name, made in _KINDS.items() if type(parameter) is made)
    settings = {entry.name: getattr(parameter, entry.name) for entry in fields(parameter)}
    return {"type": kind} | {name: value for name, value in settings.items() if value is not None and value is not False}


def check_fields(domain: Mapping[Any, Any], accepted: Collection[str]) -> None:
    """Refuse the fields of a domain besides ``type`` that are not accepted.

    Raises:
        ValueError: a field is unknown.
    """
    for key in domain:
        if key != "type" and key not in accepted:
            raise ValueError(f"unknown field {key!r}; accepted are type, {', '.join(sorted(accepted))}")


def log2_name(name: str) -> str:
    """Name under which a sampler sees the exponent of a power of two, by the parameter's qualified name."""
    branch, slash, key = name.rpartition("/")
    return f"{branch}{slash}log2({key})"


def short(value: Any) -> str:
    """A value as a message shows it: what comes from a file may be long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_MAX_SHOWN = 200
_MAX_WHOLE = 2**53
"""Largest end of a range of whole numbers: samplers and storages hold them as floats, which skip whole numbers beyond."""


def _number(kind: str, key: str, value: Any) -> Any:
    """Value of a domain's field in the type that its parameter takes; ``1e-2``, which YAML reads as text, counts as a number."""
    if key == "log":
        if not isinstance(value, bool):
            raise ValueError(f"log: found {short(value)}, accepted is true or false")
        return value
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{key}: found {short(value)}, accepted is a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key}: found {short(value)}, accepted is a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{key}: found {short(value)}, accepted is a number that a float can hold") from None
    if kind == "float":
        return number
    if not number.is_integer():
        raise ValueError(f"{key}: found {short(value)}, accepted is a whole number")
    if kind == "int" and abs(value) > _MAX_WHOLE:
        raise ValueError(f"{key}: found {short(value)}, accepted is a whole number from -2**53 to 2**53")
    return int(value)


def _check_range(low: float, high: float, log: bool) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"low {low}, high {high}: accepted are finite numbers")
    if low > high:
        raise ValueError(f"low {low} is above high {high}; accepted is low <= high")
    if log and low <= 0:
        raise ValueError(f"log: true with low {low}; accepted is low > 0")


def _check_step(low: float, high: float, log: bool, step: float) -> None:
    if log:
        raise ValueError("log and step together; accepted is one of them")
    if not step > 0 or step > (high - low) * (1 + 1e-9):
        raise ValueError(f"step {step}: accepted is above 0 and at most high - low = {high - low}")


def _on_grid(value: float, low: float, step: float) -> bool:
    steps = (value - low) / step
    return math.isclose(steps, round(steps), rel_tol=0.0, abs_tol=1e-8)
