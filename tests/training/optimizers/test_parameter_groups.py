"""Which parameters are of which kind, in models that say so and in models that do not."""

from typing import Any

import pytest
from torch import nn

from autotune.training.optimizers.decoupled import parameters_by_kind, scaled_groups
from autotune.workloads.cnn import SimpleCNN


class SmallLanguageModel(nn.Module):
    """Tokens embedded, one linear layer and a norm over two dimensions, a head."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm([3, 4])
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


class Outspoken(nn.Module):
    """A model that says its groups itself."""

    def __init__(self, **groups: list[str]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 2), nn.Linear(2, 2)
        self.first.weight.requires_grad_(False)
        self.groups = groups

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {
            kind: [self.get_parameter(name) for name in names]
            for kind, names in self.groups.items()
        }


def names_by_kind(model: nn.Module) -> dict[str, list[str]]:
    names = {id(each): name for name, each in model.named_parameters()}
    return {
        kind: [names[id(each)] for each in group]
        for kind, group in parameters_by_kind(model).items()
    }


def test_a_convolutional_net_has_filters_a_head_and_biases() -> None:
    found = names_by_kind(
        SimpleCNN(input_shape=[1, 8, 8], num_classes=10, widths=[4, 8], norm="batch")
    )
    assert found == {
        "filters": ["features.0.weight", "features.4.weight"],
        "head": ["classifier.weight"],
        "biases": [
            "features.1.weight",
            "features.1.bias",
            "features.5.weight",
            "features.5.bias",
            "classifier.bias",
        ],
    }


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_a_kind_of_their_own_and_a_tied_head_is_one_of_them(tied: bool) -> None:
    found = names_by_kind(SmallLanguageModel(tied=tied))
    assert found == {
        "filters": ["hidden.weight"],
        **({} if tied else {"head": ["head.weight"]}),
        "embeddings": ["tokens.weight"],
        "biases": ["hidden.bias", "norm.weight", "norm.bias"],
    }


def test_a_model_says_its_groups_itself() -> None:
    groups = {
        "head": ["second.weight"],
        "biases": ["second.bias"],
        "whitening_bias": ["first.bias"],
        "filters": [],
    }
    assert names_by_kind(Outspoken(**groups)) == {
        kind: names for kind, names in groups.items() if names
    }


SETTINGS: dict[str, Any] = {
    "step_share": 1.0,
    "lr": 2.0,
    "weight_decay": 0.1,
    "bias_lr_scale": 4.0,
    "head_lr_scale": 0.5,
    "decay_biases": False,
}


@pytest.mark.parametrize("decay_biases", [False, True])
def test_rates_are_scaled_by_kind_and_biases_decay_only_where_asked(decay_biases: bool) -> None:
    groups = scaled_groups(
        SmallLanguageModel(tied=False), **SETTINGS | {"decay_biases": decay_biases}
    )
    found = {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}
    assert found == {
        "filters": (2.0, 0.05),
        "head": (1.0, 0.1),
        "embeddings": (2.0, 0.05),
        "biases": (8.0, 0.0125 if decay_biases else 0.0),
    }
