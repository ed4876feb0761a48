import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.training.views import mirrored, six_views


@pytest.fixture
def model() -> nn.Module:
    """A model whose outputs tell every pixel and every view apart."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 3 * 4, 5))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(6, 2, 5, 6, generator=torch.Generator().manual_seed(0))


def test_mirrored_is_the_mean_for_image_and_mirror_image(model: nn.Module, images: Tensor) -> None:
    assert torch.allclose(
        mirrored(model, images), torch.stack([model(images), model(images.flip(-1))]).mean(0)
    )
    assert torch.allclose(mirrored(model, images), mirrored(model, images.flip(-1)))


def test_six_views_weigh_the_images_and_the_moved_images_alike(
    model: nn.Module, images: Tensor
) -> None:
    padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
    expected = torch.zeros(6, 5)
    for mirror in (False, True):
        for row, column, weight in ((0, 0, 1 / 4), (-1, -1, 1 / 8), (1, 1, 1 / 8)):
            view = padded[:, :, 1 + row : 6 + row, 1 + column : 7 + column]
            expected += weight * model(view.flip(-1) if mirror else view)
    assert torch.allclose(six_views(model, images), expected, atol=1e-6)
