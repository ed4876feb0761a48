"""The search space: a tree of the parameters that may vary, by config key.

A choice holds the subspace that each of its values opens, so a parameter that only one optimizer
has stands beneath that optimizer, and a condition on a missing parameter cannot be written. Numbers
are Optuna's distributions. This module does not know how a point is proposed or run: a sampler is
anything with Optuna's ``suggest_*`` methods, and a point is passed on as Hydra overrides.
"""

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from inspect import signature
from types import MappingProxyType
from typing import Any, Self, TypeAlias

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from autotune.errors import SearchSpaceError

Scalar: TypeAlias = bool | int | float | str | None


class _Number(BaseDistribution):
    """What numeric parameters have in common.

    With a step, ``high`` is on the grid that starts at ``low``.
    """

    low: Any
    high: Any
    kind: type[float]

    def as_param(self, value: Any, name: str = "") -> dict[str, Any] | None:
        """The sampler's parameter that stands for ``value``: its number, by its name.

        None if the value is not in the range.

        A float that is a whole number counts as an int: a config key of type float holds 20 as
        20.0.
        """
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return {name: self.kind(value)} if is_number and self._contains(value) else None


class Float(_Number, FloatDistribution):
    """A parameter that is a real number in [low, high], both included."""

    kind = float

    def suggest(self, trial: Any, name: str) -> float:
        """Ask the trial's sampler for a value of the parameter."""
        return float(trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log))


class Int(_Number, IntDistribution):
    """A parameter that is a whole number in [low, high], both included."""

    kind = int

    def suggest(self, trial: Any, name: str) -> int:
        """Ask the trial's sampler for a value of the parameter."""
        return int(trial.suggest_int(name, self.low, self.high, step=self.step, log=self.log))


class PowerOfTwo(Int):
    """A parameter that is a power of two in [low, high], both included and both powers of two.

    The sampler sees the exponent under the name ``log2(<key>)``, so neighbouring values differ by a
    factor of two: for low 32 and high 4096, for example, it suggests a whole number from 5 to 12.

    Raises:
        ValueError: a bound is not a power of two, or low is above high.
    """

    def __init__(self, low: int, high: int) -> None:
        super().__init__(low, high, log=True)
        for bound in (low, high):
            if bound < 1 or bound & (bound - 1):
                raise ValueError(f"{bound} is not a power of two, such as 1, 2, 4, 8")

    def suggest(self, trial: Any, name: str) -> int:
        """Ask the trial's sampler for a value of the parameter."""
        exponents = self.low.bit_length() - 1, self.high.bit_length() - 1
        return int(2 ** trial.suggest_int(_log2_name(name), *exponents))

    def as_param(self, value: Any, name: str = "") -> dict[str, Any] | None:
        """The sampler's parameter that stands for ``value``: the exponent, by its name.

        None if the value is not in the range.
        """
        is_inside = super().as_param(value) is not None and not isinstance(value, float)
        if not is_inside or value & (value - 1):
            return None
        return {_log2_name(name): value.bit_length() - 1}


