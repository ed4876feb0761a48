"""The notebooks of docs/notebooks, run as they stand."""

import os
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parent.parent.parent / "docs/notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", ["training_function", "experiment_by_name"])
def test_a_notebook_runs_to_a_confirmed_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notebook: str
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.chdir(tmp_path)
    read = nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", 4)
    nbclient.NotebookClient(read, timeout=600, kernel_name="python3").execute()
    assert len([*tmp_path.glob("outputs/*/best.json")]) == 1
    outputs = [output for cell in read.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    widgets = read.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    shown = [output for widget in widgets for output in widget["state"].get("outputs", ())]
    assert any("trials done" in str(output) for output in shown), "the live table"


def test_notebooks_are_kept_without_their_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert all(not cell.get("outputs") for cell in nbformat.read(path, 4).cells), os.fspath(
            path
        )
