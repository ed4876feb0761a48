"""The command line: flags, exit codes, and completion in a real shell."""

import shutil
import subprocess
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
from autotune.config.completion import shell_completion
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
    assert line.overrides == ("experiment=cnn", "batch_size=16,32")
    assert line.config_dirs == (str(tmp_path), "x")
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


@pytest.mark.parametrize("flag", ["--multirun", "-m"])
def test_hydras_flag_for_sweeps_is_taken_with_a_note(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse("experiment=cnn", "batch_size=16,32")
    assert capsys.readouterr().err == ""
    parse("experiment=cnn", "batch_size=16,32", flag)
    said = capsys.readouterr().err
    assert (
        said
        == "autotune: --multirun is not needed: sweeps are read without it, as the search space of"
        " one study\n"
    )


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


# Completion.


@pytest.mark.parametrize("command", ["foo", "install", "install=tcsh", "=bash", "install=bash=zsh"])
def test_a_wrong_completion_command_is_refused_in_one_line(command: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shell_completion(command)
    assert (
        str(refused.value) == f"-sc: found {command!r}; use install= or query= with bash, fish, zsh"
    )


def test_completion_is_installed_for_the_installed_command_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/autotune/__main__.py"])
    with pytest.raises(
        ConfigError,
        match=r"shells complete the installed command: eval \"\$\(autotune -sc install=bash\)\"$",
    ):
        shell_completion("install=bash")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_asks_autotune(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/autotune"])
    assert shell_completion(f"install={shell}") == 0
    assert "-sc query=" in capsys.readouterr().out


def completions(
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    point: int | None = None,
) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line) if point is None else point))
    capsys.readouterr()
    assert shell_completion("query=bash") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("autotune exper", ["experiment="]),
        ("autotune exp", ["export"]),
        ("autotune experiment=cnn_c", ["experiment=cnn_cifar10"]),
        ("autotune experiment=cnn optimizer", ["optimizer.", "optimizer="]),
        (
            "autotune experiment=cnn --cfg job optimizer=adamw",
            ["optimizer=adamw", "optimizer=adamw_decoupled"],
        ),
        ("autotune no_such_key=1 epochs=", []),
        ("autotune --resol", []),
        ("autotune --config-dir ", []),
        ("", []),
    ],
)
def test_keys_groups_and_names_are_completed(
    line: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completions(line, monkeypatch, capsys) == words


def test_experiments_of_ones_own_folder_are_completed_up_to_the_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nepochs: 3\n")
    line = f"autotune -cd {tmp_path} experiment=mi"
    assert completions(f"{line} epochs=3", monkeypatch, capsys, point=len(line)) == [
        "experiment=mine"
    ]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.command
def test_tab_completes_in_bash_and_can_be_uninstalled(tmp_path: Path) -> None:
    command = tmp_path / "autotune"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom"
        " autotune.config.command_line import parse_command_line,"
        " run_command\nsys.exit(run_command(lambda words: parse_command_line('autotune', '', '',"
        " words), sys.argv[1:]))\n"
    )
    command.chmod(0o755)
    script = (
        'eval "$(autotune -sc install=bash)"; COMP_LINE="autotune exper"; COMP_POINT=14;'
        ' COMP_CWORD=1; hydra_bash_completion; echo "${COMPREPLY[*]}"; complete -p autotune'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "experiment=",
        "complete -o default -o nospace -F hydra_bash_completion autotune",
    ]