_RANGES: dict[str, type[Float] | type[Int]] = {
    "float": Float,
    "int": Int,
    "power_of_two": PowerOfTwo,
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A parameter that takes one of several values, its options.

    Each option has the subspace that opens beneath it.

    A value is a scalar or a list; if the key is a config group, the value is the name of one of the
    group's files.

    Raises:
        ValueError: there is no option, or a value is repeated.
    """

    options: tuple[tuple[Any, "SearchSpace"], ...]

    def __post_init__(self) -> None:
        if not self.options:
            raise ValueError("no choices; list at least one value")
        counts = Counter(override_text(value) for value, _ in self.options)
        text, count = counts.most_common(1)[0]
        if count > 1:
            raise ValueError(f"choice {text} is repeated; list each value once")

    def suggest(self, trial: Any, name: str) -> Any:
        """Ask the trial's sampler for a value of the parameter."""
        label = trial.suggest_categorical(name, self._labels)
        return self.options[self._labels.index(label)][0]

    def index_of(self, value: Any) -> int | None:
        """Index of the option with a value, by its text, which tells ``1``, ``1.0`` and ``True``
        apart; None if no option has it.

        If there is no ``20.0``, ``20`` is looked up: a config key of type float holds a whole
        number as a float.
        """
        index = self._indices.get(override_text(value))
        if index is None and isinstance(value, float) and value.is_integer():
            return self.index_of(int(value))
        return index

    def as_param(self, value: Any, name: str = "") -> dict[str, Any] | None:
        """The sampler's parameter that stands for ``value``: the label, by its name.

        None if the value is no option.
        """
        index = self.index_of(value)
        return {name: self._labels[index]} if index is not None else None

    def branch(self, name: str, index: int) -> str:
        """Beginning of the qualified names of the parameters beneath the option of an index.

        ``name`` is the choice's own.
        """
        return f"{name}={self._branches[index]}/"

    @cached_property
    def _labels(self) -> list[Scalar]:
        """Labels by which samplers know the options: the values, or the texts of all where
        Python calls two of them equal.
        """
        return self._names([_label(value) for value, _ in self.options])

    @cached_property
    def _branches(self) -> list[str]:
        """The options in qualified names: their texts, without quotes unless two would be the
        same, as ``1`` and ``'1'``.
        """
        return self._names(
            [value if isinstance(value, str) else override_text(value) for value, _ in self.options]
        )

    def _names(self, names: list[Any]) -> list[Any]:
        """Names of the options, or their texts where two of these names are equal."""
        return names if len(set(names)) == len(names) else list(self._indices)

    @cached_property
    def _indices(self) -> dict[str, int]:
        """Index of each option, by its value's text."""
        return {override_text(value): index for index, (value, _) in enumerate(self.options)}


Parameter: TypeAlias = Float | Int | Choice


@dataclass(frozen=True, eq=False)
class Suggestion:
    """One point of a search space: values by config key.

    Two points are equal if their values are, with their types.
    """

    values: Mapping[str, Any]

    def as_overrides(self) -> list[str]:
        """The point as Hydra overrides, as a user would type them.

        A text with ``${`` then wants a backslash before it.
        """
        return [f"{key}={override_text(value)}" for key, value in self.values.items()]

    @property
    def key(self) -> tuple[str, ...]:
        """Key that is the same for equal points, whatever the order of their values."""
        return tuple(sorted(self.as_overrides()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Suggestion) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True)
class SearchSpace:
    """Tree of the parameters that may vary: the top level by config key, and the file of each
    parameter (for messages).

    Raises:
        SearchSpaceError: two parameters that can be open at once have the same config key.
    """

    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    gpu_only: frozenset[str] = field(default=frozenset(), compare=False)
    """Keys of the top level that are searched only where trainings run on a GPU."""

    def __post_init__(self) -> None:
        places: dict[str, str] = {}
        for _, key, _, chosen in self.walk():
            above = next(iter(chosen), key)
            place = f"beneath {above}" if chosen else key
            if places.setdefault(key, place) != place:
                raise SearchSpaceError(
                    f"{self.sources.get(above, 'search_space')}: {key}: stands twice"
                    f" ({places[key]}, {place}); use a key once among what can be open together"
                )

    @classmethod
    def from_mapping(cls, mapping: Mapping[Any, Any], source: str, where: str = "") -> Self:
        """Read a space from plain data, as a YAML file holds it.

        Args:
            mapping: domains by config key; a domain is ``{type: float, low: ..., high: ...}``, a
                list of values, or a choice tree. What stands beneath ``_gpu_`` at the top level is
                searched only where trainings run on a GPU.
            source: name of the file, for messages.
            where: name of the branch that ``mapping`` stands beneath, for messages.

        Raises:
            SearchSpaceError: a key or domain is wrong; names the file, the key, what was found and
                what is accepted.
        """
        if not isinstance(mapping, Mapping):
            raise SearchSpaceError(
                f"{source}: {where}: found {short(mapping)}, not a mapping from config key to"
                " domain"
                if where  # else the file may be anything, and hold secrets
                else f"{source}: the file is no mapping from config key to domain"
            )
        parameters: dict[str, Parameter] = {}
        if not where and "_gpu_" in mapping:
            of_gpus = cls.from_mapping(mapping["_gpu_"], source, "_gpu_")
            others = cls.from_mapping(
                {key: domain for key, domain in mapping.items() if key != "_gpu_"}, source
            )
            return others.merged_with(replace(of_gpus, gpu_only=frozenset(of_gpus.parameters)))
        for key, domain in mapping.items():
            name = f"{where}/{key}" if where else str(key)
            if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_][\w@/]*(\.[\w-]+)*", key):
                raise SearchSpaceError(
                    f"{source}: {name}: is not a config key, such as optimizer.lr"
                )
            try:
                parameters[key] = _parameter(domain, source, name)
            except (TypeError, ValueError) as error:
                raise SearchSpaceError(f"{source}: {name}: {error}") from error
        return cls(parameters, dict.fromkeys(parameters, source))

    def as_mapping(self) -> dict[str, Any]:
        """The space as plain data that ``from_mapping`` reads."""
        return {key: as_domain(parameter) for key, parameter in self.parameters.items()}

    def merged_with(self, other: Self) -> Self:
        """Union of two spaces.

        Raises:
            SearchSpaceError: a key is in both spaces.
        """
        for key in other.parameters:
            if key in self.parameters:
                raise SearchSpaceError(
                    f"{other.sources.get(key, 'search_space')}: {key}: is also in"
                    f" {self.sources.get(key, 'search_space')}; use each key once in an"
                    " experiment's search_space"
                )
        return replace(
            self,
            parameters={**self.parameters, **other.parameters},
            sources={**self.sources, **other.sources},
            gpu_only=self.gpu_only | other.gpu_only,
        )

    def for_cpus(self) -> Self:
        """Copy of the space without the keys that are searched only where trainings run on a
        GPU.
        """
        kept = {
            key: parameter for key, parameter in self.parameters.items() if key not in self.gpu_only
        }
        return replace(self, parameters=kept, gpu_only=frozenset())

    def suggest(self, trial: Any) -> Suggestion:
        """Ask the trial's sampler for one point.

        Only parameters of branches that its choices open are suggested.
        """
        return self.point(lambda name, _, parameter: parameter.suggest(trial, name))

    def point_of(self, lookup: Callable[[str], Any]) -> Suggestion | None:
        """The point at which a configuration lies; None if the space does not contain it.

        Args:
            lookup: gives the configuration's value of a config key; for a config group, the name of
                its chosen file.
        """
        values: dict[str, Any] = {}
        for _, key, parameter, value in self._opened(lambda _, key, __: lookup(key)):
            if parameter.as_param(value) is None:
                return None
            values[key] = int(value) if isinstance(parameter, Int) else value
        return Suggestion(values)

    def params_of(self, suggestion: Suggestion) -> dict[str, Any]:
        """A point as the sampler's parameters, for enqueueing: the sampler's values by qualified
        name.
        """
        params: dict[str, Any] = {}
        for name, key, parameter, value in self._opened(lambda _, key, __: suggestion.values[key]):
            param = parameter.as_param(value, name)
            if param is None:
                raise SearchSpaceError(f"{key}: {value!r} is not in the search space")
            params |= param
        return params

    def point(self, value_of: Callable[[str, str, Parameter], Any]) -> Suggestion:
        """The point whose parameters have the values of ``value_of``, outer ones first.

        Args:
            value_of: gives the value of a parameter, by its qualified name, its config key and the
                parameter itself.
        """
        return Suggestion({key: value for _, key, _, value in self._opened(value_of)})

    def _opened(
        self, value_of: Callable[[str, str, Parameter], Any], branch: str = ""
    ) -> Iterator[tuple[str, str, Parameter, Any]]:
        """Yield qualified name, config key, parameter and value of all parameters that the values
        of ``value_of``, as of ``point``, open.
        """
        for key, parameter in self.parameters.items():
            value = value_of(branch + key, key, parameter)
            yield branch + key, key, parameter, value
            if isinstance(parameter, Choice) and (index := parameter.index_of(value)) is not None:
                # same class
                yield from parameter.options[index][1]._opened(  # noqa: SLF001
                    value_of, parameter.branch(branch + key, index)
                )

    @property
    def source(self) -> str:
        """The space's files, for messages."""
        return ", ".join(dict.fromkeys(self.sources.values())) or "search_space"

    @property
    def keys(self) -> list[str]:
        """Config keys of the parameters of every branch, outer ones first."""
        return list(dict.fromkeys(key for _, key, _, _ in self.walk()))

    @property
    def choices(self) -> list[str]:
        """Config keys of the choices of every branch, outer ones first."""
        return list(
            dict.fromkeys(
                key for _, key, parameter, _ in self.walk() if isinstance(parameter, Choice)
            )
        )

    def walk(
        self, branch: str = "", chosen: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[tuple[str, str, Parameter, Mapping[str, Any]]]:
        """Yield every parameter of every branch: qualified name, config key, parameter, and the
        values of the choices that open it, outermost first.
        """
        for key, parameter in self.parameters.items():
            yield branch + key, key, parameter, chosen
            if isinstance(parameter, Choice):
                for index, (value, beneath) in enumerate(parameter.options):
                    deeper = parameter.branch(branch + key, index)
                    yield from beneath.walk(deeper, {**chosen, key: value})

    def probes(self) -> Iterator[tuple[str, Any, Suggestion]]:
        """Yield points that together open every branch: for each option of each choice, its name,
        its value and a point that takes it.

        Other choices take their first options, and numbers their lowest values. Two more points,
        with an empty name, take the first options with the lowest and with the highest numbers.
        """
        for name, key, parameter, chosen in self.walk():
            if isinstance(parameter, Choice):
                for value, _ in parameter.options:
                    yield name, value, self._probe({**chosen, key: value}, high=False)
        for high in (False, True):
            yield "", None, self._probe({}, high=high)

    def _probe(self, chosen: Mapping[str, Any], *, high: bool) -> Suggestion:
        def value_of(_: str, key: str, parameter: Parameter) -> Any:
            if isinstance(parameter, Choice):
                return chosen.get(key, parameter.options[0][0])
            return parameter.high if high else parameter.low

        return self.point(value_of)

    def without(self, name: str, value: Any, branch: str = "") -> Self:
        """Copy of the space without one option of one choice.

        Name and value are those that ``probes`` yields.

        Raises:
            SearchSpaceError: the option was the last one of its choice.
        """
        parameters = dict(self.parameters)
        for key, parameter in parameters.items():
            if isinstance(parameter, Choice):
                kept = tuple(
                    (option, beneath.without(name, value, parameter.branch(branch + key, index)))
                    for index, (option, beneath) in enumerate(parameter.options)
                    if branch + key != name or override_text(option) != override_text(value)
                )
                if not kept:
                    raise SearchSpaceError(
                        f"{self.sources.get(key, 'search_space')}: {name}: none of its choices can"
                        " run on this machine"
                    )
                parameters[key] = Choice(options=kept)
        return replace(self, parameters=parameters)


def as_domain(parameter: Any) -> Any:
    """A parameter or a distribution of Optuna's as plain data as a YAML file holds it; anything
    else as it is.
    """
    if isinstance(parameter, CategoricalDistribution):
        return list(parameter.choices)
    if isinstance(parameter, Choice):
        if any(beneath.parameters for _, beneath in parameter.options):
            return {
                "type": "choice",
                "choices": {value: beneath.as_mapping() for value, beneath in parameter.options},
            }
        return [value for value, _ in parameter.options]
    if not isinstance(parameter, FloatDistribution | IntDistribution):
        return parameter
    domain: dict[str, Any] = {"low": parameter.low, "high": parameter.high}
    if isinstance(parameter, PowerOfTwo):
        return {"type": "power_of_two", **domain}
    kind = "int" if isinstance(parameter, IntDistribution) else "float"
    settings = {"log": parameter.log, "step": parameter.step}
    return {"type": kind, **domain, **{name: value for name, value in settings.items() if value}}


def _log2_name(name: str) -> str:
    """Name under which a sampler sees the exponent of a power of two, by the parameter's
    qualified name.
    """
    branch, slash, key = name.rpartition("/")
    return f"{branch}{slash}log2({key})"


def short(value: Any) -> str:
    """A value as a message shows it: what comes from a file may be long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def override_text(value: Any) -> str:
    """Text of a value in Hydra's override grammar, which parses back to the same value and type."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return _string_text(value)
    if isinstance(value, Mapping):
        items = (f"{_string_text(str(key))}:{override_text(item)}" for key, item in value.items())
        return f"{{{','.join(items)}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(map(override_text, value))}]"
    raise TypeError(f"{value!r} cannot be written as an override; use scalars, lists and mappings")


@lru_cache(maxsize=4096)
def _string_text(value: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_\-./]*", value) and value.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    )
    if plain:
        return value
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", value).replace("'", "\\'")
    return f"'{escaped}'"


def _label(value: Any) -> Scalar:
    """Label by which the sampler knows an option's value: a finite scalar, since samplers and
    storages take nothing else.
    """
    is_finite = not isinstance(value, float) or math.isfinite(value)
    is_label = isinstance(value, Scalar) and is_finite
    return value if is_label else override_text(value)


def _parameter(domain: Any, source: str, name: str) -> Parameter:
    if isinstance(domain, Sequence) and not isinstance(domain, str):
        domain = {"type": "choice", "choices": domain}
    if not isinstance(domain, Mapping):
        raise ValueError(
            f"found {short(domain)}, not a list of values or a mapping with type: float, int,"
            " power_of_two or choice"
        )
    kind = domain.get("type")
    if kind == "choice":
        return _choice(domain, source, name)
    if kind not in _RANGES:
        raise ValueError(f"type: found {short(kind)}, not float, int, power_of_two or choice")
    _check_fields(domain, signature(_RANGES[kind]).parameters)
    settings = {key: _setting(kind, key, value) for key, value in domain.items() if key != "type"}
    if missing := [bound for bound in ("low", "high") if bound not in settings]:
        raise ValueError(f"{missing[0]} is missing; {kind} needs low and high")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # high is lowered to a multiple of the step
        try:
            return _RANGES[kind](**settings)
        except ArithmeticError as error:
            raise ValueError("step: is too small for the range") from error


def _setting(kind: str, key: str, value: Any) -> Any:
    """Value of a domain's field in the type that its parameter takes.

    ``1e-2``, which YAML reads as text, counts as a number.
    """
    if key == "log":
        if not isinstance(value, bool):
            raise ValueError(f"log: found {short(value)}, not true or false")
        return value
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{key}: found {short(value)}, not a finite number")
    if kind == "float":
        return number
    # samplers and storages hold whole numbers as floats
    if not number.is_integer() or abs(number) > 2**53:
        raise ValueError(f"{key}: found {short(value)}, not a whole number from -2**53 to 2**53")
    return int(number)


def _check_fields(domain: Mapping[Any, Any], fields: Collection[str]) -> None:
    for key in domain:
        if key != "type" and key not in fields:
            raise ValueError(f"unknown field {key!r}; known are type, {', '.join(fields)}")


def _choice(domain: Mapping[Any, Any], source: str, name: str) -> Choice:
    _check_fields(domain, ["choices"])
    choices = domain.get("choices")
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return Choice(options=tuple((value, SearchSpace()) for value in choices))
    if not isinstance(choices, Mapping):
        raise ValueError(
            f"choices: found {short(choices)}, not a list of values or a mapping from value to what"
            " opens beneath it"
        )
    return Choice(
        options=tuple(
            (
                value,
                SearchSpace.from_mapping(
                    {} if beneath is None else beneath, source, f"{name}={_label(value)}"
                ),
            )
            for value, beneath in choices.items()
        )
    )
