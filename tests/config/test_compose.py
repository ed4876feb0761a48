"""Composing: what runs by name, and how a mistake is told."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.config.compose import Composer, split_overrides
from autotune.config.schema import FIXED_KEYS, Config, TrialConfig
from autotune.config.space_files import read_search_space
from autotune.errors import ConfigError, InvalidTrialError, TargetNotAllowedError
from autotune.search.randomness import RandomTrial
from autotune.space import Choice, Float, PowerOfTwo, SearchSpace, Suggestion

CONF = Path(__file__).parent.parent.parent / "conf"
EXPERIMENTS = sorted(each.stem for each in (CONF / "experiment").glob("*.yaml"))
OPTIMIZERS = ", ".join(sorted(each.stem for each in (CONF / "optimizer").glob("*.yaml")))

WriteExperiment = Callable[[str, str | bytes], str]


@pytest.fixture
def write_experiment(tmp_path: Path) -> WriteExperiment:
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


# every one of them, with every branch, in test_space_files.py
def test_an_experiment_composes() -> None:
    experiment = EXPERIMENTS[0]
    composed = Composer([f"experiment={experiment}"]).compose()
    assert isinstance(composed.config, Config)
    assert composed.config.search_space
    assert composed.choices["experiment"] == experiment
    assert TrialConfig.from_dict(composed.trial.as_dict()) == composed.trial


def test_a_lookup_gives_values_and_the_names_of_chosen_files() -> None:
    composed = Composer(["experiment=cnn", "optimizer=adamw"]).compose()
    assert composed.lookup("optimizer") == "adamw"
    assert composed.lookup("optimizer.lr") == 1e-3
    assert composed.lookup("optimizer.momentum") is None
    assert composed.lookup("batch_size.nothing") is None


def test_composing_leaves_hydras_global_state_as_it_was() -> None:
    before = GlobalHydra.instance().hydra
    Composer(["experiment=cnn"]).compose()
    with pytest.raises(ConfigError):
        Composer(["experiment=nope"]).compose()
    assert GlobalHydra.instance().hydra is before


# Mistakes on the command line.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "experiment=cn",
            f"experiment=cn: accepted are {', '.join(EXPERIMENTS)} (did you mean cnn?)",
        ),
        ("optimizer=sdg", f"optimizer=sdg: accepted are {OPTIMIZERS} (did you mean sgd?)"),
        (
            "optimiser=sgd",
            (
                "optimiser: no such key (did you mean optimizer?); accepted keys are shown by"
                " --cfg job"
            ),
        ),
        (
            "epocs=3",
            "epocs: no such key (did you mean epochs?); accepted keys are shown by --cfg job",
        ),
        ("+experiment=mlp", "+experiment=mlp: accepted is experiment=mlp"),
        ("+optimizer=adamw", "+optimizer=adamw: accepted is optimizer=adamw"),
        ("++optimizer=adamw", "++optimizer=adamw: accepted is optimizer=adamw"),
        (
            "experiment=cnn,mlp",
            "experiment=cnn,mlp: accepted is one NAME; for a study of each, run the command twice",
        ),
        (
            "search.sampler.num_candidates=64",
            (
                "search.sampler.num_candidates: no such key; accepted keys are shown by --cfg job;"
                " another argument is added with a plus: +search.sampler.num_candidates=VALUE"
            ),
        ),
        (
            "optimizer.momentums=0.5",
            (
                "optimizer.momentums: no such key (did you mean optimizer.momentum?); accepted keys"
                " are shown by --cfg job"
            ),
        ),
        ("+epocs=3", "epocs: Key 'epocs' not in 'Config'"),
        ("epochs=many", "epochs: Value 'many' of type 'str' could not be converted to Float"),
        (
            "batch_size=many",
            "batch_size: Value 'many' of type 'str' could not be converted to Integer",
        ),
        (
            "batch_size=1.5",
            "batch_size: Value '1.5' of type 'float' could not be converted to Integer",
        ),
        ("epochs=null", "epochs: Incompatible value 'None' for field of type 'float'"),
        ("epochs=${nope}", "epochs: Interpolation key 'nope' not found"),
        ("target=3", "target: found 3, accepted is a mapping"),
        ("batch_size=0", "batch_size: found 0, accepted is a whole number from 1"),
        ("device=gpu", "device: found 'gpu', accepted are auto, cpu, cuda, mps, xpu"),
        ("target.mode=up", "target.mode: found 'up', accepted are max, min"),
        ("model=3", "model=3: accepted is GROUP=NAME with the name of one of the group's files"),
        (
            "=3",
            (
                "'=3': not an override; accepted is key=value (quote values with special"
                " characters: 'key=\"a b\"')"
            ),
        ),
        (
            '+=""',
            (
                "'+=\"\"': not an override; accepted is key=value (quote values with special"
                " characters: 'key=\"a b\"')"
            ),
        ),
        ("experiment=[[[[]]]]", "experiment=[[[[]]]]: found a list, accepted is one of "),
        ("hydra.searchpath=[a]", "hydra.searchpath=[a]: accepted is --config-dir DIR"),
        (
            "optimizer=null",
            "optimizer=null: accepted is GROUP=NAME with the name of one of the group's files",
        ),
        (
            "model={width: [8]}",
            (
                "model: is a config group; accepted is the name of one of its files, or a key in it"
                " as in model.KEY=value"
            ),
        ),
        ("~epochs", "~epochs: a key cannot be taken out; accepted is key=value"),
        (
            "epochs",
            (
                "'epochs': not an override; accepted is key=value (quote values with special"
                " characters: 'key=\"a b\"')"
            ),
        ),
        (
            "a b=3",
            (
                "'a b=3': not an override; accepted is key=value (quote values with special"
                " characters: 'key=\"a b\"')"
            ),
        ),
        (
            "allowed_targets=3",
            (
                "allowed_targets=3: accepted is a list of package names, as in"
                " allowed_targets=[my_package]"
            ),
        ),
        (
            "allowed_targets=[3]",
            (
                "allowed_targets=[3]: accepted is a list of package names, as in"
                " allowed_targets=[my_package]"
            ),
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_its_key(
    override: str, message: str
) -> None:
    assert (
        refusal(override).startswith(message)
        if message.endswith(" ")
        else refusal(override) == message
    )


@pytest.mark.parametrize("found", ["[sgd,lion]", "[sgd,adamw]", "[sgd,{a: 1}]", "[sgd]", "[]"])
def test_a_list_of_a_groups_options_is_refused_with_where_to_write_it(found: str) -> None:
    assert (
        refusal(f"optimizer={found}")
        == f"optimizer={found}: found a list, accepted is one of {OPTIMIZERS}; to search over"
        " several, list them in a search space (optimizer: [A, B]) or write"
        " optimizer=choice(A,B)"
    )


def test_a_text_that_no_interpolation_can_be_read_from_is_refused() -> None:
    assert refusal('epochs="${"').startswith("Error merging override epochs=")


# Mistakes in files of the user's own.

HEADER = "# @package _global_\n"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (HEADER + "search: [1\nbatch_size: 2\n", ["{path}", "line 3", "expected ',' or ']'"]),
        (
            HEADER + "search:\n\tnum_trials: 3\n",
            ["{path}", "line 3", "'\\t' that cannot start any token"],
        ),
        (HEADER + "epochs: 1\nepochs: 2\n", ["{path}", "line 3", "epochs: stands twice"]),
        (b"\xff\xfe\x00\x80", ["{path}: cannot be read: it is not UTF-8"]),
        (b"epochs: \x00", ["{path}", "special characters are not allowed"]),
        (b"", ["experiment=mine: the file's first line must be: # @package _global_"]),
        ("epochs: 3\n", ["experiment=mine: the file's first line must be: # @package _global_"]),
        (
            HEADER + "- a\n",
            ["experiment/mine", "{path}: found a list, accepted is a mapping of keys to values"],
        ),
        ("# @package a b\nepochs: 3\n", ["Too many components in '@package a b'"]),
        (HEADER + "epocs: 3\n", ["epocs: Key 'epocs' not in 'Config'"]),
        (
            HEADER + "epochs: many\n",
            ["epochs: Value 'many' of type 'str' could not be converted to Float"],
        ),
        (
            HEADER + "epochs: ${nope\n",
            ["{path}: epochs: found ${ with more than a key, accepted in a file is ${KEY}"],
        ),
        (
            HEADER + "defaults: [override /optimizer: sdg]\n",
            [f"optimizer=sdg: accepted are {OPTIMIZERS} (did you mean sgd?)"],
        ),
        (
            HEADER + "defaults: [override /optimizer: [sgd, lion]]\n",
            [
                "optimizer/lion: no such file; the defaults list of config, or of a file that"
                " overrides it, names it"
            ],
        ),
        (
            HEADER + "defaults: [nope]\n",
            ["experiment/nope: no such file; the defaults list of experiment/mine, "],
        ),
        (
            HEADER + "confirm: none\n",
            [
                "confirm: found 'none' in a file",
                "an entry of the defaults list: override /confirm: none",
            ],
        ),
        (
            HEADER + "optimizer: adamw\n",
            ["optimizer: found 'adamw' in a file where optimizer=sgd has keys"],
        ),
        (
            HEADER + "defaults: 3\n",
            ["experiment/mine", "{path}: defaults: found a int, accepted is a list"],
        ),
        (
            HEADER + "model: {inner: [{_target_: os.system}]}\n",
            ["model.inner.0._target_: found 'os.system'; accepted here: "],
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_finds_it(
    content: str | bytes, parts: list[str], write_experiment: WriteExperiment
) -> None:
    folder = write_experiment("experiment/mine.yaml", content)
    message = refusal("experiment=mine", config_dirs=(folder,))
    for part in parts:
        assert part.replace("{path}", f"{folder}/experiment/mine.yaml") in message


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads every file")
def test_a_file_that_may_not_be_read_is_one_line(write_experiment: WriteExperiment) -> None:
    folder = write_experiment("experiment/mine.yaml", HEADER)
    (Path(folder) / "experiment" / "mine.yaml").chmod(0)
    assert "Permission denied" in refusal("experiment=mine", config_dirs=(folder,))


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert (
        refusal("experiment=cnn", config_dirs=(f"{tmp_path}/nope",))
        == f"--config-dir {tmp_path}/nope: no such folder"
    )


def test_an_argument_of_ones_own_function_is_suggested(write_experiment: WriteExperiment) -> None:
    folder = write_experiment(
        "experiment/mine.yaml", HEADER + "training: {_target_: my_module.fit, hidden: 3, lr: 0.1}\n"
    )
    said = refusal("experiment=mine", "training.hiden=3", config_dirs=(folder,))
    assert (
        said
        == "training.hiden: no such key (did you mean training.hidden?); accepted keys are shown by"
        " --cfg job"
    )
    said = refusal("experiment=mine", "training.accumulation_steps=3", config_dirs=(folder,))
    assert said.endswith(
        "; another argument is added with a plus: +training.accumulation_steps=VALUE"
    )


def test_an_experiment_of_ones_own_runs_by_name_beside_the_shipped_ones(
    write_experiment: WriteExperiment,
) -> None:
    folder = write_experiment(
        "experiment/mine.yaml", HEADER + "defaults: [override /optimizer: adamw]\nepochs: 3\n"
    )
    composed = Composer(["experiment=mine", "optimizer.lr=0.5"], [folder]).compose()
    assert (
        composed.plain["epochs"],
        composed.lookup("optimizer"),
        composed.lookup("optimizer.lr"),
    ) == (3, "adamw", 0.5)
    assert refusal("experiment=min", config_dirs=(folder,)).startswith(
        "experiment=min: accepted are cifar10_speed, "
    )
    assert refusal("experiment=min", config_dirs=(folder,)).endswith(" (did you mean mine?)")
    assert (
        Composer(["experiment=cnn"], [folder]).compose().plain
        == Composer(["experiment=cnn"]).compose().plain
    )


def test_options_in_folders_are_chosen_and_told_by_their_paths(
    write_experiment: WriteExperiment,
) -> None:
    folder = write_experiment(
        "experiment/vision/deep.yaml", HEADER + "defaults: [{override /model: nets/wide}]\n"
    )
    write_experiment(
        "model/nets/wide.yaml",
        "_target_: autotune.workloads.cnn.SimpleCNN\nwidths: [64, 64]\nnorm: none\n",
    )
    composed = Composer(["experiment=vision/deep"], [folder]).compose()
    assert (
        composed.lookup("experiment"),
        composed.lookup("model"),
        composed.lookup("model.widths"),
    ) == (
        "vision/deep",
        "nets/wide",
        [64, 64],
    )
    suggestion = Suggestion({"model": "nets/wide"})
    found = Composer(["experiment=cnn"], [folder]).compose_suggestion(suggestion, seed=0)
    assert (found.lookup("model"), found.lookup("model.widths")) == ("nets/wide", [64, 64])
    said = refusal("experiment=vision/dep", config_dirs=(folder,))
    assert said.startswith("experiment=vision/dep: accepted are cifar10_speed, ")
    assert said.endswith(" (did you mean vision/deep?)")
    assert "nets/wide" in refusal("model=nets/wid", config_dirs=(folder,))


def test_a_folder_with_a_space_and_a_quote_in_its_name_is_read(
    write_experiment: WriteExperiment,
) -> None:
    folder = write_experiment("it's mine, too/experiment/mine.yaml", HEADER + "epochs: 3\n")
    assert (
        Composer(["experiment=mine"], [f"{folder}/it's mine, too"]).compose().plain["epochs"] == 3
    )


def test_a_file_that_a_shipped_one_of_its_name_would_hide_is_refused(
    write_experiment: WriteExperiment,
) -> None:
    folder = write_experiment("experiment/cnn.yaml", HEADER + "epochs: 3\n")
    assert (
        refusal("experiment=cnn", config_dirs=(folder,))
        == "experiment=cnn: autotune ships a file of this name, which hides"
        f" {folder}/experiment/cnn.yaml; accepted is another name"
    )
    write_experiment("experiment/cnn.yaml", (CONF / "experiment" / "cnn.yaml").read_bytes())
    assert Composer(["experiment=cnn"], [folder]).compose().choices["experiment"] == "cnn"


# What may be named.


def test_a_file_cannot_let_code_in_by_itself(write_experiment: WriteExperiment) -> None:
    folder = write_experiment(
        "experiment/mine.yaml", HEADER + "allowed_targets: [os]\nmodel: {_target_: os.system}\n"
    )
    assert (
        refusal("experiment=mine", config_dirs=(folder,))
        == "allowed_targets: found ['os'] in a file; it is read from the command line only: add"
        " allowed_targets=[os] if you trust that code"
    )


def test_the_command_line_lets_a_package_in() -> None:
    with pytest.raises(TargetNotAllowedError):
        Composer(["model._target_=my_package.Net"]).compose()
    composed = Composer(
        ["model._target_=my_package.Net", "allowed_targets=my_package", "allowed_targets=[other]"]
    ).compose()
    assert composed.trial.allowed_targets == ("my_package", "other")


# Suggestions.

COMPOSER = Composer(["experiment=cnn_smoke"])
SPACE = read_search_space(["search_spaces/cnn.yaml"], COMPOSER)


@st.composite
def points(draw: st.DrawFn, space: SearchSpace) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, parameter in space.parameters.items():
        if isinstance(parameter, Choice):
            values[key], beneath = draw(st.sampled_from(parameter.options))
            values |= draw(points(beneath))
        else:
            low, high = parameter.ends()
            numbers = (
                st.floats(low, high) if isinstance(parameter, Float) else st.integers(low, high)
            )
            values[key] = draw(
                st.sampled_from([low, high]) if isinstance(parameter, PowerOfTwo) else numbers
            )
    return values


@pytest.mark.slow
@given(values=points(SPACE), seed=st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_a_suggestion_composes_to_what_hydra_makes_of_its_overrides(
    values: dict[str, object], seed: int
) -> None:
    suggestion = Suggestion(values)
    kept = COMPOSER.compose_suggestion(suggestion, seed=seed)
    anew = COMPOSER.compose([*suggestion.as_overrides(), f"seed={seed}"])
    assert kept == anew
    assert repr(kept.plain) == repr(anew.plain), "types as well"
    assert SPACE.point_of(kept.lookup) == suggestion


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_options_put_together_are_what_hydra_makes_of_them(experiment: str) -> None:
    composer = Composer([f"experiment={experiment}"])
    space = read_search_space(composer.compose().config.search_space, composer)
    by_chance = RandomTrial(np.random.default_rng(0))
    for suggestion in [space.suggest(by_chance) for _ in range(3)]:
        kept = composer.compose_suggestion(suggestion, seed=7)
        assert repr(kept) == repr(composer.compose([*suggestion.as_overrides(), "seed=7"]))


def test_hydra_composes_an_option_once_and_not_each_set_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composer, composed = Composer(["experiment=cnn_smoke"]), []
    hydra_compose = composer.files.compose
    monkeypatch.setattr(
        composer.files,
        "compose",
        lambda overrides: composed.append(overrides[1:]) or hydra_compose(overrides),
    )
    for optimizer in ("sgd", "adamw"):
        for lr_schedule in ("constant", "cosine"):
            composer.compose_suggestion(
                Suggestion({"optimizer": optimizer, "lr_schedule": lr_schedule}), seed=0
            )
    assert sorted(composed) == sorted(
        [
            [],
            ["optimizer=sgd"],
            ["optimizer=adamw"],
            ["lr_schedule=constant"],
            ["lr_schedule=cosine"],
        ]
    )


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
    ],
)
def test_options_that_change_other_things_compose_to_what_hydra_makes_of_them(
    write_experiment: WriteExperiment, file: str, content: str, values: dict[str, object]
) -> None:
    experiment = "own" if file == "experiment/own.yaml" else "cnn"
    composer = Composer([f"experiment={experiment}"], [write_experiment(file, content)])
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
        ({"optimizer": "adam"}, f"optimizer=adam: accepted are {OPTIMIZERS} (did you mean adamw?)"),
        (
            {"optimizer": "adamw", "optimizer.momentum": 0.5},
            "optimizer.momentum: Key 'momentum' is not in struct",
        ),
        ({"epochs": "many"}, "epochs: Value 'many' of type 'str' could not be converted to Float"),
        ({"epochs": 0}, "epochs: found 0.0, accepted is above 0"),
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


# Printing and taking apart.


def test_the_configuration_is_printed_as_yaml_in_parts() -> None:
    composer = Composer(["experiment=cnn", "epochs=7"])
    job, hydra_part, both = (
        composer.config_yaml(each, resolve=False) for each in ("job", "hydra", "all")
    )
    assert "epochs: 7\n" in job
    assert "hydra:" not in job
    assert hydra_part.startswith("hydra:")
    assert "epochs: 7\n" in both
    assert "\nhydra:" in f"\n{both}"


def test_interpolations_are_resolved_where_asked() -> None:
    composer = Composer(["experiment=cnn", "epochs=${batch_size}"])
    assert "epochs: ${batch_size}\n" in composer.config_yaml("job", resolve=False)
    assert "epochs: 64\n" in composer.config_yaml("job", resolve=True)


def test_a_command_line_comes_apart_into_groups_and_values_of_a_training() -> None:
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
    groups, values = split_overrides(Composer(overrides), overrides)
    assert groups == {"optimizer": "adamw"}
    assert values == {
        "optimizer.lr": 0.5,
        "model.widths": [1, 2],
        "target.value": 0.9,
        "model.extra": {"a": "b c"},
    }


def test_every_key_of_the_configuration_is_of_a_training_or_of_the_study() -> None:
    training = {*COMPOSER.compose().trial.as_dict()}
    assert {*COMPOSER.compose().plain} - training <= FIXED_KEYS


def test_a_point_is_composed_once_for_all_who_ask_for_it() -> None:
    composer = Composer(["experiment=cnn"])
    first = composer.compose_suggestion(Suggestion({"optimizer.lr": 0.1, "batch_size": 32}), seed=1)
    assert (
        composer.compose_suggestion(Suggestion({"batch_size": 32, "optimizer.lr": 0.1}), seed=1)
        is first
    )
    other = composer.compose_suggestion(Suggestion({"batch_size": 32, "optimizer.lr": 0.1}), seed=2)
    assert (first.trial.seed, other.trial.seed) == (1, 2)
    for seed in range(3, 80):
        composer.compose_suggestion(Suggestion({"batch_size": 32}), seed=seed)
    assert len(composer._composed_points) == 64


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_gpu_of_apple_or_intel_trains_by_itself(device: str) -> None:
    said = refusal("experiment=cnn", "parallelism=ddp", f"device={device}")
    assert said == f"parallelism.num_workers: found 2, accepted with device={device} is 1"
