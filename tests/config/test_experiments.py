"""Experiments: what they are for, what another option does to their values, what they start from,
and how a study writes one.
"""

import re
from pathlib import Path

import pytest
import yaml

from autotune.config.compose import Composer
from autotune.config.experiments import named_files, options, options_help, shipped_folder
from autotune.errors import ConfigError, InvalidTrialError
from autotune.execution.exported import check_exported, exported_experiment
from autotune.execution.settings import study_name
from autotune.space import Suggestion
from autotune.tune_study import _LISTED, tune_command

HEADER = "# @package _global_\n"
FOUND = (
    HEADER
    + "defaults: [cnn, override /optimizer: sgd, _self_]\noptimizer: {lr: 0.3, momentum: 0.85}\n"
    "search: {num_trials: 7}\n"
)
"""An experiment with values for the option that it chooses."""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with the experiments ``found``, and ``base``, which trains something."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "found.yaml").write_text(FOUND)
    (tmp_path / "experiment" / "base.yaml").write_text(HEADER + "epochs: 3\n")
    return str(tmp_path)


def test_experiments_are_told_with_their_first_comment(tmp_path: Path) -> None:
    (tmp_path / "experiment" / "vision").mkdir(parents=True)
    (tmp_path / "experiment" / "vision" / "mine.yaml").write_text(
        "# @package _global_\n# What mine does.\nepochs: 3\n"
    )
    found = dict(options("experiment", [str(tmp_path)]))
    assert found["vision/mine"] == "What mine does."
    assert found.keys() - {"vision/mine"} == {
        path.stem for path in (shipped_folder("conf") / "experiment").glob("*.yaml")
    }
    assert all(found.values()), "every shipped experiment says what it is"
    assert "  vision/mine " in options_help("experiment", [str(tmp_path)])


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


@pytest.mark.parametrize(
    ("what", "begin"),
    [
        ("vision/deep", "vision_deep"),
        ("compare-a/b-and-c", "compare-a_b-and-c"),
        ("_mine", "mine"),
        ("über", "study_über"),
    ],
)
def test_the_name_of_a_study_is_that_of_a_folder(what: str, begin: str) -> None:
    assert study_name(Composer([]).compose().config, what).startswith(f"{begin}-2")


# Values that an experiment sets inside a group.


def test_another_option_starts_from_its_own_file(folder: str) -> None:
    optimizer = Composer(["experiment=found"], [folder]).compose().trial.optimizer
    assert (optimizer["lr"], optimizer["momentum"]) == (0.3, 0.85)
    wanted = Composer(["experiment=cnn", "optimizer=adamw"]).compose().trial
    assert Composer(["optimizer=adamw", "experiment=found"], [folder]).compose().trial == wanted
    suggested = Composer(["experiment=found"], [folder]).compose_suggestion(
        Suggestion({"optimizer": "adamw"}), seed=wanted.seed
    )
    assert suggested.trial == wanted


def test_the_option_it_chose_has_its_values_wherever_it_is_chosen_again(folder: str) -> None:
    composer = Composer(["experiment=found", "optimizer=adamw"], [folder])
    suggested = composer.compose_suggestion(Suggestion({"optimizer": "sgd"}), seed=0)
    assert suggested.trial.optimizer["momentum"] == 0.85


def test_what_the_command_line_sets_stays(folder: str) -> None:
    line = ["experiment=found", "optimizer=adamw", "optimizer.lr=0.004", "+optimizer.eps=1e-7"]
    wanted = {"_target_": "torch.optim.AdamW", "lr": 0.004, "weight_decay": 0.01, "eps": 1e-7}
    assert Composer(line, [folder]).compose().trial.optimizer == wanted
    config = Composer(["experiment=found", "search=random"], [folder]).compose().config
    assert config.search.sampler["_target_"] == "optuna.samplers.RandomSampler"
    assert config.search.num_trials == 7, "a setting of the study"


def test_another_target_does_not_inherit_the_arguments_of_the_one_it_replaces(
    folder: str,
) -> None:
    line = ["experiment=cnn", "loss._target_=my.loss", "allowed_targets=[my]"]
    assert Composer(line).compose().plain["loss"] == {"_target_": "my.loss"}
    line = ["experiment=cnn", "model._target_=my.Net", "model.norm=none", "allowed_targets=[my]"]
    assert Composer(line).compose().plain["model"] == {"_target_": "my.Net", "norm": "none"}
    (Path(folder) / "experiment" / "other.yaml").write_text(
        HEADER + "defaults: [cnn]\ndata: {_target_: my.data, num_train: null}\n"
    )
    composed = Composer(["experiment=other", "allowed_targets=[my]"], [folder]).compose()
    assert composed.plain["data"] == {"_target_": "my.data", "num_train": None}


def test_a_base_in_a_folder_keeps_these_rules(tmp_path: Path) -> None:
    deep = tmp_path / "experiment" / "vision"
    deep.mkdir(parents=True)
    (deep / "base.yaml").write_text(FOUND.replace("[cnn", "[/experiment/cnn"))
    for path, defaults in (
        (deep / "deep.yaml", "[vision/base, _self_]"),
        (deep.parent / "beside.yaml", "[vision/base, _self_]"),
    ):
        path.write_text(f"{HEADER}defaults: {defaults}\n")
    for experiment in ("vision/base", "vision/deep", "beside"):
        line = [f"experiment={experiment}"]
        optimizer = Composer(line, [str(tmp_path)]).compose().trial.optimizer
        assert optimizer["momentum"] == 0.85
        line.append("optimizer=adamw")
        assert "momentum" not in Composer(line, [str(tmp_path)]).compose().trial.optimizer


