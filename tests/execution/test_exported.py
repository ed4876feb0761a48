"""What a study's folder holds of its winner besides ``best.yaml``: arguments, and weights."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from autotune.config.compose import Composer
from autotune.config.schema import COMMAND
from autotune.errors import ConfigError
from autotune.execution.exported import (
    WEIGHTS,
    compose_exported,
    keep_best_weights,
    keep_first_weights,
    run_weights_path,
    write_arguments,
)
from autotune.outcome import Outcome
from autotune.yaml_files import read_yaml
from tests.support.records import make_result

_TEXT = "# @package _global_\ndefaults: [cnn, {override /optimizer: adamw}, _self_]\nseed: 7\n"


def test_a_text_composes_as_a_file_of_it_would(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "same.yaml").write_text(_TEXT)
    composed = compose_exported(_TEXT, [], [])
    assert composed.trial == Composer(["experiment=same"], [str(tmp_path)]).compose().trial
    assert composed.trial.seed == 7
    assert "experiment" not in ConfigStore.instance().repo, "the text is the caller's"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hydra: {run: {dir: /tmp}}", "hydra: a file cannot change Hydra's own settings"),
        ("a: ${oc.env:HOME}", "a: found ${ with more than a key"),
        ("defaults: [../mine]", "defaults: found ../mine; name a file in the folder of its group"),
        ("[1]", "found a list"),
    ],
)
def test_a_text_is_checked_as_a_file_is(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_exported(text, [], [])
    assert str(error.value).startswith(f"experiment autotune_exported: {told}")


def test_a_winner_of_a_function_leaves_its_arguments_and_its_call(tmp_path: Path) -> None:
    training = "{_target_: my_fit.train, lr: 0.03, widths: [8, 16], name: plain}"
    config = (
        Composer(["experiment=cnn", f"training={training}", "allowed_targets=[my_fit]"])
        .compose()
        .trial
    )
    write_arguments(tmp_path, config)
    assert [path.name for path in tmp_path.iterdir()] == ["best_arguments.yaml"]
    assert (
        (tmp_path / "best_arguments.yaml").read_text()
        == f"# Best of study {tmp_path.name}: train(lr=0.03, widths=[8, 16], name='plain')\n"
        "lr: 0.03\nwidths:\n- 8\n- 16\nname: plain\n"
    )


def test_a_winner_says_its_devices_where_they_were_searched(tmp_path: Path) -> None:
    command = "torchrun --nproc_per_node={devices} t.py {lr}"
    config = replace(
        Composer(["experiment=cnn"]).compose().trial,
        training={"_target_": COMMAND, "command": command, "lr": 0.03},
    )
    write_arguments(tmp_path, config, searched={"parallelism.num_workers"})
    assert (
        (tmp_path / "best_arguments.yaml").read_text()
        == f"# Best of study {tmp_path.name}: torchrun --nproc_per_node=1 t.py 0.03\n"
        "lr: 0.03\ndevices: 1\n"
    )


def test_a_command_of_a_winner_can_be_run_as_it_stands(tmp_path: Path) -> None:
    command = "python t.py --config {config_file} --out {trial_folder} --as '{{\"w\": {m.w}}}'"
    config = replace(
        Composer(["experiment=cnn"]).compose().trial,
        training={"_target_": COMMAND, "command": command, "m": {"w": 8}, "name": "a b"},
    )
    write_arguments(tmp_path, config, number=4)
    call, arguments = (tmp_path / "best_arguments.yaml").read_text().split("\n", 1)
    best = tmp_path / "best"
    assert shlex.split(call.partition(": ")[2]) == [
        *("python", "t.py", "--config", str(best / "config.yaml")),
        *("--out", str(best), "--as", '{"w": 8}'),
    ]
    assert arguments == "m.w: 8\nname: a b\n"
    assert read_yaml(best / "config.yaml") == {"m": {"w": 8}, "name": "a b"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study whose configurations 3 and 7 ran on two seeds each.

    The first one reached the target on the second one only.
    """
    run_weights_path(tmp_path, "").parent.mkdir()
    leave(tmp_path, 3, Outcome.MISSED, Outcome.REACHED)
    leave(tmp_path, 7, Outcome.REACHED, Outcome.REACHED)
    return tmp_path


def leave(folder: Path, trial: int, *outcomes: Outcome) -> None:
    """Leave the weights of a configuration's runs, which end one after the other."""
    for number, outcome in enumerate(outcomes):
        run = f"confirm-{trial}-{number}"
        run_weights_path(folder, run).write_text(f"weights of {run}")
        keep_first_weights(folder, run, make_result(trial, outcome))


@pytest.mark.parametrize(("best", "run"), [(3, "confirm-3-1"), (7, "confirm-7-0")])
def test_the_best_configurations_first_run_that_reached_is_kept_and_nothing_else(
    folder: Path, best: int, run: str
) -> None:
    keep_best_weights(folder, best)
    assert (folder / WEIGHTS).read_text() == f"weights of {run}"
    assert [path.name for path in run_weights_path(folder, "").parent.iterdir()] == [
        f"trial-{best}.safetensors"
    ]


def test_weights_of_an_earlier_winner_do_not_pass_for_the_new_ones(folder: Path) -> None:
    keep_best_weights(folder, 7)
    # on a machine that has not this folder
    keep_first_weights(folder, "confirm-9-0", make_result(9, Outcome.REACHED))
    keep_best_weights(folder, 9)
    assert not (folder / WEIGHTS).exists()
