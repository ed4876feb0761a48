"""The README's example of one's own model and training, run as it stands there."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file that the README says to write."""
    folder = tmp_path_factory.mktemp("readme")
    files = re.findall(r"^`(my_\S+)`:\n\n```\w+\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    assert [path for path, _ in files] == [
        "my_net.py",
        "my_conf/model/my_net.yaml",
        "my_conf/data/spirals.yaml",
        "my_conf/experiment/spirals.yaml",
        "my_conf/experiment/my_training.yaml",
    ]
    for path, text in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def command_after(mark: str) -> list[str]:
    """The command that stands behind a mark in the README, run by this Python."""
    found = re.search(rf"<!-- {mark} command -->\n```bash\n(.*?)\n```", README, re.DOTALL)
    assert found is not None
    words = shlex.split(found[1])
    assert words[:3] == ["python", "-m", "autotune"]
    return [sys.executable, *words[1:]]


@pytest.mark.ray
@pytest.mark.parametrize("mark", ["own model", "own training"])
def test_the_example_is_tuned_to_a_confirmed_result(project: Path, mark: str) -> None:
    name = mark.replace(" ", "-")
    command = [*command_after(mark), f"study.name={name}", "search.num_trials=6", "confirm=quick"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    best = json.loads((project / "outputs" / name / "best.json").read_text())
    assert best["best"]["num_reached"] == best["best"]["num_runs"] == 2
    assert sum(best["outcomes"].values()) == 6


def test_every_document_that_the_readme_names_is_there() -> None:
    links = re.findall(r"\]\(((?!http)[^)#]+)", README)
    assert links
    assert [link for link in links if not (Path(__file__).parent.parent / link).exists()] == []
