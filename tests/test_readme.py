"""The examples of one's own code in the README and in docs/your_own_code.md, run as they stand
there.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.files import STUDY_FILES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = (ROOT / "docs/your_own_code.md").read_text() + README


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file that the pages say to write."""
    folder = tmp_path_factory.mktemp("readme")
    files = re.findall(r"^`(my_\S+)`:\n\n```\w+\n(.*?)```", PAGES, re.DOTALL | re.MULTILINE)
    assert [path for path, _ in files] == [
        "my_net.py",
        "my_conf/model/my_net.yaml",
        "my_conf/data/spirals.yaml",
        "my_conf/experiment/spirals.yaml",
        "my_conf/experiment/my_training.yaml",
        "my_training.py",
    ]
    for path, text in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def command_after(mark: str) -> list[str]:
    """The command that stands behind a mark in the pages, run by this Python."""
    found = re.search(rf"<!-- {mark} command -->\n```bash\n(.*?)\n```", PAGES, re.DOTALL)
    assert found is not None
    words = shlex.split(found[1])
    assert words[:3] == ["python", "-m", "autotune"]
    return [sys.executable, *words[1:]]


@pytest.mark.ray
@pytest.mark.parametrize(
    "mark", ["own training", pytest.param("own model", marks=pytest.mark.slow)]
)
def test_the_example_is_tuned_to_a_confirmed_result(project: Path, mark: str) -> None:
    name = mark.replace(" ", "-")
    command = [*command_after(mark), f"study.name={name}", "search.num_trials=6", "confirm=quick"]
    done = subprocess.run(
        command,
        cwd=project,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    best = json.loads((project / "outputs" / name / "best.json").read_text())
    assert best["best"]["num_reached"] == best["best"]["num_runs"] == 2
    assert sum(best["outcomes"].values()) == 6


@pytest.mark.ray
@pytest.mark.slow
def test_the_loop_of_the_readme_is_tuned_from_python(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "my_training.py"], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("{'lr': ")
    assert len([*(project / "outputs").glob("train-*/best.json")]) == 1


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_every_file_that_a_page_links_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\(((?!http)[^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(README.split()) < 1200


def test_its_table_of_a_studys_files_names_what_autotune_keeps_there() -> None:
    table = README.partition("| file | what it is |")[2].partition("\n\n")[0]
    named = {
        name.rstrip("/")
        for row in table.splitlines()[2:]
        for name in re.findall(r"`([\w.]+/?)`", row.split("|")[1])
    }
    assert named > {"best.yaml", "figures", "trials"}
    assert named <= {file.name for file in STUDY_FILES}
