"""The command that replays a recording, in this process, and what it refuses."""

import csv
import io
from pathlib import Path

import pytest

from autotune.config.experiments import options
from autotune.errors import AutotuneError
from autotune.recording import read_recording
from benchmarks.replay.__main__ import replay_command
from benchmarks.replay.simulation import best_seconds
from tests.support.recordings import write_raw_recording

SPACE = {
    "lr": {"type": "float", "low": 0.01, "high": 1.0, "log": True},
    "kind": ["a", "b"],
    "widths": [[8, 16], [16, 32]],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of six trials, each of four evaluations.

    The last trials reach the target sooner.
    """
    points = {
        "lr": [0.01, 0.02, 0.05, 0.1, 0.5, 1.0000001],
        "kind": ["a", "b"] * 3,
        "widths": ["[8, 16]", "[16, 32]"] * 3,
    }
    curves = [[0.5 + 0.05 * (step + trial) for step in range(1, 5)] for trial in range(6)]
    return write_raw_recording(tmp_path / "recording", SPACE, points, curves, evaluation_seconds=2)


def test_a_recording_is_read_as_it_was_written(folder: Path) -> None:
    recording = read_recording(folder)
    assert [each.number for each in recording.trials] == list(range(6))
    # past its bound by rounding
    assert recording.trials[5].suggestion.values == {"lr": 1.0, "kind": "b", "widths": [16, 32]}
    assert recording.trials[0].train_seconds == (2.0, 4.0, 6.0, 8.0)
    times = [each.time_to_target(recording.target) for each in recording.trials]
    assert times == [None, None, None, None, 8.0, 6.0]
    assert best_seconds(recording) == 6.0


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


@pytest.mark.parametrize("search", ["random", "tpe", "freeze_thaw"])
def test_a_trace_has_a_row_for_each_stretch(
    search: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.csv"
    line = [f"recording={folder}", f"search={search}", "within=null", f"output={output}"]
    assert replay_command([*line, "num_workers=2"]) == 0
    rows = rows_of(output)
    assert (
        ",".join(rows[0]) == "order,trial,worker,started_seconds,stopped_seconds,"
        "from_train_seconds,train_seconds,outcome"
    )
    assert [int(row["order"]) for row in rows] == list(range(len(rows)))
    assert {int(row["trial"]) for row in rows} == set(range(6))
    assert {row["worker"] for row in rows} == {"0", "1"}
    assert "6 of 6 trials" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "recording: missing; add recording=DIR"),
        (["recording=nope"], "recording=nope: no such folder"),
        (
            ["recording=s3://x/y"],
            (
                "recording: found the URL s3://x/y, use a folder of this machine, such as"
                " outputs/STUDY/recording"
            ),
        ),
        (
            ["recording={folder}", "output=s3://x/y.csv"],
            "output: found the URL s3://x/y.csv, use a file of this machine",
        ),
        (["recording={folder}", "sed=3"], "sed: no such key (did you mean seed?)"),
        (
            ["recording={folder}", "epochs=3"],
            "epochs=3: accepted beside the command's own keys are those of search, stopping, ",
        ),
        (
            ["recording={folder}", "search=tpee"],
            "search=tpee: there is no such file (did you mean tpe?); there are "
            + ", ".join(name for name, _ in options("search")),
        ),
        (
            ["recording={folder}", "warm_start=[nope]"],
            (
                "warm_start: nope: is no study that has a recording in outputs (there are none),"
                " and no folder"
            ),
        ),
        (
            ["recording={folder}", "output=nope/trace.csv"],
            "output=nope/trace.csv: there is no folder nope",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, folder: Path) -> None:
    with pytest.raises(AutotuneError) as refused:
        replay_command([each.format(folder=folder) for each in arguments])
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("search", ["tpe", "freeze_thaw"])
def test_a_search_tries_first_what_was_best_in_an_earlier_study(
    search: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.csv"
    line = [f"recording={folder}", f"search={search}", "within=null", f"output={output}"]
    assert replay_command([*line, f"warm_start=[{folder}]"]) == 0
    assert f"warm start: {folder.parent.name}: 6 of 6 trials\n" in capsys.readouterr().out
    started = list(dict.fromkeys(int(row["trial"]) for row in rows_of(output)))
    # the soonest at the target, the other that was, and the nearest to it
    assert started[:3] == [5, 4, 3]
