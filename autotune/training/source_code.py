"""The source text of definitions together with all that they use of autotune's own: what a stand-alone script is made of.

Text is copied as it stands, with its comments, so that a reader of the script finds what was trained. It is changed in few places:
methods that only other strategies and checkpoints call are left out, ``autotune.training.local_files`` takes the place of what reads URLs,
and of two definitions of one name the second gets its module's name as a suffix.
"""

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError

_LEFT_OUT = ("pipeline_layers", "tensor_plan", "state_dict", "load_state_dict", "num_bytes")
"""Methods of autotune's classes that the script of a training by one process never calls."""

_LOCAL_FILES = "autotune.training.local_files"
_STAND_INS = {
    ("autotune.remote.path", "located"),
    ("autotune.remote.path", "RemotePath"),
    ("autotune.remote.cache", "fetched"),
    ("autotune.download", "obtain"),
}
"""Definitions by module and name in whose place ``_LOCAL_FILES`` has one of the same name."""

_FOR_TOOLS = re.compile(r"\s*# (noqa(?!: BLE)|type: ignore).*$", re.MULTILINE)


@dataclass(frozen=True)
class _Module:
    """One module's source, by what it defines and imports at its top level."""

    name: str
    lines: list[str]
    definitions: Mapping[str, ast.stmt]
    imports: Mapping[str, tuple[str, str | None]]
    """Module, and the name within it or None for the module itself, by the name that the import binds."""
    purpose: str
    """First line of the module's docstring."""

    def first_line(self, definition: ast.stmt) -> int:
        """Index of a definition's first line, which is that of its decorators or of the comments above."""
        decorators: list[ast.expr] = getattr(definition, "decorator_list", [])
        first = min([definition.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        while first and self.lines[first - 1].startswith("#"):
            first -= 1
        return first


class SourceCode:
    """Collects definitions, with all that they use of autotune's own, and gives them unique names.

    Args:
        reserved: names that the collected definitions must not have.
    """

    def __init__(self, reserved: Iterable[str]) -> None:
        self._taken = set(reserved)
        self._names: dict[tuple[str, str], str] = {}
        self._texts: dict[str, dict[int, str]] = {}
        self._used_modules: dict[str, set[str]] = {}
        self.imports: set[str] = set()
        """Import statements that the collected definitions need, of modules other than autotune's."""

    def add(self, module_name: str, name: str) -> str:
        """Collect a definition and all that it uses, and return the name that it has in the collected text.

        Raises:
            ConfigError: the module does not define the name at its top level.
        """
        if (module_name, name) in _STAND_INS:
            module_name = _LOCAL_FILES
        if (module_name, name) in self._names:
            return self._names[module_name, name]
        module = _read_module(module_name)
        if name not in module.definitions:
            raise ConfigError(f"{module_name} does not define {name} at its top level, so that its source cannot be taken")
        unique = name if name not in self._taken else f"{name}_{module_name.rpartition('.')[2]}"
        self._taken.add(unique)
        self._names[module_name, name] = unique
        self._used_modules.setdefault(module_name, set())
        definition = module.definitions[name]
        self._texts.setdefault(module_name, {})[module.first_line(definition)] = self._text(module, definition)
        return unique

    def __str__(self) -> str:
        """The collected definitions, a module's below those of the modules that it uses."""
        sections = []
        for name in TopologicalSorter({name: sorted(used) for name, used in self._used_modules.items()}).static_order():
            texts = self._texts[name]
            sections.append("\n\n".join([f"# {name}: {_read_module(name).purpose}", *(texts[line] for line in sorted(texts))]))
        return "\n\n\n".join(sections)

    def _text(self, module: _Module, definition: ast.stmt) -> str:
        """A definition's lines, without methods that are left out and with the names that the collected text has."""
        first, last = module.first_line(definition), definition.end_lineno or definition.lineno
        lines = dict(enumerate(module.lines[first:last], start=first))
        left_out = [node for node in getattr(definition, "body", ()) if getattr(node, "name", None) in _LEFT_OUT]
        for node in left_out:
            for line in range(module.first_line(node), node.end_lineno or node.lineno):
                del lines[line]
        for node in sorted(_names(definition, left_out), key=lambda node: (node.lineno, node.col_offset), reverse=True):
            final = self._final_name(module, node.id)
            if final != node.id:
                _replace(lines, node.lineno - 1, node.col_offset, node.id, final)
        if isinstance(definition, ast.FunctionDef | ast.ClassDef):
            line = definition.lineno - 1
            final = self._names[module.name, definition.name]
            lines[line] = re.sub(rf"\b{definition.name}\b", final, lines[line], count=1)
        text = "\n".join(lines[line] for line in sorted(lines))
        return _FOR_TOOLS.sub("", text)

    def _final_name(self, module: _Module, name: str) -> str:
        """The name that the collected text has for a name in a module, after collecting what the name stands for."""
        if name in module.definitions:
            return self.add(module.name, name)
        source, original = module.imports.get(name, ("", None))
        if not source:
            return name
        if not source.startswith("autotune."):
            self.imports.add(_import_statement(source, original, name))
            return name
        assert original is not None, f"{module.name} imports the module {source} as a whole"
        final = self.add(source, original)
        stands_in = _LOCAL_FILES if (source, original) in _STAND_INS else source
        if stands_in != module.name:
            self._used_modules[module.name].add(stands_in)
        return final


@cache
def _read_module(name: str) -> _Module:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node, following in pairwise(tree.body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            node.end_lineno = following.end_lineno  # the text below describes what is defined
    definitions = {bound: node for node in tree.body for bound in _bound_names(node)}
    imports: dict[str, tuple[str, str | None]] = {}
    for top_level in tree.body:
        for statement in top_level.body if isinstance(top_level, ast.If) else [top_level]:  # under TYPE_CHECKING, too
            if isinstance(statement, ast.Import):
                imports |= {alias.asname or alias.name.partition(".")[0]: (alias.name, None) for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                imports |= {alias.asname or alias.name: (statement.module or "", alias.name) for alias in statement.names}
    return _Module(name, source.splitlines(), definitions, imports, (ast.get_docstring(tree) or name).partition("\n")[0])


def _bound_names(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at a module's top level defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name))


def _names(definition: ast.stmt, left_out: list[Any]) -> Iterator[ast.Name]:
    """All names in a definition but those in the methods that are left out."""
    nodes: list[ast.AST] = [definition]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name):
            yield node
        nodes += [child for child in ast.iter_child_nodes(node) if child not in left_out]


def _replace(lines: dict[int, str], line: int, column_bytes: int, old: str, new: str) -> None:
    """Replace a name in a line; ``ast`` counts columns in bytes of UTF-8, and before Python 3.12 counts wrongly inside f-strings."""
    encoded, end = lines[line].encode(), column_bytes + len(old.encode())
    if encoded[column_bytes:end] == old.encode():
        lines[line] = (encoded[:column_bytes] + new.encode() + encoded[end:]).decode()
    else:
        lines[line] = re.sub(rf"\b{old}\b", new, lines[line])


def _import_statement(module: str, name: str | None, bound: str) -> str:
    if name is None:
        return f"import {module}" if bound == module.partition(".")[0] else f"import {module} as {bound}"
    return f"from {module} import {name}" + ("" if bound == name else f" as {bound}")
