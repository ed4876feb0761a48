from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.errors import ConfigError
from autotune.workloads.speed_cnn import SpeedCNN, whitening_filters

SETTINGS: dict[str, Any] = {
    "input_shape": (3, 16, 16),
    "num_classes": 10,
    "widths": [32, 48],
    "whitening": True,
    "whitening_samples": 200,
    "whitening_eps": 1e-6,
    "dirac": True,
    "norm_scale": False,
    "norm_momentum": 0.4,
    "norm_eps": 1e-12,
    "activation": "gelu",
    "unit_head": True,
    "logits_scale": None,
}


def make(**settings: Any) -> SpeedCNN:
    return SpeedCNN(**SETTINGS | settings)


@pytest.fixture
def images() -> Tensor:
    """Smooth images ``[60, 3, 16, 16]``, neighbours and channels of which are correlated, and
    whose mean is not 0.
    """
    torch.manual_seed(0)
    noise = torch.randn(60, 1, 18, 18) + 0.3 * torch.randn(60, 3, 18, 18)
    return functional.avg_pool2d(noise, 3, stride=1) + torch.randn(60, 3, 1, 1) + 0.5


# Whitening.


def test_whitened_patches_have_an_identity_second_moment(images: Tensor) -> None:
    outputs = functional.conv2d(images, whitening_filters(images, 1e-6)).transpose(0, 1).flatten(1)
    assert torch.allclose(outputs @ outputs.T / outputs.shape[1], torch.eye(12), atol=1e-2)


def test_what_varies_most_comes_first_and_eps_keeps_what_hardly_varies_small(
    images: Tensor,
) -> None:
    outputs = functional.conv2d(images, whitening_filters(images, 0.05)).square().mean((0, 2, 3))
    assert torch.equal(outputs, outputs.sort(descending=True).values)
    assert outputs[0] > 0.9
    assert outputs[-1] < 0.5


def test_the_first_layer_is_the_whitening_filters_and_their_negatives_and_only_its_bias_is_trained(
    images: Tensor,
) -> None:
    model = make(whitening_samples=40)
    model.initialise_from(images)
    filters = whitening_filters(images[:40], 1e-6)
    assert torch.equal(model.patches.weight, torch.cat([filters, -filters]))
    model(images).square().sum().backward()
    assert model.patches.weight.grad is None
    assert model.patches.bias is not None
    assert model.patches.bias.grad is not None


def test_without_whitening_the_first_layer_is_trained_and_left_as_it_is(images: Tensor) -> None:
    model = make(whitening=False)
    before = model.patches.weight.detach().clone()
    model.initialise_from(images)
    assert torch.equal(model.patches.weight, before)
    assert model.patches.weight.requires_grad


# The other parts.


def test_a_dirac_start_passes_the_input_channels_through() -> None:
    inputs = torch.randn(2, 24, 8, 8)
    convolutions = [
        each for group in make().groups for each in group if isinstance(each, nn.Conv2d)
    ]
    assert [each.in_channels for each in convolutions] == [24, 32, 32, 48]
    outputs = convolutions[0](inputs)
    assert torch.equal(outputs[:, :24], inputs)
    assert not outputs[:, 24:].abs().amin((0, 2, 3)).eq(0).any()
    narrower = next(
        each for each in make(widths=[16]).groups.modules() if isinstance(each, nn.Conv2d)
    )
    assert torch.equal(narrower(inputs), inputs[:, :16])


def test_without_a_dirac_start_all_filters_are_random() -> None:
    convolution = next(
        each for each in make(dirac=False).groups.modules() if isinstance(each, nn.Conv2d)
    )
    assert convolution.weight.ne(0).all()


def test_norms_train_their_biases_alone_and_follow_the_newest_batch() -> None:
    model = make()
    norm = next(each for each in model.modules() if isinstance(each, nn.BatchNorm2d))
    assert (norm.weight.requires_grad, norm.bias.requires_grad, norm.eps) == (False, True, 1e-12)
    norm(torch.full((4, 32, 2, 2), 5.0))
    # they are tracked
    assert torch.allclose(norm.running_mean, torch.full((32,), 0.4 * 5.0))  # type: ignore[arg-type]


def test_a_unit_head_starts_with_weights_of_deviation_one() -> None:
    assert abs(make().head.weight.std().item() - 1) < 1e-5
    assert make(unit_head=False).head.weight.std() < 0.2


@pytest.mark.parametrize(("logits_scale", "factor"), [(None, 1 / 48), (0.5, 0.5)])
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_logits_are_those_of_the_layers_in_turn(
    images: Tensor, logits_scale: float | None, factor: float, activation: str
) -> None:
    model = make(logits_scale=logits_scale, activation=activation)
    model.initialise_from(images)
    features = getattr(functional, activation)(model.patches(images))
    sizes = [features.shape[2]]
    for group in model.blocks():
        features = group(features)
        sizes.append(features.shape[2])
    assert sizes == [15, 7, 3]
    assert torch.allclose(
        model(images), features.amax((2, 3)) @ model.head.weight.T * factor, atol=1e-6
    )


@pytest.mark.parametrize("size", [8, 12, 16])
def test_images_may_be_scaled_down_while_training(images: Tensor, size: int) -> None:
    model = make()
    model.initialise_from(images)
    assert model(functional.interpolate(images, size=size, mode="bilinear")).shape == (60, 10)


def test_each_trained_parameter_is_of_one_kind() -> None:
    for settings in ({}, {"whitening": False}, {"norm_scale": True}):
        model = make(**settings)
        kinds = model.parameter_groups()
        listed = [parameter for kind in kinds.values() for parameter in kind]
        assert len(listed) == len(set(listed))
        assert set(listed) == {each for each in model.parameters() if each.requires_grad}
        assert all(each.ndim == 4 for each in kinds["filters"])
        assert kinds["head"] == [model.head.weight]
        assert [each is model.patches.bias for each in kinds.get("whitening_bias", [])] == [
            True
        ] * model.whitening


def test_at_the_records_widths_it_has_the_records_parameters() -> None:
    model = make(input_shape=(3, 32, 32), widths=[64, 256, 256])
    trained = sum(each.numel() for kind in model.parameter_groups().values() for each in kind)
    assert round(trained / 1e6, 2) == 1.97


def test_every_switch_off_still_learns(images: Tensor) -> None:
    off = {
        "whitening": False,
        "dirac": False,
        "norm_scale": True,
        "unit_head": False,
        "activation": "relu",
        "logits_scale": 1.0,
    }
    targets = (images.mean((1, 2, 3)) > 0.5).long()
    for settings in ({}, off):
        torch.manual_seed(0)
        model = make(widths=[6], **settings)
        model.initialise_from(images)
        trained = [each for each in model.parameters() if each.requires_grad]
        losses = []
        for _ in range(8):
            loss = functional.cross_entropy(model(images), targets)
            losses.append(loss.item())
            for parameter, gradient in zip(
                trained, torch.autograd.grad(loss, trained), strict=True
            ):
                parameter.data.sub_(gradient, alpha=0.1)
        assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_shape": (16, 16)}, r"model: input_shape is \[16, 16\], accepted are images"),
        ({"widths": []}, r"model.widths: found \[\]"),
        ({"activation": "tanh"}, "model.activation: found 'tanh', accepted are gelu, silu, relu"),
        (
            {"input_shape": (1, 8, 8), "widths": [8, 8, 8]},
            "an input of 8x8 is too small for 3 groups, accepted are inputs from 9x9",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**change)
