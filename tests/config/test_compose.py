"""Composing: what runs by name, what a suggestion changes, and how a mistake is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from autotune.config.compose import Composer
from autotune.config.experiments import shipped_folder
from autotune.config.schema import FIXED_KEYS, Config, TrialConfig
from autotune.config.space_files import read_search_space
from autotune.errors import ConfigError, InvalidTrialError, TargetNotAllowedError
from autotune.search.points import RandomTrial
from autotune.space import Suggestion

CONF = shipped_folder("conf")
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
OPTIMIZERS = ", ".join(sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml")))
HEADER = "# @package _global_\n"
COMPOSER = Composer(["experiment=cnn_smoke"])

Write = Callable[[str, str | bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of the user's own, by its path in their config folder, and returns that
    folder.
    """

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(tmp_path)

    return write


def refusal(*overrides: str, config_dirs: tuple[str, ...] = ()) -> str:
    """The one line that a composition is refused with."""
    with pytest.raises(ConfigError) as refused:
        _ = Composer(overrides, config_dirs).compose().trial
    message = str(refused.value)
    assert message
    assert "\n" not in message
    return message


def test_an_experiment_composes_to_values_and_the_names_of_chosen_files() -> None:
    composed = Composer(["experiment=cnn", "optimizer=adamw"]).compose()
    assert isinstance(composed.config, Config)
    assert composed.choices["experiment"] == "cnn"
    assert TrialConfig.from_dict(composed.trial.as_dict()) == composed.trial
    assert [
        composed.lookup(key)
        for key in ("optimizer", "optimizer.lr", "optimizer.momentum", "batch_size.nothing")
    ] == ["adamw", 1e-3, None, None]
    assert {*composed.plain} - {*composed.trial.as_dict()} <= FIXED_KEYS


def test_composing_leaves_hydras_global_state_as_it_was() -> None:
    before = GlobalHydra.instance().hydra
    Composer(["experiment=cnn"]).compose()
    with pytest.raises(ConfigError):
        Composer(["experiment=nope"]).compose()
    assert GlobalHydra.instance().hydra is before


# Suggestions.


@pytest.mark.parametrize(
    "experiment",
    [
        name if name in ("cnn", "distill") else pytest.param(name, marks=pytest.mark.slow)
        for name in EXPERIMENTS
    ],
)
def test_a_suggestion_composes_to_what_hydra_makes_of_its_overrides(experiment: str) -> None:
    composer = Composer([f"experiment={experiment}"])
    space = read_search_space(composer.compose().config.search_space, composer)
    by_chance = RandomTrial(np.random.default_rng(0))
    for suggestion in [space.suggest(by_chance) for _ in range(3)]:
        composed = composer.compose_suggestion(suggestion, seed=7)
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            overrides = [f"experiment={experiment}", *suggestion.as_overrides(), "seed=7"]
            by_hydra: Any = OmegaConf.to_container(
                OmegaConf.merge(OmegaConf.structured(Config), hydra.compose("config", overrides)),
                resolve=True,
            )
        if "source" in by_hydra["technique"]:
            by_hydra["technique"]["checkpoint"] = composed.plain["technique"]["checkpoint"]
        assert repr(composed.plain) == repr(by_hydra), "types as well"
        assert space.point_of(composed.lookup) == suggestion


def test_hydra_composes_the_command_line_once_and_not_each_suggestion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composed = []

    def compose(name: str, overrides: list[str], **settings: Any) -> Any:
        composed.append(overrides)
        return hydra.compose(name, overrides, **settings)

    monkeypatch.setattr("autotune.config.config_files.compose", compose)
    composer = Composer(["experiment=cnn_smoke"])
    for optimizer in ("sgd", "adamw"):
        for lr_schedule in ("constant", "cosine"):
            values = {"optimizer": optimizer, "lr_schedule": lr_schedule, "optimizer.lr": 0.5}
            composer.compose_suggestion(Suggestion(values), seed=0)
    assert composed == [["experiment=cnn_smoke"]]


@pytest.mark.parametrize(
    ("file", "content", "values"),
    [
        pytest.param(
            "optimizer/own.yaml",
            "# @package _global_\ndefaults: [sgd@optimizer]\nbatch_size: 77\n",
            {"optimizer": "own", "lr_schedule": "cosine"},
            id="an option that sets a value outside its group",
        ),
        pytest.param(
            "experiment/own.yaml",
            "# @package _global_\ndefaults: [cnn]\noptimizer: {momentum: 0.5}\nepochs: 7\n",
            {"optimizer": "adamw", "lr_schedule": "cosine"},
            id="an experiment with values for an option of its own",
        ),
        pytest.param(
            "model/nets/wide.yaml",
            "_target_: autotune.workloads.cnn.SimpleCNN\nwidths: [64, 64]\nnorm: none\n",
            {"model": "nets/wide", "model.norm": "batch"},
            id="an option in a folder",
        ),
    ],
)
def test_a_suggestion_of_ones_own_options_is_that_command_line(
    write: Write, file: str, content: str, values: dict[str, object]
) -> None:
    experiment = "own" if file == "experiment/own.yaml" else "cnn"
    composer = Composer([f"experiment={experiment}", "optimizer.lr=0.3"], [write(file, content)])
    suggestion = Suggestion(values)
    assert repr(composer.compose_suggestion(suggestion, seed=7)) == repr(
        composer.compose([*suggestion.as_overrides(), "seed=7"])
    )


