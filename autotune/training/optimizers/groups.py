"""Which of a model's parameters learn alike: the kinds that optimizers give rates of their own.

``filters`` are the matrices and convolution filters between input and output, ``head`` the last layer's, ``embeddings`` those of
embedding layers, ``biases`` all biases and the scales and shifts of norms, ``whitening_bias`` the bias of a frozen first layer,
which only a model that has one can name.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from autotune.errors import ConfigError
from autotune.training.techniques.layers import head_of

KINDS = ("filters", "head", "embeddings", "biases", "whitening_bias")
BIAS_KINDS = ("biases", "whitening_bias")
"""Those that weight decay leaves alone unless it is asked for."""

SAMPLES = 1024
"""The samples that rates and decays are stated for."""


def parameters_by_kind(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """All parameters by kind, frozen ones too since they may be unfrozen; kinds without any are left out.

    A model that has a method ``parameter_groups()`` says itself. Of any other, the head is the last linear or convolutional layer
    that it registered, unless that shares its weights with an embedding, and what has fewer than two dimensions or belongs to a
    norm is a bias.

    Raises:
        ConfigError: the model names a kind that there is not, or leaves out parameters that are trained.
    """
    offered = getattr(model, "parameter_groups", None)
    groups = _derived(model) if offered is None else dict(offered())
    if unknown := [kind for kind in groups if kind not in KINDS]:
        raise ConfigError(f"model: parameter_groups() has {', '.join(unknown)}, accepted are {', '.join(KINDS)}")
    grouped = {id(each) for group in groups.values() for each in group}
    if missing := [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in grouped]:
        raise ConfigError(f"model: parameter_groups() leaves out {', '.join(missing)}; accepted is every trained parameter once")
    return {kind: list(groups[kind]) for kind in KINDS if groups.get(kind)}


def _derived(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    head = head_of(model)
    norms = [each for each in model.modules() if hasattr(each, "normalized_shape")]  # those whose scales may have more dimensions
    owned = {
        "head": set() if head is None else _own(model.get_submodule(head)),
        "embeddings": {each for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag) for each in _own(module)},
        "biases": {each for norm in norms for each in _own(norm)},
    }
    groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in KINDS}
    for parameter in model.parameters():
        if parameter.ndim < 2:
            kind = "biases"
        else:
            kind = next((each for each in ("biases", "embeddings", "head") if parameter in owned[each]), "filters")
        groups[kind].append(parameter)
    return groups


def _own(module: nn.Module) -> set[nn.Parameter]:
    return set(module.parameters(recurse=False))


def scaled_groups(
    model: nn.Module,
    *,
    lr: float,
    lost_fraction: float,
    bias_lr_scale: float,
    head_lr_scale: float,
    decay_biases: bool,
) -> Iterator[dict[str, Any]]:
    """Param groups as torch's optimizers take them, one a kind, each with its ``name``.

    Args:
        model: whose parameters are grouped.
        lr: rate a step.
        lost_fraction: of a weight, by weight decay in a step at that rate: rate times ``weight_decay``.
        bias_lr_scale: the rate of biases and norms as a multiple of ``lr``.
        head_lr_scale: the rate of the head, likewise.
        decay_biases: whether biases and norms decay too.
    """
    scales = {"head": head_lr_scale, **dict.fromkeys(BIAS_KINDS, bias_lr_scale)}
    for kind, parameters in parameters_by_kind(model).items():
        decays = decay_biases or kind not in BIAS_KINDS
        yield param_group(kind, parameters, lr=lr * scales.get(kind, 1.0), lost_fraction=lost_fraction if decays else 0.0)


def param_group(kind: str, parameters: list[nn.Parameter], *, lr: float, lost_fraction: float, **settings: Any) -> dict[str, Any]:
    """One param group, whose ``weight_decay`` takes ``lost_fraction`` of a weight in a step at rate ``lr``.

    Raises:
        ConfigError: a rate or fraction below 0.
    """
    if lr < 0 or lost_fraction < 0:
        key, value = ("lr", lr) if lr < 0 else ("weight_decay", lost_fraction)
        raise ConfigError(f"optimizer: the {key} of {kind} is {value}, accepted is 0 and above")
    return {"name": kind, "params": parameters, "lr": lr, "weight_decay": lost_fraction / lr if lr > 0 else 0.0, **settings}
