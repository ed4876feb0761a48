"""YAML that may come from anyone, read to plain data within limits, or refused in one line.

YAML's aliases let a few lines stand for gigabytes, and its nesting can exceed Python's stack. Values are counted here as the file is
parsed, an alias as all that it stands for, so that a file is refused before anything is made of it.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import ConfigError

MAX_VALUES_VARIABLE = "AUTOTUNE_YAML_MAX_VALUES"
"""Environment variable that raises the limit of values (and of bytes, a hundred for each value): files are read before any key is known."""

_MAX_VALUES = 10_000
_BYTES_PER_VALUE = 100
_MAX_DEPTH = 32
MAX_DIGITS = 100
"""Characters of the longest number that is read; Python takes minutes for one of a million."""

_ONE_LINE = re.compile(r"\s+")


def read_yaml(path: Path, shown: str | None = None, *, max_values: int = 0) -> Any:
    """Plain data of a YAML file; None if it is empty.

    Args:
        shown: the file's name in messages; None for its path.
        max_values: number of values that are accepted at least, whatever the limit for files of a configuration is.

    Raises:
        ConfigError: the file cannot be read, is no YAML, repeats a key, or is larger than the limits; names the file and the line, and
            nothing of the file's content but single words.
    """
    where = shown or str(path)
    max_bytes = max(max_values, _max_values()) * _BYTES_PER_VALUE
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise ConfigError(f"{where}: found more than {max_bytes:,} bytes; {_raised(max_values)}")
    try:
        return load_yaml(content.decode("utf-8"), where, max_values=max_values)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is not text; accepted is YAML in UTF-8") from error


def load_yaml(text: str, where: str, *, max_values: int = 0) -> Any:
    """Plain data of a text in YAML, as ``read_yaml``; ``where`` names the text in messages."""
    try:
        return _Loader(text, max_values).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: {_ONE_LINE.sub(' ', str(error.problem or error.context))}") from error
    except yaml.YAMLError as error:
        problem = str(error).replace('in "<unicode string>",', "at")
        raise ConfigError(f"{where}: {_ONE_LINE.sub(' ', problem)}") from error


def yaml_text(content: Any, **style: Any) -> str:
    """YAML of plain data, in which every text but plain words has quotes, so that no reader takes one for a number or a truth value.

    Args:
        style: further arguments of ``yaml.dump``.
    """
    text: str = yaml.dump(content, Dumper=_Dumper, **{"sort_keys": False, "allow_unicode": True, "width": math.inf, **style})
    return text


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which leaves quotes out by YAML 1.1 as PyYAML understands it: other readers take 1e-3 for a number."""

    def represent_text(self, text: str) -> yaml.Node:
        is_word = _WORD.fullmatch(text) is not None and text.lower() not in _NO_TEXTS
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_word else '"')


_WORD = re.compile(r"[A-Za-z_/](?:[\w./ -]*[\w./-])?", re.ASCII)
_NO_TEXTS = frozenset({"null", "none", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf"})
_Dumper.add_representer(str, _Dumper.represent_text)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits.

    It differs in plain values, too, as OmegaConf's loader does: a repeated key is refused, 1e-2 is a number, and a date is a text.
    """

    def __init__(self, stream: str, max_values: int) -> None:
        super().__init__(stream)
        self._max_values = max(max_values, _max_values())
        self._depth = self._num_values = 0
        self._sizes: dict[int, int] = {}
        """Values in each node that is composed, by its identity; a node that is still being composed is not in it."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        is_alias, mark, before = isinstance(event, yaml.AliasEvent), event.start_mark, self._num_values
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _refused(f"found more than {_MAX_DEPTH} levels; accepted is a flatter file", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise _refused("found an alias inside of what it stands for; accepted are values that end", mark)
        self._num_values += self._sizes[id(node)] if is_alias else 1
        if self._num_values > self._max_values:
            raise _refused(
                f"found more than {self._max_values:,} values, each alias counted as all that it stands for; {_raised(self._max_values)}",
                mark,
            )
        self._sizes[id(node)] = self._num_values - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # !!int word, !!bool maybe, ...
            raise _refused(f"found no {node.tag.rpartition(':')[2]}, which its tag says it is", node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise _refused(f"{key}: stands twice; accepted is each key once", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.Node) -> Any:
        """A number, unless it is longer than ``MAX_DIGITS``."""
        if isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_DIGITS:
            problem = f"found a number of more than {MAX_DIGITS} characters; accepted is a shorter one, or a text in quotes"
            raise _refused(problem, node.start_mark)
        make = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        return make(node)  # type: ignore[arg-type]  # a scalar, which the constructors check


def _refused(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _raised(max_values: int) -> str:
    most = max(max_values, _max_values())
    return f"{MAX_VALUES_VARIABLE}=NUMBER in the environment raises the limit of {most:,} values of {_BYTES_PER_VALUE} bytes"


def _max_values() -> int:
    text = os.environ.get(MAX_VALUES_VARIABLE, str(_MAX_VALUES))
    if not re.fullmatch(r"[1-9][0-9]{0,11}", text):
        raise ConfigError(f"{MAX_VALUES_VARIABLE}: found {text!r}, accepted is a whole number from 1")
    return int(text)


_Loader.yaml_constructors = dict(_Loader.yaml_constructors)
for _tag in ("binary", "timestamp", "set", "omap", "pairs"):  # they make other than plain data
    del _Loader.yaml_constructors[f"tag:yaml.org,2002:{_tag}"]
for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789."))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
