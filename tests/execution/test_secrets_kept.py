"""A secret that a command line holds is in nothing that a study prints, logs, tracks or writes."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from autotune.execution.conclusion import _say_page
from tests.support.served import served

CANARY = "cAnArY7f3Q"
TABLE = "size,colour,kind\n" + "".join(
    f"{n % 7},{'red' if n % 2 else 'blue'},{n % 2}\n" for n in range(200)
)


def _holding(folder: Path) -> list[str]:
    """The files of a folder that hold the canary, in their content, or in their name."""
    return [
        str(path)
        for path in folder.rglob("*")
        if CANARY in path.name or (path.is_file() and CANARY.encode() in path.read_bytes())
    ]


def test_the_address_of_a_page_is_printed_whole_though_a_key_is_in_it() -> None:
    console, page = (
        Console(file=io.StringIO(), width=40),
        "http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=autotune",
    )
    live: Any = SimpleNamespace(console=console, tracker=SimpleNamespace(name="MLflow", page=page))
    _say_page(live)
    assert console.file.getvalue() == f"MLflow, the trials, best first: {page}\n"


@pytest.mark.slow
def test_a_canary_in_every_url_of_a_study_is_nowhere_in_its_outputs(
    commands: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(commands.environment, "AUTOTUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "table.csv").write_text(TABLE)
    storage = f"sqlite:///file:{tmp_path}/studies.db?uri=true&password={CANARY}"
    with served(tmp_path / "data") as server:
        url = server.url.replace("http://", f"http://me:{CANARY}@")
        arguments = [
            "experiment=mlp",
            "data=csv",
            f"data.path='{url}/table.csv?X-Amz-Signature={CANARY}'",
            "data.target_column=kind",
            "target.value=0.9",
            "target.max_train_seconds=20",
            "study.name=secret",
            "search.num_trials=6",
            f"search.storage='{storage}'",
        ]
        for further in ([], ["search.num_trials=7"]):
            done = commands.run(*arguments, *further, folder=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
            assert CANARY not in done.stdout + done.stderr
        trained = commands.run(
            "train",
            *[line for line in arguments if not line.startswith(("study", "search"))],
            "checkpoint.folder=kept",
            folder=tmp_path,
        )
        assert trained.returncode == 0, trained.stdout + trained.stderr
        shown = commands.run("--cfg", "job", *arguments, folder=tmp_path)
        refused = commands.run(
            *arguments,
            f"tracking.uri=http://me:{CANARY}@127.0.0.1:1",
            "study.name=other",
            folder=tmp_path,
        )
        assert refused.returncode == 2
        for done in (trained, shown, refused):
            assert CANARY not in done.stdout + done.stderr
    assert "***" in shown.stdout
    assert (tmp_path / "outputs/secret/report.html").is_file()
    assert (tmp_path / "mlflow.db").is_file()
    assert _holding(tmp_path) == []


def test_a_mark_in_place_of_a_secret_is_refused(refusal: Any) -> None:
    line = refusal("experiment=cnn_smoke", "search.storage='postgresql://me:***@host/db'")
    assert line.startswith(
        "search.storage: found ***, which stands for a secret that was not shown; give the secret"
        " itself, or ${oc.env:NAME}"
    )
