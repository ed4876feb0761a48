"""Exported experiments: files that compose to what was found, whatever the experiment they start from says."""

from pathlib import Path

import pytest
import yaml

from autotune.config.compose import Composer
from autotune.config.experiment_file import check_exported, experiment_yaml
from autotune.errors import ConfigError

_GROUPS = {"optimizer": "adamw", "lr_schedule": "cosine"}
_VALUES = {"optimizer.lr": 0.002, "batch_size": 32, "seed": 5}


def _exported(folder: Path, base: str) -> str:
    content = Composer([f"experiment={base}"], [str(folder)]).files.content("experiment", base)
    text = experiment_yaml(base=base, base_content=content, groups=_GROUPS, values=_VALUES, comments=["found"])
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "exported.yaml").write_text(text)
    return text


def test_an_exported_experiment_points_to_the_one_it_started_from(tmp_path: Path) -> None:
    text = _exported(tmp_path, "cnn")
    assert text.startswith("# @package _global_\n# found\n")
    assert yaml.safe_load(text)["defaults"][0] == "cnn"
    line = ["experiment=cnn", "optimizer=adamw", "lr_schedule=cosine", "optimizer.lr=0.002", "batch_size=32", "seed=5"]
    check_exported(Composer(["experiment=exported"], [str(tmp_path)]).compose().trial, Composer(line).compose().trial)


def test_values_of_an_option_that_was_left_are_not_carried_along(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [cnn, {override /optimizer: sgd}, {override /precision: bf16}, _self_]\n"
        "optimizer: {lr: 0.3, momentum: 0.85}\nmodel: {norm: batch}\nbatch_size: 128\ntarget: {value: 0.97}\n"
    )
    content = yaml.safe_load(_exported(tmp_path, "mine"))
    assert content["optimizer"] == {"lr": 0.002}
    trial = Composer(["experiment=exported"], [str(tmp_path)]).compose().trial
    assert trial.optimizer == {"_target_": "torch.optim.AdamW", "lr": 0.002, "weight_decay": 0.01}
    assert (trial.batch_size, trial.seed, trial.target.value) == (32, 5, 0.97)
    assert trial.precision.autocast_dtype == "bfloat16"
    assert trial.model["norm"] == "batch"


def test_an_experiment_that_composes_to_something_else_is_refused() -> None:
    one, other = (Composer(["experiment=cnn", f"batch_size={size}"]).compose().trial for size in (32, 64))
    with pytest.raises(ConfigError, match=r"best\.yaml: batch_size: composes to 32, the trial had 64"):
        check_exported(one, other)
