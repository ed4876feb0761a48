"""Experiments: the shipped ones and the user's own, with what they are for."""

import re
from pathlib import Path

import pytest

from autotune.config.compose import Composer
from autotune.config.experiments import named_files, options, options_help, shipped_folder
from autotune.execution.settings import study_name
from autotune.tune_study import _LISTED, tune_command


def test_experiments_are_told_with_their_first_comment(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# What mine does.\nepochs: 3\n"
    )
    found = dict(options("experiment", [str(tmp_path)]))
    assert found["mine"] == "What mine does."
    assert found.keys() - {"mine"} == {
        each.stem for each in (shipped_folder("conf") / "experiment").glob("*.yaml")
    }
    assert all(found.values()), "every shipped experiment says what it is"
    assert "  mine " in options_help("experiment", [str(tmp_path)])


@pytest.mark.parametrize("group", _LISTED)
def test_help_lists_each_option_of_a_group_with_its_first_comment(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tune_command(["--help"])
    said = capsys.readouterr().out
    for name, path in named_files(shipped_folder("conf") / group):
        purpose = dict(options(group))[name]
        assert purpose, f"the first line of {path} says what the option is"
        assert re.search(rf"^  {name} +{re.escape(purpose)}$", said, re.MULTILINE)


def test_an_experiment_in_a_folder_is_called_by_its_path(tmp_path: Path) -> None:
    deep = tmp_path / "experiment" / "vision" / "deep.yaml"
    deep.parent.mkdir(parents=True)
    deep.write_text("# @package _global_\n# What it does.\n")
    assert dict(options("experiment", [str(tmp_path)]))["vision/deep"] == "What it does."


@pytest.mark.parametrize(
    ("what", "begin"),
    [
        ("cnn", "cnn"),
        ("vision/deep", "vision_deep"),
        ("compare-a/b-and-c", "compare-a_b-and-c"),
        ("_mine", "mine"),
        ("über", "study_über"),
    ],
)
def test_the_name_of_a_study_is_that_of_a_folder(what: str, begin: str) -> None:
    config = Composer([]).compose().config
    assert study_name(config, what).startswith(f"{begin}-2")
