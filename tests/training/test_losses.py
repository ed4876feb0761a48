import pytest
import torch
from torch import nn

from autotune.training.losses import token_cross_entropy

OUTPUTS = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_token_cross_entropy_is_the_mean_over_all_tokens(label_smoothing: float) -> None:
    loss = token_cross_entropy(OUTPUTS, TARGETS, label_smoothing=label_smoothing)
    one = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
    each = [
        one(outputs[None], target[None])
        for outputs, target in zip(OUTPUTS.view(15, 7), TARGETS.view(15), strict=True)
    ]
    assert loss.shape == ()
    assert loss == pytest.approx(torch.stack(each).mean().item(), rel=1e-6)
