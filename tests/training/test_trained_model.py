"""The model of a weights file, made again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.errors import DataError
from autotune.training.checkpoint import save_weights, weights_metadata
from autotune.training.trained_model import scored_model
from autotune.workloads.cnn import SimpleCNN
from tests.conftest import MakeTrialConfig

SHAPE = (1, 8, 8)
NODE = {"_target_": "autotune.workloads.cnn.SimpleCNN", "widths": [4], "norm": "batch"}


def simple_cnn() -> SimpleCNN:
    """What ``NODE`` makes, in evaluation mode."""
    return SimpleCNN(input_shape=SHAPE, num_classes=3, widths=[4], norm="batch").eval()


def test_a_model_comes_back_as_evaluations_score_it(
    tmp_path: Path, trial_config: MakeTrialConfig
) -> None:
    model = simple_cnn()
    config = replace(
        trial_config(), model=NODE, views={"_target_": "autotune.training.views.mirrored"}
    )
    metadata = weights_metadata(
        config, input_shape=SHAPE, num_classes=3, evaluation=None, origin={}
    )
    save_weights(tmp_path / "best.safetensors", model.state_dict(), metadata)
    again, example = scored_model(tmp_path / "best.safetensors", ())
    inputs = torch.rand(5, *SHAPE)
    assert torch.allclose(again(inputs), (model(inputs) + model(inputs.flip(3))) / 2)
    assert (example.shape, example.dtype) == ((2, *SHAPE), torch.float32)


def test_the_weights_of_a_training_function_say_that_they_name_no_model(
    tmp_path: Path, trial_config: MakeTrialConfig
) -> None:
    config = replace(trial_config(), training={"_target_": "mine.train"})
    metadata = weights_metadata(
        config, input_shape=(), num_classes=None, evaluation=None, origin={}
    )
    save_weights(tmp_path / "best.safetensors", {"weight": torch.ones(2)}, metadata)
    with pytest.raises(DataError, match="a training function of your own made its model"):
        scored_model(tmp_path / "best.safetensors", ())
