import pytest
import torch

from autotune.training.metrics import accuracy, bits_per_character


def test_accuracy_is_the_share_of_samples_whose_highest_output_is_the_targets() -> None:
    outputs = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 6.0]])
    assert accuracy(outputs, torch.tensor([0, 1, 1, 1])) == 0.75


def test_bits_per_character_are_the_mean_of_minus_log2_p() -> None:
    probabilities = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]])
    assert bits_per_character(probabilities.log(), torch.tensor([[0, 2]])) == pytest.approx(
        (1 + 3) / 2, rel=1e-6
    )
