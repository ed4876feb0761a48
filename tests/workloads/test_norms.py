import pytest
import torch

from autotune.errors import ConfigError
from autotune.workloads.norms import norm_layers


def test_batch_norm_takes_each_channel_over_the_batch() -> None:
    (layer,) = norm_layers("batch", 6)
    outputs = layer(3 * torch.randn(50, 6, 4, 4) + 2)
    assert torch.allclose(outputs.mean((0, 2, 3)), torch.zeros(6), atol=1e-5)
    assert torch.allclose(outputs.std((0, 2, 3)), torch.ones(6), atol=1e-2)


@pytest.mark.parametrize(("num_channels", "num_groups"), [(32, 4), (24, 3), (20, 2), (13, 1), (5, 1)])
def test_group_norm_takes_each_sample_over_equal_groups_of_eight_channels_and_more(num_channels: int, num_groups: int) -> None:
    (layer,) = norm_layers("group", num_channels)
    outputs = layer(3 * torch.randn(4, num_channels, 5, 5) + 2).view(4, num_groups, -1)
    assert torch.allclose(outputs.mean(2), torch.zeros(4, num_groups), atol=1e-5)
    assert torch.allclose(outputs.std(2), torch.ones(4, num_groups), atol=2e-2)


def test_without_a_norm_there_is_no_layer() -> None:
    assert norm_layers("none", 8) == []


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.norm: found 'layer', accepted are batch, group, none"):
        norm_layers("layer", 8)
