"""Values of a stranger's experiment, recording or checkpoint end as values: none becomes code, a
comment's next line, or a formula.
"""

import ast
import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.errors import AutotuneError, ConfigError
from autotune.execution.exported import arguments_yaml
from autotune.outcome import Outcome
from autotune.reporting.study_files import write_trials
from autotune.space import SearchSpace
from autotune.training.checkpoint import save_weights
from autotune.training.standalone import standalone_script
from autotune.training.trained_model import trained_model
from tests.support.fuzz import examples
from tests.support.records import make_result

EVIL = "x'''\"\"\"\\\n\r\u2028import os; os.system('touch owned') #{{ 7 * 7 }}{% raw %}"


@pytest.fixture(scope="module")
def config() -> TrialConfig:
    return Composer(["experiment=cnn"]).compose().trial


def _calls(source: str) -> set[str]:
    """Names of what a program calls."""
    called = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {node.attr if isinstance(node, ast.Attribute) else ast.unparse(node) for node in called}


def test_an_arguments_name_does_not_become_code_in_a_script(config: TrialConfig) -> None:
    # torch.nn.Identity takes arguments of any name, so nothing before the script refuses this one
    model = {"_target_": "torch.nn.Identity", "a=__import__('os').system('touch owned'), b": 1}
    with pytest.raises(
        ConfigError,
        match=(
            r"model: found the argument .*; a stand-alone script can have the name of a"
            r" Python"
        ),
    ):
        standalone_script(dataclasses.replace(config, model=model), num_threads=1)
    with pytest.raises(ConfigError, match="found the argument 'lambda'"):
        standalone_script(
            dataclasses.replace(config, model={"_target_": "torch.nn.Identity", "lambda": 1}),
            num_threads=1,
        )


def test_a_comment_does_not_become_code_in_a_script(config: TrialConfig) -> None:
    plain = standalone_script(config, num_threads=1, comments=["from a study"])
    for comment in (EVIL, "a\rimport os", "a\nimport os", "a\x0cimport os"):
        script = standalone_script(config, num_threads=1, comments=[comment])
        assert ast.dump(ast.parse(script)) == ast.dump(ast.parse(plain))


@examples(5)
@given(st.text(max_size=30))
def test_a_value_does_not_become_code_in_a_script(text: str) -> None:
    config = Composer(["experiment=cnn"]).compose().trial
    target = dataclasses.replace(config.target, metric=text + EVIL)
    model = {"_target_": "torch.nn.Identity", "a": text + EVIL, "b": [text, {text: EVIL}]}
    plain = standalone_script(
        dataclasses.replace(config, model={**model, "a": "a", "b": []}), num_threads=1
    )
    script = standalone_script(
        dataclasses.replace(config, model=model, target=target), num_threads=1
    )
    assert _calls(script) == _calls(plain)


def test_an_arguments_name_does_not_become_a_key_of_best_arguments() -> None:
    arguments = {"lr\nother: 1": 2, "weight-decay": 0.1, "lr": 3}
    text = arguments_yaml("train", arguments, study="s")
    assert yaml.safe_load(text) == arguments
    call = text.partition(": ")[2].partition("\n")[0]
    assert eval(call, {"train": lambda **values: values}) == arguments  # our own


def test_a_cell_of_trials_csv_is_no_formula(tmp_path: Path) -> None:
    space = SearchSpace.from_mapping(
        {"name": {"type": "choice", "choices": ["=cmd|' /C calc'!A0", "plain"]}}, ""
    )
    result = make_result(
        0, Outcome.ERRORED, values={"name": "=cmd|' /C calc'!A0"}, error='@SUM(1)*cmd|" /C calc"!A0'
    )
    write_trials(tmp_path / "trials.csv", space, [result], {})
    (row,) = csv.DictReader((tmp_path / "trials.csv").read_text(encoding="utf-8").splitlines())
    assert row["name"].startswith("'=cmd|")
    assert row["error"].startswith("'@SUM")
    assert row["started_at"] == "0.0"


MODELS: list[Any] = [
    {},
    {"config": 3},
    {"config": {"model": {}, "views": {}}, "input_shape": [1], "num_classes": 2},
    {
        "config": {"model": {"_target_": "os.system", "command": "touch owned"}, "views": {}},
        "input_shape": [1],
        "num_classes": 2,
    },
    {
        "config": {
            "model": {
                "_target_": "torch.nn.Linear",
                "in_features": 1 << 20,
                "out_features": 1 << 20,
            },
            "views": {},
        },
        "input_shape": [1],
        "num_classes": 2,
    },
    {
        "config": {
            "model": {"_target_": "torch.nn.Linear", "in_features": "a", "out_features": []},
            "views": {},
        },
        "input_shape": 3,
        "num_classes": 2,
    },
]


@pytest.mark.parametrize("metadata", MODELS, ids=json.dumps)
def test_a_checkpoint_makes_no_other_model_than_its_weights_and_calls_nothing(
    metadata: Any, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(path, {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, metadata)
    with pytest.raises(AutotuneError) as refused:
        trained_model(path, ())
    assert "\n" not in str(refused.value)
    assert not Path("owned").exists()
