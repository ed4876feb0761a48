"""A command's own keys: their types and limits, what is refused, and what ``--help`` lists."""

import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.__main__ import autotune_command
from autotune.config.command_line import COMMANDS
from autotune.config.own_keys import own_key, own_keys_help, read_own_keys, refuse_other_keys
from autotune.errors import AutotuneError, ConfigError


@dataclass(kw_only=True)
class Keys:
    """Of a command that is none."""

    folder: str = own_key(..., "where", shown="DIR")
    num_runs: int = own_key(3, "how many", least=1, most=9)
    fraction: float | None = own_key(None, "how much", least=0)
    sizes: list[int] = own_key([1, 2], "how large", least=1, accepted="a list")
    mode: str = own_key("fast", "how", choices=("fast", "slow"))
    overwrite: bool = own_key(False, "whether", name="over.write")


def test_values_have_the_types_of_their_fields_and_other_keys_are_left() -> None:
    given = [
        "experiment=cnn",
        "folder=[a,${b}]",
        "num_runs=4",
        "fraction=1e-3",
        "sizes=[4, 5]",
        "mode=slow",
        "over.write=true",
        "seed=1",
    ]
    own, others = read_own_keys(Keys, given)
    assert own == Keys(
        folder="[a,${b}]", num_runs=4, fraction=0.001, sizes=[4, 5], mode="slow", overwrite=True
    )
    assert others == ("experiment=cnn", "seed=1")
    assert read_own_keys(Keys, ["folder=x", "fraction=null"])[0] == Keys(folder="x")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "folder: missing; accepted is folder=DIR"),
        ("folder=a folder=b", "folder: found twice; accepted is once"),
        ("num_runs=0", "num_runs: found '0', accepted is a whole number from 1 to 9"),
        ("num_runs=2.5", "num_runs: found '2.5', accepted is a whole number from 1 to 9"),
        ("num_runs=", "num_runs: found '', accepted is a whole number from 1 to 9"),
        ("num_runs=null", "num_runs: found 'null', accepted is a whole number from 1 to 9"),
        ("fraction=nan", "fraction: found 'nan', accepted is a number from 0, or null"),
        ("fraction=inf", "fraction: found 'inf', accepted is a number from 0, or null"),
        ("fraction=[", "fraction: found '[', accepted is a number from 0, or null"),
        ("sizes=[1,x]", "sizes: found '[1,x]', accepted is a list"),
        ("sizes=[0]", "sizes: found '[0]', accepted is a list"),
        ("sizes=2", "sizes: found '2', accepted is a list"),
        ("mode=slo", "mode: found 'slo', accepted is one of fast, slow"),
        ("over.write=maybe", "over.write: found 'maybe', accepted is true or false"),
        ("num_run=3", "num_run: no such key (did you mean num_runs=...?)"),
        ("MODE=fast", "MODE: no such key (did you mean mode=...?)"),
    ],
)
def test_what_is_not_accepted_is_one_line(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_own_keys(Keys, given.split())
    assert str(refused.value) == said


def test_a_key_of_the_configuration_is_never_a_misspelt_one() -> None:
    assert read_own_keys(Keys, ["folder=x", "model=mlp", "runtime.compile=default"])[1] == (
        "model=mlp",
        "runtime.compile=default",
    )


def test_a_command_without_a_configuration_says_which_keys_it_has() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^seed: no such key; accepted are folder=DIR, num_runs=3, fraction=null,"
            r" sizes=\[1,2\], mode=fast"
        ),
    ):
        refuse_other_keys(Keys, ["seed=3"])


def test_help_lists_every_key_with_its_default() -> None:
    assert own_keys_help(Keys).splitlines() == [
        "keys of this command:",
        "  folder=DIR        where",
        "  num_runs=3        how many",
        "  fraction=null     how much",
        "  sizes=[1,2]       how large",
        "  mode=fast         how",
        "  over.write=False  whether",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_there_and_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        autotune_command([name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert said.startswith("usage: autotune" if name == "tune" else f"usage: autotune {name} ")
    module = importlib.import_module(COMMANDS[name][0])
    keys = getattr(module, f"{name.capitalize()}Keys", None)
    assert keys is None or own_keys_help(keys) in said


def test_without_a_command_it_tunes_and_help_names_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        autotune_command(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n  autotune {name} " in said for name in COMMANDS)


def test_a_misspelt_command_is_one_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^trian: no such command \(did you mean train\?\); there are tune, train, ",
    ):
        autotune_command(["trian", "experiment=cnn"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "study=s", "folder=~no-such-user/x"],
        ["export", "study=s", "folder=~no-such-user/x", "script=s.py"],
    ],
)
def test_the_home_of_nobody_is_refused_in_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AutotuneError, match=r"^[^\n]*~no-such-user[^\n]*$"):
        autotune_command(arguments)


@pytest.mark.command
@pytest.mark.parametrize(
    "command", [["autotune", "profile"], ["autotune.profile"], ["benchmarks.replay"]]
)
def test_modules_run_as_commands(command: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", *command, "--help"],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "keys of this command:" in ended.stdout
