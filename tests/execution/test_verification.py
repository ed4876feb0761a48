"""A study of the first version, as ``autotune verify`` finds it: whole, and with one thing changed at a time."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from optuna.samplers import RandomSampler

from autotune.config.command_line import EXIT_BAD_INPUT, EXIT_DIFFERS, run_command
from autotune.errors import StudyError
from autotune.files import FORMATS
from autotune.search.study import open_study, read_study
from autotune.verify import verify_command

FIRST_VERSION = Path(__file__).parent.parent / "recorded" / "first_version"
Verify = Callable[..., tuple[int, str]]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a study that the first version of autotune wrote, in a folder without an MLflow store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Path(shutil.copytree(FIRST_VERSION, tmp_path / "outputs" / "small"))


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """Runs ``autotune verify`` and returns its exit code and all that it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        code = run_command(verify_command, arguments)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_study_of_the_first_version_holds(study: Path, verify: Verify) -> None:
    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    code, said = verify("study=small")
    assert code == 0, said
    assert "study small (outputs/small): 8 trials, 4 confirmation runs" in said
    assert re.search(r"^  journal +ok +162 records, no digests, written by an earlier version$", said, re.MULTILINE)
    assert re.search(r"^  summary.json +ok +speed-up 1.8748801140618678, .* computed again from the runs$", said, re.MULTILINE)
    assert re.search(r"^  MLflow +not checked +.*mlflow.db.*tracking.uri=URI names another store$", said, re.MULTILINE)
    assert said.endswith("all 6 checks hold\n")
    assert {path: path.read_bytes() for path in study.rglob("*") if path.is_file()} == before
    assert verify(f"study={study}")[0] == 0, "a folder is accepted, too"
    assert verify("study=small", "folder=outputs")[0] == 0


def _replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


def _claim_more(folder: Path) -> None:
    for name in ("best.json", "summary.json"):
        content = json.loads((folder / name).read_text())
        content["speed_up"]["ratio"] = 2.5
        (folder / name).write_text(json.dumps(content))


def _without_a_recorded_trial(folder: Path) -> None:
    path = folder / "recording" / "trials.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)


def _without_a_journal_line(folder: Path) -> None:
    lines = (folder / "study.log").read_text().splitlines(keepends=True)
    index = next(index for index, line in enumerate(lines) if '"autotune:result"' in line)
    (folder / "study.log").write_text("".join(lines[:index] + lines[index + 1 :]))


def _with_a_faster_run(folder: Path) -> None:
    lines = (folder / "study.log").read_text().splitlines(keepends=True)
    index = next(index for index, line in enumerate(lines) if "autotune:confirmed:6" in line)
    lines[index] = re.sub(r'"train_seconds": ?[0-9.]+', '"train_seconds": 0.0001', lines[index])
    (folder / "study.log").write_text("".join(lines))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_replace("trials.csv", "REACHED", "MISSED"), r"trials.csv +differs +trial \d+: outcome: found \"MISSED\", expected \"REACHED\""),
        (_claim_more, r"summary.json +differs +speed_up.ratio: found 2.5, expected 1.87488\d+ \(off by 0.33 of it\)"),
        (_replace("best.json", '"trial": 6', '"trial": 8'), r"best.json +differs +trial: found 8, expected 6"),
        (lambda folder: (folder / "best.json").unlink(), r"best.json +differs +.*best.json: is not there"),
        (_replace("best.yaml", "epochs: 3", "epochs: 30"), r"best.yaml +differs +epochs: found 30, expected 3"),
        (_replace("best.yaml", "1.87x", "18.7x"), r"best.yaml +differs +its comments do not say: Speed-up over the baseline: not shown"),
        (_without_a_recorded_trial, r"recording +differs +trials.parquet: trial 3: is not there"),
        (_replace("recording/study.yaml", "6: REACHED", "6: STOPPED"), r"recording +differs +study.yaml: outcomes: found .*"),
        (lambda folder: (folder / "recording" / "space.yaml").write_text("{}"), r"recording +differs +space.yaml: optimizer: found None"),
        (_without_a_journal_line, r"summary.json +differs +outcomes|trials.csv +differs +trial 3: has a row, and is no trial"),
        (_with_a_faster_run, r"summary.json +differs +.*"),
        (lambda folder: (folder / "trials.csv").write_bytes(b"\xff\0"), r"trials.csv +differs +"),
        (lambda folder: (folder / "summary.json").write_text("[" * 5000), r"summary.json +differs +.*summary.json: cannot be read"),
    ],
)
def test_each_kind_of_change_is_found_and_named(study: Path, verify: Verify, change: Callable[[Path], None], said: str) -> None:
    change(study)
    code, found = verify("study=small")
    assert code == EXIT_DIFFERS, found
    assert re.search(rf"^  {said}", found, re.MULTILINE), found
    assert "Traceback" not in found
    assert re.search(r"^\d of \d checks found differences$", found, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["study=none"], "autotune: study=none: no such study in outputs; accepted is the name or the folder of one\n"),
        (["study=https://host/small"], "study: "),
        ([], "study: missing; accepted is study=NAME"),
        (["study=small", "tracking.uri=sqlite:////no/such.db"], "tracking.uri: sqlite:////no/such.db: cannot be used"),
        (["study=small", "speed=1"], "speed: no such key; accepted are study=NAME"),
        (["study=small", "search.storage=sqlite:////no/such.db"], "search.storage"),
    ],
)
def test_bad_input_is_one_line(study: Path, verify: Verify, arguments: list[str], said: str) -> None:
    code, found = verify(*arguments)
    assert code == EXIT_BAD_INPUT, found
    assert said in found
    assert found.count("\n") == 1


@pytest.mark.parametrize("name", ["summary.json", "recording/study.yaml", "machine.yaml"])
def test_a_file_of_a_newer_autotune_is_refused_in_one_line(
    study: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.report_command import report_command

    assert run_command(report_command, ["study=small"]) == 0, "those of the first version, which say no number, open"
    path = study / name
    text = path.read_text()
    path.write_text(text.replace("{", '{"format": 7,', 1) if name.endswith(".json") else f"format: 7\n{text}")
    capsys.readouterr()
    assert run_command(report_command, ["study=small"]) == EXIT_BAD_INPUT
    newest = FORMATS["summary"]
    said = capsys.readouterr().err
    assert f"{path.relative_to(Path.cwd())}: has format 7, this autotune reads up to {newest}; update autotune\n" in said
    assert said.count("\n") == 1


def test_an_exported_experiment_says_its_format(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from autotune.export import export_command

    (study.parent.parent / "my_conf").mkdir()
    arguments = ["study=small", "as=found", "--config-dir", "my_conf"]
    assert run_command(export_command, arguments) == 0
    path = study / "best.yaml"
    path.write_text(path.read_text().replace("defaults:", "# Format 9.\ndefaults:", 1))
    capsys.readouterr()
    assert run_command(export_command, arguments) == EXIT_BAD_INPUT
    assert "best.yaml: has format 9, this autotune reads up to 1; update autotune\n" in capsys.readouterr().err


def test_a_study_of_a_newer_autotune_is_refused_in_one_line(tmp_path: Path) -> None:
    open_it = partial(open_study, "one", tmp_path, storage_url=None, make_sampler=RandomSampler, seed=0, definition={})
    study, _ = open_it()
    assert study.user_attrs["autotune:format"] == FORMATS["study"]
    study.set_user_attr("autotune:format", 9)
    for read in (open_it, lambda: read_study("one", tmp_path)):
        with pytest.raises(StudyError, match=r"^study\.name=one: has format 9, this autotune reads up to 1; update autotune$"):
            read()