# Sources: the checkpoint that a technique means when it names an experiment.

TRANSFER = ["experiment=cnn", "technique=transfer", "technique.source=base"]


def checkpoint(*overrides: str, folder: str) -> str:
    return str(Composer(overrides, [folder]).compose().trial.technique["checkpoint"])


def test_a_source_is_a_file_in_the_folder_of_all_studies(folder: str, tmp_path: Path) -> None:
    line = [*TRANSFER, f"study.folder={tmp_path}/all", "data.root=/d", "optimizer.lr=0.5"]
    composer = Composer([*line, "data=fashion_mnist", "allowed_targets=[mine]"], [folder])
    path = composer.compose().trial.technique["checkpoint"]
    assert Path(path).parent == tmp_path / "all" / "checkpoints"
    assert Path(path).name.startswith("base-")
    source = composer.sources["base"]
    assert str(source.path) == path
    assert source.arguments == (
        "experiment=base",  # whose data has no root
        f"study.folder={tmp_path}/all",
        "allowed_targets=[mine]",
        "--config-dir",
        folder,
    )


def test_the_file_is_another_one_where_the_source_trains_something_else(folder: str) -> None:
    first = checkpoint(*TRANSFER, folder=folder)
    assert checkpoint(*TRANSFER, "optimizer.lr=0.3", folder=folder) == first
    (Path(folder) / "experiment" / "base.yaml").write_text(HEADER + "epochs: 4\n")
    assert checkpoint(*TRANSFER, folder=folder) != first


def test_a_suggestion_may_name_a_source(folder: str) -> None:
    composer = Composer(["experiment=cnn"], [folder])
    values = {"technique": "transfer", "technique.source": "base"}
    trial = composer.compose_suggestion(Suggestion(values), seed=0).trial
    assert trial.technique["checkpoint"] == str(composer.sources["base"].path)
    values = {"technique": "transfer", "technique.source": "nope"}
    with pytest.raises(InvalidTrialError, match=r"technique\.source: experiment=nope: there is no"):
        composer.compose_suggestion(Suggestion(values), seed=0)
    with pytest.raises(ConfigError, match=r"technique: found source base and checkpoint a\.saf"):
        Composer([*TRANSFER, "technique.checkpoint=a.safetensors"], [folder]).compose()


@pytest.mark.slow
def test_a_source_may_have_a_source_but_not_itself(folder: str) -> None:
    starting = HEADER + "defaults: [override /technique: transfer]\ntechnique: {{source: {}}}\n"
    base = Path(folder) / "experiment" / "base.yaml"
    base.with_name("middle.yaml").write_text(starting.format("base"))
    middle = [*TRANSFER[:2], "technique.source=middle"]
    first = checkpoint(*middle, folder=folder)
    base.write_text(HEADER + "epochs: 4\n")
    assert checkpoint(*middle, folder=folder) != first, "what a source starts from is a part of it"
    base.write_text(starting.format("middle"))
    with pytest.raises(ConfigError, match=r"middle from base from middle: an experiment cannot"):
        Composer(middle, [folder]).compose()


# Exported experiments.


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (["experiment=cnn"], {"optimizer": "adamw", "optimizer.lr": 0.002, "batch_size": 32}),
        (["experiment=found"], {"optimizer": "adamw", "lr_schedule": "cosine"}),
        (["experiment=found", "precision=bf16", "model.norm=batch"], {"optimizer.lr": 0.1}),
        (["experiment=mlp", "search=tpe"], {"model.widths": []}),
        (["experiment=cnn", "model._target_=torch.nn.Sequential"], {}),
    ],
)
def test_an_exported_experiment_composes_to_what_was_found(
    line: list[str], values: dict[str, object], folder: str
) -> None:
    composer, point = Composer(line, [folder]), Suggestion(values)
    text, _ = exported_experiment(composer, point, 5, comments=["found"])
    assert text.startswith("# @package _global_\n# found\n")
    path = Path(folder) / "experiment" / "vision" / "exported.yaml"
    path.parent.mkdir()
    path.write_text(text)
    again = Composer(["experiment=vision/exported"], [folder]).compose()
    check_exported(again.trial, composer.compose_suggestion(point, seed=5).trial)
    asked = Composer(line[:1], [folder]).compose().plain
    for key in ("search_space", "search", "target", "confirm"):
        assert again.plain[key] == asked[key], "the study that its own experiment describes"
    assert len(yaml.safe_load(text)) < 12, "what differs from the defaults"


def test_an_experiment_that_composes_to_something_else_is_refused() -> None:
    one, other = (
        Composer(["experiment=cnn", f"batch_size={size}"]).compose().trial for size in (32, 64)
    )
    with pytest.raises(ConfigError, match=r"best\.yaml: batch_size: 64 there, 32 here"):
        check_exported(one, other)
