"""The command line: flags and exit codes."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune.config.command_line import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    import_user_code_from,
    parse_command_line,
    run_command,
)
from autotune.errors import AutotuneError, ConfigError, DataError

ROOT = Path(__file__).parent.parent.parent


def parse(*arguments: str) -> object:
    return parse_command_line("autotune", "Tune.", "", arguments)


def test_overrides_and_flags_may_stand_in_any_order(tmp_path: Path) -> None:
    line = parse_command_line(
        "autotune",
        "",
        "",
        [
            "experiment=cnn",
            "--config-dir",
            str(tmp_path),
            "batch_size=16,32",
            "-cd",
            "x",
            "--cfg",
            "job",
            "--resolve",
        ],
    )
    assert line.overrides == ["experiment=cnn", "batch_size=16,32"]
    assert line.config_dirs == [str(tmp_path), "x"]
    assert (line.cfg, line.resolve) == ("job", True)


@pytest.mark.parametrize(
    "arguments", [["--nope"], ["--config"], ["--cfg", "everything"], ["--config-dir"], ["-x"]]
)
def test_a_flag_that_is_not_known_is_one_line(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"; --help shows what is accepted$") as refused:
        parse(*arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_are_printed_and_end_well(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flag)
    assert ended.value.code == 0
    assert "autotune" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ConfigError("batch_size: no"), DataError("no such file")])
def test_what_autotune_explains_is_one_line_and_exit_code_2(
    error: AutotuneError, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(arguments: Sequence[str]) -> int:
        raise error

    assert run_command(command, []) == EXIT_BAD_INPUT
    assert capsys.readouterr().err == f"autotune: {error}\n"


def test_an_interrupt_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    assert run_command(command, []) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "autotune: interrupted\n"


def test_user_code_is_importable_from_here_and_around_the_config_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "project" / "conf"
    folder.mkdir(parents=True)
    before = list(sys.path)
    assert import_user_code_from(["project/conf"], ["experiment=cnn"]) == []
    assert sys.path == before
    assert import_user_code_from(["project/conf"], ["allowed_targets=[mine]"]) == [
        str(tmp_path),
        str(folder),
        str(folder.parent),
    ]
    assert {str(tmp_path), str(folder), str(folder.parent)} <= set(sys.path)
