"""A command's own keys: their types and limits, what is refused, and what ``--help`` lists."""

import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.__main__ import autotune_command
from autotune.config.command_keys import own_key, own_keys_help, read_own_keys, refuse_other_keys
from autotune.config.command_line import COMMANDS
from autotune.errors import ConfigError


@dataclass(kw_only=True)
class Keys:
    """Of a command that is none."""

    folder: str = own_key(..., "where", shown="DIR")
    num_runs: int = own_key(3, "how many", least=1, most=9)
    fraction: float | None = own_key(None, "how much", least=0)
    mode: str = own_key("fast", "how")
    overwrite: bool = own_key(False, "whether", name="over.write")


def test_values_have_the_types_of_their_fields_and_other_keys_are_left() -> None:
    line = (
        "experiment=cnn folder=[a,${b}] num_runs=4 fraction=1e-3 mode=slow over.write=true seed=1"
    )
    own, others = read_own_keys(Keys, line.split())
    assert own == Keys(folder="[a,${b}]", num_runs=4, fraction=0.001, mode="slow", overwrite=True)
    assert others == ("experiment=cnn", "seed=1")
    assert read_own_keys(Keys, ["folder=x", "fraction=null", "model=mlp"]) == (
        Keys(folder="x"),
        ("model=mlp",),  # no misspelt mode
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "folder: missing; add folder=DIR"),
        ("folder=a folder=b", "folder: found twice; give it once"),
        ("num_runs=0", "num_runs: found '0'; give a whole number from 1 to 9"),
        ("num_runs=2.5", "num_runs: found '2.5'; give a whole number from 1 to 9"),
        ("num_runs=null", "num_runs: found 'null'; give a whole number from 1 to 9"),
        ("fraction=nan", "fraction: found 'nan'; give a number from 0, or null"),
        ("fraction=inf", "fraction: found 'inf'; give a number from 0, or null"),
        ("over.write=maybe", "over.write: found 'maybe'; give true or false"),
        ("num_run=3", "num_run: no such key (did you mean num_runs?)"),
        ("MODE=fast", "MODE: no such key (did you mean mode?)"),
    ],
)
def test_what_is_not_accepted_is_one_line(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_own_keys(Keys, given.split())
    assert str(refused.value) == said


def test_a_command_without_a_configuration_says_which_keys_it_has() -> None:
    with pytest.raises(ConfigError, match=r"^seed: no such key; there are folder=DIR, num_runs=3"):
        refuse_other_keys(Keys, ["seed=3"])


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
    assert name != "tune" or all(f"\n  autotune {other} " in said for other in COMMANDS)


def test_a_misspelt_command_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^trian: no such command \(did you mean train\?\)"):
        autotune_command(["trian", "experiment=cnn"])


@pytest.mark.command
@pytest.mark.parametrize("command", [["autotune", "profile"], ["benchmarks.replay"]])
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
