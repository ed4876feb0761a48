"""The source text of definitions together with all that they use of autotune's own: what a
stand-alone script is made of.

Text is copied as it stands, with its comments, so that a reader of the script finds what was
trained. Only methods that other strategies and checkpoints call are left out, and
``autotune.training.local_files`` takes the place of what reads URLs.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

from autotune.errors import ConfigError

_LEFT_OUT = ("pipeline_layers", "tensor_plan", "state_dict", "load_state_dict", "num_bytes")
"""Methods of autotune's classes that the script of a training by one process never calls."""
_LOCAL_FILES = "autotune.training.local_files"
_STAND_INS = ("is_remote", "is_file", "files_in", "fetched", "download_files")
"""Definitions of ``autotune.remote`` in whose place ``_LOCAL_FILES`` has one of the same name."""


@dataclass(frozen=True)
class _Module:
    """One module's source, by what it defines and imports at its top level."""

    lines: list[str]
    definitions: Mapping[str, ast.stmt]
    imports: Mapping[str, tuple[str, str]]
    """Module and import statement, by the name that the import binds."""
    purpose: str
    """First line of the module's docstring."""

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
    """Collects definitions, with all that they use of autotune's own."""

    def __init__(self) -> None:
        self._modules: dict[str, str] = {}
        """The module that defines a collected name."""
        self._texts: dict[str, dict[int, str]] = {}
        self._used_modules: dict[str, set[str]] = {}
        self.imports: set[str] = set()
        """Import statements that the collected definitions need, of modules other than
        autotune's."""

    def add(self, module_name: str, name: str) -> None:
        """Collect a definition and all that it uses.

        Raises:
            ConfigError: the module does not define the name at its top level, or another one that
                was collected defines it, too.
        """
        if self._modules.setdefault(name, module_name) != module_name:
            raise ConfigError(
                f"{name}: both {self._modules[name]} and {module_name} define it, so one script"
                " cannot have both"
            )
        module, texts = _read_module(module_name), self._texts.setdefault(module_name, {})
        if name not in module.definitions:
            raise ConfigError(
                f"{module_name} does not define {name} at its top level, so that its source cannot"
                " be copied"
            )
        self._used_modules.setdefault(module_name, set())
        definition = module.definitions[name]
        first = module.first_line(definition)
        if first in texts:
            return
        lines = dict(enumerate(module.lines[first : definition.end_lineno], start=first))
        left_out = [
            node
            for node in getattr(definition, "body", ())
            if getattr(node, "name", None) in _LEFT_OUT
        ]
        for node in left_out:
            for line in range(module.first_line(node), node.end_lineno):
                del lines[line]
        texts[first] = re.sub(
            r"\s*# (noqa(?!: BLE)|type: ignore).*$",
            "",
            "\n".join(lines.values()),
            flags=re.MULTILINE,
        )
        for used in sorted(_names(definition, left_out)):
            self._add_used(module_name, used)

    def __str__(self) -> str:
        """The collected definitions, a module's below those of the modules that it uses."""
        sections = []
        for name in TopologicalSorter(
            {name: sorted(used) for name, used in self._used_modules.items()}
        ).static_order():
            texts = self._texts[name]
            sections.append(
                "\n\n".join(
                    [
                        f"# {name}: {_read_module(name).purpose}",
                        *(texts[line] for line in sorted(texts)),
                    ]
                )
            )
        return "\n\n\n".join(sections)

    def _add_used(self, module_name: str, name: str) -> None:
        """Collect what a name within a module stands for."""
        module = _read_module(module_name)
        if name in module.definitions:
            self.add(module_name, name)
        elif name in module.imports:
            source, statement = module.imports[name]
            if not source.startswith("autotune."):
                self.imports.add(statement)
                return
            source = _LOCAL_FILES if name in _STAND_INS else source
            self._used_modules[module_name].add(source)
            self.add(source, name)


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
    definitions = {bound: node for node in tree.body for bound in _bound_names(node)}
    imports: dict[str, tuple[str, str]] = {}
    for top_level in tree.body:
        # under TYPE_CHECKING, too
        for statement in top_level.body if isinstance(top_level, ast.If) else [top_level]:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                begin = f"from {statement.module} " if isinstance(statement, ast.ImportFrom) else ""
                for alias in statement.names:
                    module = (
                        statement.module or ""
                        if isinstance(statement, ast.ImportFrom)
                        else alias.name
                    )
                    bound = alias.asname or (alias.name if begin else alias.name.partition(".")[0])
                    imports[bound] = module, f"{begin}import {ast.unparse(alias)}"
    return _Module(
        source.splitlines(),
        definitions,
        imports,
        (ast.get_docstring(tree) or name).partition("\n")[0],
    )


def _bound_names(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at a module's top level defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (
            inner.id
            for target in targets
            for inner in ast.walk(target)
            if isinstance(inner, ast.Name)
        )


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