def test_one_suggestion_leaves_nothing_behind_for_the_next() -> None:
    first = Suggestion({"optimizer": "sgd", "optimizer.lr": 0.5, "model.widths": [1, 2]})
    COMPOSER.compose_suggestion(first, seed=1)
    second = COMPOSER.compose_suggestion(Suggestion({"optimizer": "sgd"}), seed=0)
    assert second == COMPOSER.compose(["optimizer=sgd"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "adam"}, "optimizer=adam: there is no such file (did you mean adamw?); "),
        (
            {"optimizer": "adamw", "optimizer.momentum": 0.5},
            "optimizer.momentum: no config has this key; optimizer has _target_, lr, weight_decay",
        ),
        ({"epochs": "many"}, "epochs: Value 'many' of type 'str' could not be converted to Float"),
        ({"epochs": 0}, "epochs: found 0.0"),
        ({"model._target_": "os.system"}, "model._target_: found 'os.system'; accepted here: "),
    ],
)
def test_a_point_that_no_training_can_run_is_an_invalid_trial(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidTrialError) as refused:
        COMPOSER.compose_suggestion(Suggestion(values), seed=0)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


# Mistakes.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("experiment=cn", "experiment=cn: there is no such file (did you mean cnn?); there are "),
        (
            "optimizer=sdg",
            f"optimizer=sdg: there is no such file (did you mean sgd?); there are {OPTIMIZERS}",
        ),
        ("optimizer=null", f"optimizer=null: there is no such file; there are {OPTIMIZERS}"),
        ("optimizer=[sgd]", "optimizer=[sgd]: there is no such file; there are "),
        ("model={width: [8]}", "model={width: [8]}: there is no such file; there are mlp, "),
        ("optimiser=sgd", "optimiser: no such key (did you mean optimizer?)"),
        ("epocs=3", "epocs: no such key (did you mean epochs?); --cfg job prints all keys"),
        ("+optimizer=adamw", "+optimizer=adamw: write it without a plus"),
        ("experiment=cnn,mlp", "experiment=cnn,mlp: a study has one experiment; "),
        (
            "search.sampler.num_candidates=64",
            "search.sampler.num_candidates: no such key; --cfg job prints all keys;"
            " +search.sampler.num_candidates=VALUE adds an argument",
        ),
        ("optimizer.momentums=1", "optimizer.momentums: no such key (did you mean optimizer.mom"),
        ("+epocs=3", "epocs: Key 'epocs' not in 'Config'"),
        ("epochs=many", "epochs: Value 'many' of type 'str' could not be converted to Float"),
        ("batch_size=1.5", "batch_size: Value '1.5' of type 'float' could not be converted to I"),
        ("epochs=null", "epochs: Incompatible value 'None' for field of type 'float'"),
        ("epochs=${nope}", "epochs: Interpolation key 'nope' not found"),
        ('epochs="${"', "epochs: no viable alternative at input '${'"),
        ("target=3", "target: found 3; write target.KEY=VALUE"),
        ("batch_size=0", "batch_size: found 0"),
        ("device=gpu", "device: found 'gpu'"),
        ("target.mode=up", "target.mode: found 'up'"),
        ("hydra.searchpath=[a]", "hydra.searchpath=[a]: use --config-dir DIR"),
        ("~epochs", "~epochs: a key cannot be taken out"),
        ("epochs", "'epochs': not an override"),
        ("a b=3", "'a b=3': not an override"),
        ("=3", "'=3': not an override"),
        ("allowed_targets=[3]", "allowed_targets=[3]: write a list of package names"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_its_key(
    override: str, message: str
) -> None:
    assert refusal(override).startswith(message)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (HEADER + "search: [1\nbatch_size: 2\n", "{path} line 3: expected ',' or ']'"),
        (HEADER + "epochs: 1\nepochs: 2\n", "{path} line 3: epochs: stands twice"),
        (b"\xff\xfe\x00\x80", "{path}: cannot be read: it is not UTF-8"),
        (b"", "experiment=mine: the file's first line must be: # @package _global_"),
        ("epochs: 3\n", "experiment=mine: the file's first line must be: # @package _global_"),
        (HEADER + "- a\n", "{path}: found a list"),
        (HEADER + "epocs: 3\n", "epocs: Key 'epocs' not in 'Config'"),
        (HEADER + "epochs: many\n", "epochs: Value 'many' of type 'str' could not be converted"),
        (HEADER + "epochs: ${nope\n", "{path}: epochs: found ${ with more than a key"),
        (
            HEADER + "defaults: [override /optimizer: sdg]\n",
            "optimizer=sdg: there is no such file (did you mean sgd?); there are ",
        ),
        (HEADER + "defaults: [nope]\n", "experiment=nope: there is no such file; there are "),
        (HEADER + "defaults: 3\n", "{path}: defaults: found a int"),
        (HEADER + "confirm: none\n", "an entry of the defaults list: override /confirm: none"),
        (
            HEADER + "model: {inner: [{_target_: os.system}]}\n",
            "model.inner.0._target_: found 'os.system'; accepted here: ",
        ),
        (
            HEADER + "allowed_targets: [os]\nmodel: {_target_: os.system}\n",
            "allowed_targets: found ['os'] in a file; it is read from the command line only: add"
            " allowed_targets=[os] if you trust that code",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_finds_it(
    content: str | bytes, part: str, write: Write
) -> None:
    folder = write("experiment/mine.yaml", content)
    message = refusal("experiment=mine", config_dirs=(folder,))
    assert part.replace("{path}", f"{folder}/experiment/mine.yaml") in message
    assert Composer(["experiment=cnn"], [folder]).compose().trial, "others still run"


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    said = refusal("experiment=cnn", config_dirs=(f"{tmp_path}/nope",))
    assert said == f"--config-dir {tmp_path}/nope: no such folder"


def test_an_argument_of_ones_own_function_is_suggested(write: Write) -> None:
    folder = write(
        "experiment/mine.yaml", HEADER + "training: {_target_: my_module.fit, hidden: 3, lr: 0.1}\n"
    )
    said = refusal("experiment=mine", "training.hiden=3", config_dirs=(folder,))
    assert said.startswith("training.hiden: no such key (did you mean training.hidden?)")
    said = refusal("experiment=mine", "training.accumulation_steps=3", config_dirs=(folder,))
    assert said.endswith("; +training.accumulation_steps=VALUE adds an argument")


# Files of the user's own.


def test_an_experiment_of_ones_own_runs_by_name_beside_the_shipped_ones(write: Write) -> None:
    folder = write(
        "it's mine, too/experiment/vision/deep.yaml",
        HEADER + "defaults: [{override /model: nets/wide}, override /optimizer: adamw]\nepochs: 3",
    )
    write(
        "it's mine, too/model/nets/wide.yaml",
        "_target_: autotune.workloads.cnn.SimpleCNN\nwidths: [64, 64]\nnorm: none\n",
    )
    folder = f"{folder}/it's mine, too"
    composed = Composer(["experiment=vision/deep", "optimizer.lr=0.5"], [folder]).compose()
    assert [
        composed.lookup(key)
        for key in ("experiment", "model", "model.widths", "epochs", "optimizer", "optimizer.lr")
    ] == ["vision/deep", "nets/wide", [64, 64], 3, "adamw", 0.5]
    said = refusal("experiment=vision/dep", config_dirs=(folder,))
    assert "(did you mean vision/deep?); there are cifar10_speed, " in said
    assert "nets/wide" in refusal("model=nets/wid", config_dirs=(folder,))


def test_a_file_that_a_shipped_one_of_its_name_would_hide_is_refused(write: Write) -> None:
    folder = write("experiment/cnn.yaml", HEADER + "epochs: 3\n")
    said = refusal("experiment=cnn", config_dirs=(folder,))
    assert said.startswith("experiment/cnn: autotune ships a file of this name, which hides ")
    write("experiment/cnn.yaml", (CONF / "experiment" / "cnn.yaml").read_bytes())
    assert Composer(["experiment=cnn"], [folder]).compose().choices["experiment"] == "cnn"


def test_the_command_line_lets_a_package_in() -> None:
    with pytest.raises(TargetNotAllowedError):
        Composer(["model._target_=my_package.Net"]).compose()
    composed = Composer(
        ["model._target_=my_package.Net", "allowed_targets=my_package", "allowed_targets=[other]"]
    ).compose()
    assert composed.trial.allowed_targets == ["my_package", "other"]


# Printing and taking apart.


def test_the_configuration_is_printed_with_its_interpolations_or_resolved() -> None:
    composer = Composer(["experiment=cnn", "epochs=${batch_size}"])
    assert "epochs: ${batch_size}\n" in composer.config_yaml(resolve=False).replace('"', "")
    assert "epochs: 64" in composer.config_yaml(resolve=True)


def test_values_of_a_training_that_a_command_line_sets_are_told_from_the_studys() -> None:
    overrides = [
        "experiment=cnn",
        "optimizer=adamw",
        "optimizer.lr=0.5",
        "model.widths=[1,2]",
        "target.value=0.9",
        "search.num_trials=3",
        "study.name=x",
        "tracking=none",
        "+model.extra={a: 'b c'}",
    ]
    assert Composer(overrides).compose().values_of(overrides) == {
        "optimizer": "adamw",
        "optimizer.lr": 0.5,
        "model.widths": [1, 2],
        "target.value": 0.9,
        "model.extra": {"a": "b c"},
    }
