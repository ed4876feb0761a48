"""The textbook's loop does the same training as autotune's, and its data set augments as it
says.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autotune.config.schema import TrialConfig
from benchmarks.cifar10_speed import Augmented
from benchmarks.training_speed import train_function, train_textbook

MakeConfig = Callable[..., TrialConfig]


def test_both_loops_end_with_the_same_accuracy(trial_config: MakeConfig) -> None:
    config = trial_config("epochs=2", "evaluate_every_samples=1000000")
    config = replace(config, target=replace(config.target, value=2.0))
    textbook, own = train_textbook(config, 0), train_function(config, 1)
    assert textbook[1] == pytest.approx(own[1])
    assert own[1] > 0.5
    assert min(textbook[0], own[0]) > 0


def test_a_sample_is_a_crop_of_its_padded_image_or_of_its_mirror_image() -> None:
    torch.manual_seed(0)
    images = torch.arange(2 * 3 * 32 * 32.0).view(2, 3, 32, 32)
    dataset = Augmented(images, torch.tensor([4, 7]))
    padded = torch.nn.functional.pad(images[1:], (4, 4, 4, 4), mode="reflect")[0]
    crops = [padded[:, top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
    crops += [crop.flip(-1) for crop in crops]
    seen = []
    for _ in range(20):
        image, target = dataset[1]
        assert int(target) == 7
        seen += [index for index, crop in enumerate(crops) if torch.equal(crop, image)][:1]
    assert len(seen) == 20
    assert len(set(seen)) > 10
