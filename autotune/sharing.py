"""Equal texts in plain data as one object: thousands of records read from JSON or from other processes repeat the same keys and words."""

from typing import Any

_MAX_TEXTS = 10_000


class SharedTexts:
    """Keeps the texts of the data that it is given, up to some thousands, and puts them in the place of equal ones in later data."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def of(self, value: Any) -> Any:
        """A copy of a value of plain data whose texts are those of earlier values, where these had equal ones."""
        kind = type(value)
        if kind is str:
            return self._texts.setdefault(value, value) if len(self._texts) < _MAX_TEXTS else self._texts.get(value, value)
        if kind is dict:
            return {self.of(key): self.of(part) for key, part in value.items()}
        return kind(map(self.of, value)) if kind is list or kind is tuple else value
