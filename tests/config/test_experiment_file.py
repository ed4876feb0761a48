"""Exported experiments: files that compose to what was found, whatever the experiment they start
from says.
"""

from pathlib import Path

import pytest
import yaml

from autotune.config.compose import Composer
from autotune.config.experiment_file import check_exported, experiment_yaml
from autotune.errors import ConfigError

_GROUPS = {"optimizer": "adamw", "lr_schedule": "cosine"}
_VALUES = {"optimizer.lr": 0.002, "batch_size": 32, "seed": 5}


def _exported(folder: Path, base: str, name: str = "exported") -> str:
    content = Composer([f"experiment={base}"], [str(folder)]).files.content("experiment", base)
    text = experiment_yaml(
        base=base, base_content=content, groups=_GROUPS, values=_VALUES, comments=["found"]
    )
    path = folder / "experiment" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return text


def test_an_exported_experiment_points_to_the_one_it_started_from(tmp_path: Path) -> None:
    text = _exported(tmp_path, "cnn")
    assert text.startswith("# @package _global_\n# found\n")
    assert yaml.safe_load(text)["defaults"][0] == "/experiment/cnn"
    line = [
        "experiment=cnn",
        "optimizer=adamw",
        "lr_schedule=cosine",
        "optimizer.lr=0.002",
        "batch_size=32",
        "seed=5",
    ]
    check_exported(
        Composer(["experiment=exported"], [str(tmp_path)]).compose().trial,
        Composer(line).compose().trial,
    )


def test_values_of_an_option_that_was_left_are_not_carried_along(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [cnn, {override /optimizer: sgd}, {override /precision:"
        " bf16}, _self_]\noptimizer: {lr: 0.3, momentum: 0.85}\nmodel: {norm: batch}\nbatch_size:"
        " 128\ntarget: {value: 0.97}\n"
    )
    content = yaml.safe_load(_exported(tmp_path, "mine"))
    assert content["optimizer"] == {"lr": 0.002}
    trial = Composer(["experiment=exported"], [str(tmp_path)]).compose().trial
    assert trial.optimizer == {"_target_": "torch.optim.AdamW", "lr": 0.002, "weight_decay": 0.01}
    assert (trial.batch_size, trial.seed, trial.target.value) == (32, 5, 0.97)
    assert trial.precision.autocast_dtype == "bfloat16"
    assert trial.model["norm"] == "batch"


@pytest.mark.parametrize("own", ["", "optimizer: {momentum: 0.85}\n"], ids=["named", "copied"])
@pytest.mark.parametrize("entry", ["vision/base", "/experiment/vision/base"])
@pytest.mark.parametrize("name", ["exported", "vision/best", "vision/found/best"])
def test_both_an_experiment_and_its_base_may_lie_in_a_folder(
    own: str, entry: str, name: str, tmp_path: Path
) -> None:
    deep = tmp_path / "experiment" / "vision" / "deep.yaml"
    deep.parent.mkdir(parents=True)
    (deep.parent / "base.yaml").write_text(
        "# @package _global_\ndefaults: [/experiment/cnn, _self_]\nepochs: 3\n"
    )
    deep.write_text(
        f"# @package _global_\ndefaults: [{entry}, {{override /optimizer: sgd}}, _self_]\n{own}"
    )
    line = [
        "experiment=vision/deep",
        "optimizer=adamw",
        "lr_schedule=cosine",
        "optimizer.lr=0.002",
        "batch_size=32",
        "seed=5",
    ]
    wanted = Composer(line, [str(tmp_path)]).compose().trial
    _exported(tmp_path, "vision/deep", name)
    trial = Composer([f"experiment={name}"], [str(tmp_path)]).compose().trial
    assert (trial.epochs, "momentum" in trial.optimizer) == (3, False)
    check_exported(trial, wanted)


def test_an_experiment_that_composes_to_something_else_is_refused() -> None:
    one, other = (
        Composer(["experiment=cnn", f"batch_size={size}"]).compose().trial for size in (32, 64)
    )
    with pytest.raises(
        ConfigError, match=r"best\.yaml: batch_size: composes to 32, the trial had 64"
    ):
        check_exported(one, other)
