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

    lines: Mapping[int, str]
    """All lines but those of the methods that are left out, by number from 1."""
    definitions: Mapping[str, ast.stmt]
    imports: Mapping[str, tuple[str, str]]
    """Module and import statement, by the name that the import binds."""


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
        names = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
        for used in sorted(names):
            if used in module.definitions:
                self.add(module_name, used)
            elif used in module.imports:
                source, statement = module.imports[used]
                if source.startswith("autotune."):
                    self.add(source, used)
                else:
                    self.imports.add(statement)
        numbers = _line_numbers(definition, module.lines)
        text = "\n".join(module.lines[number] for number in numbers if number in module.lines)
        self._texts[module_name, numbers.start] = re.sub(
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
    tree, lines = ast.parse(source), dict(enumerate(source.splitlines(), start=1))
    for node, following in pairwise(tree.body):
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            node.end_lineno = following.end_lineno  # the text below describes what is defined
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for member in list(node.body):
                if isinstance(member, ast.FunctionDef) and member.name in _LEFT_OUT:
                    node.body.remove(member)
                    for number in _line_numbers(member, lines):
                        del lines[number]
    imports: dict[str, tuple[str, str]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                module, text = alias.name, f"import {ast.unparse(alias)}"
                if isinstance(statement, ast.ImportFrom):
                    module, text = statement.module or "", f"from {statement.module} {text}"
                imports[alias.asname or alias.name.partition(".")[0]] = module, text
    return _Module(
        lines,
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


def _line_numbers(definition: ast.stmt, lines: Mapping[int, str]) -> range:
    """The numbers of a definition's lines, from its decorators or the comments above on."""
    decorators: list[ast.expr] = getattr(definition, "decorator_list", [])
    first = min([definition.lineno, *(decorator.lineno for decorator in decorators)])
    while lines.get(first - 1, "").startswith("#"):
        first -= 1
    assert definition.end_lineno is not None
    return range(first, definition.end_lineno + 1)
