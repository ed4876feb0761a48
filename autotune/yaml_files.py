"""YAML that may come from anyone, read to plain data, or refused in one line.

YAML's aliases let a few lines stand for gigabytes. Values are counted, an alias as all that it
stands for, so that a file is refused before anything is made of it.
"""

import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import ConfigError

_MAX_VALUES = 1_000_000


def read_yaml(path: Path, shown: str | None = None) -> Any:
    """Plain data of a YAML file; None if it is empty.

    Args:
        shown: the file's name in messages; None for its path.

    Raises:
        ConfigError: the file cannot be read, is no YAML, repeats a key, or its aliases stand for
            too much; names the file and the line.
    """
    where = shown or str(path)
    try:
        return load_yaml(path.read_text(encoding="utf-8"), where)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: cannot be read: it is not UTF-8") from error


def load_yaml(text: str, where: str) -> Any:
    """Plain data of a text in YAML, as ``read_yaml``; ``where`` names the text in messages."""
    try:
        return _Loader(text).get_single_data()
    except RecursionError as error:
        raise ConfigError(f"{where}: is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{where}{line}: {' '.join(str(error.problem or error.context).split())}"
        ) from error
    # !!int word, !!bool maybe, ...
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error


def yaml_text(content: Any, **style: Any) -> str:
    """YAML of plain data, in which every text but plain words has quotes, so that no reader takes
    one for a number or a truth value.

    Args:
        style: further arguments of ``yaml.dump``.
    """
    text: str = yaml.dump(
        content,
        Dumper=_Dumper,
        **{"sort_keys": False, "allow_unicode": True, "width": math.inf, **style},
    )
    return text


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which leaves quotes out by YAML 1.1 as PyYAML understands it: other
    readers take 1e-3 for a number.
    """

    def represent_text(self, text: str) -> yaml.Node:
        is_word = _WORD.fullmatch(text) is not None and text.lower() not in _NO_TEXTS
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_word else '"')


_WORD = re.compile(r"[A-Za-z_/](?:[\w./ -]*[\w./-])?", re.ASCII)
_NO_TEXTS = frozenset(
    {"null", "none", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf"}
)
_Dumper.add_representer(str, _Dumper.represent_text)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, in which aliases stand for a limited number of values.

    It differs in plain values, too, as OmegaConf's loader does: a repeated key is refused, 1e-2 is
    a number, and a date is a text.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _num_values(node, {})
        return node


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of values in a node, an alias counted as all that it stands for.

    Args:
        known: the numbers of nodes that were counted before, by their identity.

    Raises:
        yaml.MarkedYAMLError: they are too many, or a mapping has a key twice.
    """
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = _MAX_VALUES  # of an alias within what it stands for
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        parts = chain.from_iterable(parts)
    known[id(node)] = 1 + sum(_num_values(part, known) for part in parts)
    if known[id(node)] > _MAX_VALUES:
        raise yaml.MarkedYAMLError(
            problem="found aliases that stand for too many values", problem_mark=node.start_mark
        )
    return known[id(node)]


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value}: stands twice", problem_mark=key.start_mark
                )
            seen.add(key.value)


_Loader.yaml_constructors = dict(_Loader.yaml_constructors)
for _tag in ("binary", "timestamp", "set", "omap", "pairs"):  # they make other than plain data
    del _Loader.yaml_constructors[f"tag:yaml.org,2002:{_tag}"]
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
