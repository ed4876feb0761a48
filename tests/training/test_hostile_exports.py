"""Values of a stranger's experiment, recording or checkpoint end as values: none becomes code, a
comment's next line, or a formula.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from autotune.errors import AutotuneError
from autotune.execution.exported import arguments_yaml
from autotune.outcome import Outcome
from autotune.reporting.study_files import write_trials
from autotune.space import SearchSpace
from autotune.training.checkpoint import save_weights
from autotune.training.trained_model import trained_model
from tests.support.records import make_result

EVIL = "x'''\"\"\"\\\n\r\u2028import os; os.system('touch owned') #{{ 7 * 7 }}{% raw %}"


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
