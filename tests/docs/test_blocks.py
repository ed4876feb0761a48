"""The blocks of the pages: every command is taken by autotune, every YAML file and Python block
is read by what reads it.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import autotune
from autotune.__main__ import autotune_command
from autotune.config.command_keys import read_own_keys
from autotune.config.compose import Composer
from autotune.config.space_files import read_search_space
from autotune.export import ExportKeys, ReportKeys
from benchmarks.replay.__main__ import ReplayKeys

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_OWN_KEYS: dict[str, type[Any]] = {
    "export": ExportKeys,
    "replay": ReplayKeys,
    "report": ReportKeys,
}
"""Keys of the commands that compose no configuration."""
_MADE_ELSEWHERE = {
    "<study>": "study",
    "s3://bucket/cifar10": "cifar10",
    "s3://bucket/run1": "run1",
    "cnn-20261120-101500": "study",
}
"""What stands in the pages for something that is not there, and what the tests take for it."""


def blocks(language: str) -> list[tuple[str, str]]:
    """Page and text of each block of a language."""
    found = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page.name, block) for page in PAGES for block in found.findall(page.read_text())]


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """Page and arguments of every ``autotune ...``, ``python -m autotune ...`` and ``python -m
    benchmarks.replay ...`` in the pages.
    """
    called = re.compile(
        r"^(?:(?:python -m )?autotune |python -m benchmarks\.(?=replay))(.*)", re.MULTILINE
    )
    lines = [(page, line) for page, block in blocks("bash") for line in called.findall(block)]
    placeholders = re.compile("|".join(map(re.escape, _MADE_ELSEWHERE)))
    return [
        (
            page,
            tuple(
                shlex.split(
                    placeholders.sub(lambda found: _MADE_ELSEWHERE[found[0]], line), comments=True
                )
            ),
        )
        for page, line in lines
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages say to write or to export."""
    folder = tmp_path_factory.mktemp("pages")
    text = "\n".join(page.read_text() for page in PAGES)
    files = re.findall(r"^`(my_\S+)`:\n\n```\w+\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    files += re.findall(r"```yaml\n# (my_conf/\S+?),.*?\n(.*?)```", text, re.DOTALL)
    files.append(
        (
            "my_conf/experiment/cnn_best.yaml",
            "# @package _global_\n# Exported.\ndefaults: [cnn]\noptimizer: {lr: 0.05}\n",
        )
    )
    for path, content in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("page", "arguments"),
    commands(),
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_autotune_takes_every_command(
    page: str,
    arguments: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    if arguments == ("--help",):
        with pytest.raises(SystemExit) as ended:
            autotune_command(arguments)
        assert ended.value.code == 0
    elif arguments[0] in _OWN_KEYS:
        words = [word for word in arguments[1:] if "=" in word]
        read_own_keys(_OWN_KEYS[arguments[0]], words)
    else:
        assert autotune_command([*arguments, "--cfg", "job"]) == 0
        assert yaml.safe_load_all(capsys.readouterr().out)


def test_there_are_commands_of_every_kind() -> None:
    assert {arguments[0] for _, arguments in commands() if "=" not in arguments[0]} >= {
        "train",
        "compare",
        "profile",
        "diagnose",
        "export",
        "replay",
        "report",
    }
    assert len(commands()) > 30


@pytest.mark.parametrize("block", [block for _, block in blocks("yaml")])
def test_every_yaml_block_is_read(block: str) -> None:
    content = yaml.safe_load(block)
    assert isinstance(content, dict)
    if isinstance(content.get("optimizer"), dict):  # a search space
        space = read_search_space([content], Composer(["experiment=cnn"]))
        assert set(space.parameters) == set(content)


def python_blocks() -> list[Any]:
    """Page and text of each block of Python, but for the README's, which tests/test_readme.py
    runs; those that start a study are slow.
    """
    return [
        pytest.param(page, block, marks=[pytest.mark.slow] if "autotune.tune(" in block else [])
        for page, block in blocks("python")
        if page != "README.md"
    ]


@pytest.mark.parametrize(("page", "block"), python_blocks())
def test_every_python_block_runs(
    page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recording = tmp_path / "outputs" / "<study>" / "recording"
    recording.mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "recordings" / "cnn" / "curves.parquet", recording)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "autotune": autotune,
        "accuracy": 0.9,
        "latency": 3.0,
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "num_epochs": 2,
        "your_training": lambda lr, batch_size: [min(1.0, 0.9 + 8 * lr)] * 3,
    }
    exec(compile(block, page, "exec"), names)
    if "result" in names:
        assert names["result"].best is not None  # type: ignore[attr-defined]
