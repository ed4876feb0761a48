"""A search space as flat domains by name, for libraries that have a space of their own.

Every parameter of every branch is there at once; which of them a point has follows from its
choices. A choice is asked for by its option's position, so that no library has to hold lists,
booleans or nothing as values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.space import Scalar, SearchSpace, Suggestion, override_text


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number in [low, high], both included."""

    low: float
    high: float
    is_log: bool
    is_whole: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options by position; those that are all numbers are sorted, and are in order."""

    labels: tuple[Scalar, ...]
    are_ordered: bool

    def position(self, label: Scalar) -> int:
        """Where a label stands."""
        return [override_text(each) for each in self.labels].index(override_text(label))


class FlatDomains:
    """The domains of a space by qualified name, less those of one value, and points in both
    directions.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        asked = _Domains()
        for name, _, parameter, _ in space.walk():
            parameter.suggest(asked, name)
        self.domains: dict[str, Number | Options] = {
            name: domain for name, domain in asked.found.items() if not _is_constant(domain)
        }
        self._constants = {
            name: _lowest(domain) for name, domain in asked.found.items() if _is_constant(domain)
        }
        self._all = asked.found

    def suggestion(self, values: Mapping[str, Any]) -> Suggestion:
        """The point of a library's values by name."""
        return self._space.suggest(_Values(self._all, {**self._constants, **values}))

    def values(self, suggestion: Suggestion) -> dict[str, Any]:
        """A point as a library takes it: the lowest value where a parameter's branch is not
        open.
        """
        params = self._space.params_of(suggestion)
        found: dict[str, Any] = {}
        for name, domain in self.domains.items():
            if name not in params:
                found[name] = _lowest(domain)
            else:
                found[name] = (
                    domain.position(params[name]) if isinstance(domain, Options) else params[name]
                )
        return found


def _is_constant(domain: Number | Options) -> bool:
    return len(domain.labels) == 1 if isinstance(domain, Options) else domain.low == domain.high


def _lowest(domain: Number | Options) -> float:
    if isinstance(domain, Options):
        return 0
    return int(domain.low) if domain.is_whole else domain.low


class _Domains:
    """Notes what a space asks a sampler for."""

    def __init__(self) -> None:
        self.found: dict[str, Number | Options] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        self.found[name] = Number(low=low, high=high, is_log=log, is_whole=False)
        return low

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        self.found[name] = Number(low=low, high=high, is_log=log, is_whole=True)
        return low

    def suggest_categorical(self, name: str, choices: Sequence[Scalar]) -> Scalar:
        are_ordered = all(
            isinstance(each, int | float) and not isinstance(each, bool) for each in choices
        )
        labels = tuple(sorted(choices)) if are_ordered else tuple(choices)  # type: ignore[type-var]
        self.found[name] = Options(labels=labels, are_ordered=are_ordered)
        return choices[0]


class _Values:
    """Answers what a space asks a sampler for with given values."""

    def __init__(self, domains: Mapping[str, Number | Options], values: Mapping[str, Any]) -> None:
        self._domains = domains
        self._values = values

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        return min(max(float(self._values[name]), low), high)

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        return min(max(round(float(self._values[name])), low), high)

    def suggest_categorical(self, name: str, choices: Sequence[Scalar]) -> Scalar:
        domain = self._domains[name]
        assert isinstance(domain, Options)
        return domain.labels[int(self._values[name])]
