"""What an experiment sets inside a group goes with the option that it chose there."""

from pathlib import Path

import pytest

from autotune.config.compose import Composer
from autotune.space import Suggestion

_EXPERIMENT = """# @package _global_
defaults:
  - cnn
  - override /optimizer: sgd
  - _self_
optimizer: {lr: 0.3, momentum: 0.85}
search: {num_trials: 7}
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "found.yaml").write_text(_EXPERIMENT)
    return str(tmp_path)


def test_the_option_it_chose_has_its_values(folder: str) -> None:
    optimizer = Composer(["experiment=found"], [folder]).compose().trial.optimizer
    assert (optimizer["lr"], optimizer["momentum"]) == (0.3, 0.85)


def test_another_option_starts_from_its_own_file(folder: str) -> None:
    wanted = Composer(["experiment=cnn", "optimizer=adamw"]).compose().trial
    assert Composer(["optimizer=adamw", "experiment=found"], [folder]).compose().trial == wanted
    suggestion = Suggestion({"optimizer": "adamw"})
    assert (
        Composer(["experiment=found"], [folder])
        .compose_suggestion(suggestion, seed=wanted.seed)
        .trial
        == wanted
    )


def test_what_the_command_line_sets_stays(folder: str) -> None:
    line = ["experiment=found", "optimizer=adamw", "optimizer.lr=0.004", "+optimizer.eps=1e-7"]
    optimizer = Composer(line, [folder]).compose().trial.optimizer
    assert optimizer == {
        "_target_": "torch.optim.AdamW",
        "lr": 0.004,
        "weight_decay": 0.01,
        "eps": 1e-7,
    }


def test_settings_of_the_study_stay_whatever_is_chosen(folder: str) -> None:
    config = Composer(["experiment=found", "search=random"], [folder]).compose().config
    assert config.search.sampler["_target_"] == "optuna.samplers.RandomSampler"
    assert config.search.num_trials == 7


@pytest.mark.slow
def test_values_that_equal_an_options_own_are_not_handed_on_either(folder: str) -> None:
    (Path(folder) / "experiment" / "chained.yaml").write_text(
        "# @package _global_\ndefaults:\n- same\n- _self_\n"
    )
    (Path(folder) / "experiment" / "same.yaml").write_text(
        _EXPERIMENT.replace("lr: 0.3, momentum: 0.85", "lr: 0.01, momentum: 0.9")
    )
    for experiment in ("same", "chained"):
        optimizer = (
            Composer([f"experiment={experiment}", "optimizer=adamw"], [folder])
            .compose()
            .trial.optimizer
        )
        assert "momentum" not in optimizer


def test_another_target_does_not_inherit_the_arguments_of_the_one_it_replaces() -> None:
    composed = Composer(
        ["experiment=cnn", "loss._target_=my.loss", "allowed_targets=[my]"]
    ).compose()
    assert composed.plain["loss"] == {"_target_": "my.loss"}
    kept = Composer(
        ["experiment=cnn", "model._target_=my.Net", "model.widths=[3]", "allowed_targets=[my]"]
    ).compose()
    assert kept.plain["model"] == {"_target_": "my.Net", "widths": [3]}
    assert (
        Composer(["experiment=cnn", "model.widths=[3]"]).compose().plain["model"]["norm"] == "none"
    )


def test_an_experiment_that_names_another_target_says_its_arguments_itself(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndata: {_target_: my.data, num_train: null}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    composed = Composer(["experiment=mine", "allowed_targets=[my]"], [str(tmp_path)]).compose()
    assert composed.plain["data"] == {"_target_": "my.data", "num_train": None}


def test_a_base_in_a_folder_keeps_these_rules(tmp_path: Path) -> None:
    deep = tmp_path / "experiment" / "vision"
    deep.mkdir(parents=True)
    for path, content in (
        (deep / "base.yaml", _EXPERIMENT.replace("  - cnn\n", "  - /experiment/cnn\n")),
        (deep / "deep.yaml", "# @package _global_\ndefaults: [vision/base, _self_]\n"),
        (deep / "other.yaml", "# @package _global_\ndefaults: [base, _self_]\n"),
        (deep.parent / "beside.yaml", "# @package _global_\ndefaults: [vision/other, _self_]\n"),
        (deep.parent / "grouped.yaml", "# @package _global_\ndefaults: [{vision: base}, _self_]\n"),
    ):
        path.write_text(content)
    for experiment in ("vision/base", "vision/deep", "beside", "grouped"):
        assert (
            Composer([f"experiment={experiment}"], [str(tmp_path)])
            .compose()
            .trial.optimizer["momentum"]
            == 0.85
        )
        optimizer = (
            Composer([f"experiment={experiment}", "optimizer=adamw"], [str(tmp_path)])
            .compose()
            .trial.optimizer
        )
        assert "momentum" not in optimizer, experiment
