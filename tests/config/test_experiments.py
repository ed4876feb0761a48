"""Experiments: the shipped ones and the user's own, with what they are for."""

from pathlib import Path

from autotune.config.experiments import experiments, experiments_help, shipped_folder


def test_experiments_are_told_with_their_first_comment(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n# What mine does.\nepochs: 3\n")
    found = dict(experiments([str(tmp_path)]))
    assert found["mine"] == "What mine does."
    assert found.keys() - {"mine"} == {each.stem for each in (shipped_folder("conf") / "experiment").glob("*.yaml")}
    assert all(found.values()), "every shipped experiment says what it is"
    assert "  mine " in experiments_help([str(tmp_path)])
