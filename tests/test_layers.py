"""The package's layers and fences: arrows between its parts go one way, and each framework lives
behind one fence.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

LAYERS = (
    ("redaction", "failure"),
    ("errors", "contention", "outcome"),
    ("files",),
    (
        "pickling",
        "space",
        "measurement",
        "session",
        "confirm.statistics",
        "confirm.sequential",
        "remote",
        "yaml_files",
        "mlflow_logs",
    ),
    ("command_template", "objective", "confirm.race", "recording", "config", "policy", "workloads"),
    ("training", "search", "tracking"),
    ("reporting",),
    ("execution",),
    ("tune_study", "train", "export", "compare", "profile", "diagnose"),
    ("__main__", "api", "lightning", "script", "transformers"),
)
"""Parts of the package, lowest first; a part imports only from itself and from lower layers."""

FENCES = {
    "hydra": ("config",),
    "omegaconf": ("config",),
    "optuna": ("search", "space"),
    "ray": ("execution",),
    "mlflow": ("tracking",),
    "tensorboardX": ("tracking",),
    "wandb": ("tracking",),
    "torch": ("training", "workloads"),
    "fsspec": ("remote",),
    "lightning": ("lightning",),
    "pytorch_lightning": ("lightning",),
    "transformers": ("transformers",),
}
"""Framework -> the parts that may import it."""

LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}
BELONGS_TO = {"confirm": "execution"}
"""Folder -> the part that its modules belong to, but for those that have a layer themselves."""


def complaints(package: Path) -> list[str]:
    """One sentence for each import of the package that crosses a fence or goes up."""
    return [
        sentence
        for path in sorted(package.rglob("*.py"))
        if path.parent != package or path.stem != "__init__"
        for sentence in _of_file(path, package)
    ]


def _of_file(path: Path, package: Path) -> Iterator[str]:
    relative = path.relative_to(package)
    part = _part(relative.with_suffix("").as_posix().replace("/", "."))
    shown = f"{package.name}/{relative.as_posix()}"
    if part not in LAYER_OF:
        yield f"{shown} has no layer: give {part!r} one in LAYERS"
        return
    for name in _imports(ast.parse(path.read_text()), package.name):
        top, _, rest = name.partition(".")
        if top in FENCES and part not in FENCES[top]:
            yield f"{shown} imports {top}: only {' and '.join(FENCES[top])} may"
        elif top == "":
            yield f"{shown} imports {name}: imports are absolute"
        elif top == package.name:
            used = _part(rest)
            if used != part and LAYER_OF.get(used, len(LAYERS)) >= LAYER_OF[part]:
                yield (
                    f"{shown} imports {package.name}.{used}: {part} may only import from layers"
                    " below its own"
                )


def _part(module: str) -> str:
    """The part of the package that a module belongs to."""
    folder = module.partition(".")[0]
    return module if module in LAYER_OF else BELONGS_TO.get(folder, folder)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == package:
            yield from (f"{package}.{each.name}" for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_every_import_stays_behind_its_fence_and_goes_down() -> None:
    assert complaints(ROOT / "autotune") == []


def test_a_crossed_fence_and_an_arrow_upwards_are_said_in_one_sentence(tmp_path: Path) -> None:
    package = tmp_path / "autotune"
    (package / "config").mkdir(parents=True)
    (package / "space.py").write_text("def run():\n    from ray import tune\n")
    (package / "config" / "schema.py").write_text(
        "from autotune import errors, training\nfrom autotune.search.scheduler import Trial\n"
    )
    (package / "config" / "build.py").write_text("from .schema import Config\n")
    (package / "manager.py").write_text("")
    assert complaints(package) == [
        "autotune/config/build.py imports .schema: imports are absolute",
        (
            "autotune/config/schema.py imports autotune.training: config may only import from"
            " layers below its own"
        ),
        (
            "autotune/config/schema.py imports autotune.search: config may only import from layers"
            " below its own"
        ),
        "autotune/manager.py has no layer: give 'manager' one in LAYERS",
        "autotune/space.py imports ray: only execution may",
    ]


def test_init_files_are_empty_but_for_the_packages_own() -> None:
    package = ROOT / "autotune"
    filled = [
        path.relative_to(package).as_posix()
        for path in package.rglob("__init__.py")
        if path.read_text().strip()
    ]
    assert filled == ["__init__.py"]


def test_importing_the_package_imports_nothing_of_it() -> None:
    code = (
        "import sys, autotune; print([name for name in sys.modules if"
        " name.startswith('autotune.')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ran.stdout.strip() == "[]"


def test_a_study_starts_without_imports_that_can_wait() -> None:
    late = ("mlflow", "plotly", "torch")
    ours = (
        "autotune.execution.run_study, autotune.execution.trial_manager,"
        " autotune.search.freeze_thaw"
    )
    code = f"import sys, {ours}; print([name for name in {late} if name in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ran.stdout.strip() == "[]"
