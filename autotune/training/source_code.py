"""The source text of definitions together with all that they use of autotune's own: what a
stand-alone script is made of.

Text is copied as it stands, with its comments, so that a reader of the script finds what was
trained. Only methods that other strategies and checkpoints call are left out.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from autotune.errors import ConfigError

_LEFT_OUT = ("pipeline_layers", "tensor_plan", "state_dict", "load_state_dict", "num_bytes")
"""Methods of autotune's classes that the script of a training by one process never calls."""


@dataclass(frozen=True)
class _Module:
    """One module's source, by what it defines and imports at its top level."""

    lines: list[str]
    definitions: Mapping[str, ast.stmt]
    imports: Mapping[str, tuple[str, str]]
    """Module and import statement, by the name that the import binds."""

    def first_line(self, definition: ast.stmt) -> int:
        """Index of a definition's first line, which is that of its decorators or of the comments
        above.
        """
        decorators: list[ast.expr] = getattr(definition, "decorator_list", [])
        first = min([definition.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        while first and self.lines[first - 1].startswith("#"):
            first -= 1
        return first


class SourceCode:
    """Collects definitions, with all that they use of autotune's own.

    Args:
        given: names that the script defines by itself, in place of autotune's.
    """

    def __init__(self, given: tuple[str, ...]) -> None:
        self._modules: dict[str, str] = dict.fromkeys(given, "the script")
        """The module that defines a collected name."""
        self._texts: dict[tuple[str, int], str] = {}
        """Text by module and first line, each below what it uses."""
        self.imports: set[str] = set()
        """Import statements that the collected definitions need, of modules other than
        autotune's."""

    def add(self, module_name: str, name: str) -> None:
        """Collect a definition and all that it uses.

        Raises:
            ConfigError: the module does not define the name at its top level, or another one that
                was collected defines it, too.
        """
        if (owner := self._modules.get(name)) is not None:
            if owner not in (module_name, "the script"):
                raise ConfigError(
                    f"{name}: one script cannot have both {owner}'s and {module_name}'s"
                )
            return
        self._modules[name] = module_name
        module = _read_module(module_name)
        if name not in module.definitions:
            raise ConfigError(f"{module_name} does not define {name} at its top level")
        definition = module.definitions[name]
        methods = [
            node
            for node in getattr(definition, "body", ())
            if getattr(node, "name", None) in _LEFT_OUT
        ]
        for used in sorted(_names(definition, methods)):
            if used in module.definitions:
                self.add(module_name, used)
            elif used in module.imports:
                source, statement = module.imports[used]
                if source.startswith("autotune."):
                    self.add(source, used)
                else:
                    self.imports.add(statement)
        first = module.first_line(definition)
        lines = dict(enumerate(module.lines[first : definition.end_lineno], start=first))
        for method in methods:
            for line in range(module.first_line(method), method.end_lineno or 0):
                del lines[line]
        text = "\n".join(lines.values())
        self._texts[module_name, first] = re.sub(
            r"\s*# (noqa(?!: BLE)|type: ignore).*$", "", text, flags=re.MULTILINE
        )

    def __str__(self) -> str:
        """The collected definitions, each below those that it uses."""
        return "\n\n\n".join(self._texts.values())


@cache
def _read_module(name: str) -> _Module:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node, following in pairwise(tree.body):
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            node.end_lineno = following.end_lineno  # the text below describes what is defined
    imports: dict[str, tuple[str, str]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                module = statement.module or ""
                text = f"from {module} import {ast.unparse(alias)}"
                imports[alias.asname or alias.name] = module, text
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                bound = alias.asname or alias.name.partition(".")[0]
                imports[bound] = alias.name, f"import {ast.unparse(alias)}"
    return _Module(
        source.splitlines(),
        {bound: node for node in tree.body for bound in _bound_names(node)},
        imports,
    )


def _bound_names(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at a module's top level defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id


def _names(definition: ast.stmt, left_out: list[ast.stmt]) -> set[str]:
    """All names in a definition but those in the methods that are left out."""
    names: set[str] = set()
    nodes: list[ast.AST] = [definition]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name):
            names.add(node.id)
        nodes += [child for child in ast.iter_child_nodes(node) if child not in left_out]
    return names
