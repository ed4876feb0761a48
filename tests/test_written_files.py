"""All that autotune writes goes through ``autotune.files``: whole or not at all."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

WRITERS = frozenset(
    {
        "write_text",
        "write_bytes",
        "touch",
        "to_csv",
        "savefig",
        "write_table",
        "export_chrome_trace",
        "FileHandler",
        "save_file",
    }
)
"""Names of functions and methods that write a file wherever they stand."""
OF_MODULES = {
    "shutil": ("copy", "copy2", "copyfile", "copytree"),
    "json": ("dump",),
    "pickle": ("dump",),
    "torch": ("save",),
    "np": ("save",),
}
"""Module -> its functions that write a file."""
EXCEPTIONS = {
    "autotune/train.py": "a temporary folder for a checkpoint that is kept at a URL",
    "autotune/files.py": "it is the fence",
    "autotune/search/storage.py": ("what a killed process left of a last line is cut off"),
    "autotune/execution/exported.py": "a temporary folder that Hydra reads",
    "autotune/training/profiling.py": "a new folder that torch's profiler writes to",
}


def complaints(package: Path) -> list[str]:
    """One sentence for each call in the package that writes a file by itself."""
    found = []
    for path in sorted(package.rglob("*.py")):
        shown = f"{package.name}/{path.relative_to(package).as_posix()}"
        if shown not in EXCEPTIONS:
            found += [
                f"{shown}:{line}: {call} writes a file by itself: use replace_file, replacing or"
                " appending of autotune.files"
                for line, call in _written(ast.parse(path.read_text()))
            ]
    return found


def _written(tree: ast.Module) -> Iterator[tuple[int, str]]:
    parts = set(_parts(tree))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and _writes(node)
            and not parts & {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        ):
            yield node.lineno, ast.unparse(node.func)


def _parts(tree: ast.Module) -> Iterator[str]:
    """Names that ``with replacing(...) as NAME`` gives."""
    for node in ast.walk(tree):
        for item in node.items if isinstance(node, ast.With) else ():
            if (
                isinstance(item.context_expr, ast.Call)
                and ast.unparse(item.context_expr.func) == "replacing"
                and item.optional_vars
            ):
                yield ast.unparse(item.optional_vars)


def _writes(call: ast.Call) -> bool:
    function = call.func
    name = (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )
    module = (
        function.value.id
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
        else ""
    )
    if name == "open":
        if module == "os":
            return any(
                "O_WRONLY" in text or "O_RDWR" in text or "O_CREAT" in text
                for text in map(ast.unparse, call.args)
            )
        modes = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        texts = [
            mode.value
            for mode in modes
            if isinstance(mode, ast.Constant) and isinstance(mode.value, str)
        ]
        return any(len(text) <= 3 and set(text) & set("wax+") for text in texts)
    return name in WRITERS or name in OF_MODULES.get(module, ())


def test_every_file_is_written_by_the_one_module_that_replaces_files_whole() -> None:
    assert complaints(ROOT / "autotune") == []


def test_what_writes_by_itself_is_said_in_one_sentence(tmp_path: Path) -> None:
    package = tmp_path / "autotune"
    package.mkdir()
    (package / "report.py").write_text(
        "path.write_text(text)\n"
        "with path.open('w') as file: pass\n"
        "open(path, mode='ab')\n"
        "json.dump(content, file)\n"
        "frame.to_csv(path)\n"
        "os.open(path, os.O_WRONLY | os.O_CREAT)\n"
        "path.open(), open(path, 'rb'), path.read_text(), json.dumps(content), copy.copy(x)\n"
        "with replacing(path) as part, part.open('w') as file: figure.savefig(part)\n"
    )
    lines = sorted(sentence.split(" writes ")[0] for sentence in complaints(package))
    assert lines == [
        f"autotune/report.py:{number}: {call}"
        for number, call in enumerate(
            ["path.write_text", "path.open", "open", "json.dump", "frame.to_csv", "os.open"], 1
        )
    ]
