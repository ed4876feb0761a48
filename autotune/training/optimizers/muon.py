"""Muon for filters and matrices joined with another optimizer for all other parameters, as one
optimizer.

Muon replaces a matrix's momentum by a nearly orthogonal matrix of the same directions, so that all
directions are learned at once and an update has a known size: its learning rate needs neither
warm-up nor another value for every layer. It is ``torch.optim.Muon``; this module also takes
convolution filters as matrices, and trains all other parameters with AdamW or SGD.

Learning rates and weight decays are stated for 1,024 samples, as in
``autotune.training.optimizers.decoupled``. ``lr``, ``momentum``, ``ns_steps`` and
``ns_coefficients`` (Newton-Schulz iterations, and the coefficients of their polynomial) are Muon's:
a step of B samples moves a matrix by lr B / 1024 times a matrix whose singular values are near 1,
and by the root of rows / columns times as much if it has more rows than columns. With
``rescale_filters`` each matrix's Frobenius norm is set to the root of its number of rows before
each step; ``lr`` is then nearly a filter bank's relative change in 1,024 samples.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
kellerjordan.github.io/posts/muon, as torch.optim.Muon. Convolutions, rescaled filters and the param
groups of the other optimizer follow github.com/KellerJordan/cifar10-airbench, airbench94_muon.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import ConfigError
from autotune.training.optimizers.decoupled import (
    REFERENCE_SAMPLES,
    groups_by_kind,
    scaled_groups,
)


def muon_adamw(
    model: nn.Module,
    *,
    batch_size: int,
    weight_decay: float,
    adamw_lr: float,
    beta1: float,
    beta2: float,
    bias_lr_scale: float,
    head_lr_scale: float,
    decay_biases: bool,
    fused: bool | None = None,
    foreach: bool | None = None,
    **settings: Any,
) -> "Muon":
    """Muon for filters and matrices, AdamW for head, embeddings, biases and norms.

    ``weight_decay`` is that of both, ``adamw_lr`` the learning rate of embeddings; ``settings`` are
    Muon's.
    """
    groups = scaled_groups(
        model,
        batch_size / REFERENCE_SAMPLES,
        adamw_lr,
        weight_decay,
        bias_lr_scale=bias_lr_scale,
        head_lr_scale=head_lr_scale,
        decay_biases=decay_biases,
    )
    others = [group for group in groups if group["name"] != "filters"]
    adamw = torch.optim.AdamW(others, betas=(beta1, beta2), fused=fused, foreach=foreach)
    return Muon(model, adamw, batch_size, weight_decay=weight_decay, **settings)


def muon_sgd(
    model: nn.Module,
    *,
    batch_size: int,
    bias_lr: float,
    head_lr: float,
    whitening_bias_lr: float,
    whitening_bias_fraction: float,
    sgd_momentum: float,
    sgd_weight_decay: float,
    decay_biases: bool,
    fused: bool | None = None,
    foreach: bool | None = None,
    **settings: Any,
) -> "Muon":
    """Muon for filters and matrices, SGD with Nesterov momentum for all other parameters: the
    optimizer of the CIFAR-10 speed records.

    SGD's learning rates (``head_lr`` is that of head and embeddings) and ``sgd_weight_decay`` are
    those of ``autotune.training.optimizers.decoupled.sgd``. A whitening layer's bias is trained in
    ``whitening_bias_fraction`` of the steps, by a schedule of its own. ``settings`` are Muon's.

    To convert settings of those records: their losses are summed over the batch and their learning
    rates are those of one step. With their rate r, a weight moves by r times the sum of the
    samples' gradients, that is by r B times their mean for batch size B, so a mean loss needs the
    rate r B. With momentum m, SGD's rate is ``bias_lr`` (B / 1024) (1 - m) here, hence ``bias_lr``
    = 1024 r / (1 - m): 0.053 with momentum 0.85 becomes 362. Their product of rate and weight decay
    is c B in a step, hence ``sgd_weight_decay`` = 1024 c / (1 - m). Muon's updates do not depend on
    the size of the loss: its rate r becomes ``lr`` = 1024 r / B.
    """
    sgd_share = batch_size / REFERENCE_SAMPLES * (1 - sgd_momentum)
    rates = {
        "head": head_lr * sgd_share,
        "embeddings": head_lr * sgd_share,
        "biases": bias_lr * sgd_share,
        "whitening_bias": whitening_bias_lr * sgd_share,
    }
    others = groups_by_kind(model, rates, sgd_weight_decay * sgd_share, decay_biases=decay_biases)
    for group in others:
        if group["name"] == "whitening_bias":
            group["schedule_fraction"] = whitening_bias_fraction
    sgd = torch.optim.SGD(
        others, momentum=sgd_momentum, nesterov=sgd_momentum > 0, fused=fused, foreach=foreach
    )
    return Muon(model, sgd, batch_size, **settings)


class Muon(torch.optim.Optimizer):
    """torch's Muon for parameters ``[rows, ...]`` of two or more dimensions, each taken as a matrix
    ``[rows, columns]``, and another optimizer for all other parameters.

    Muon works on views that share the parameters' memory. A view has a parameter's further
    dimensions in the order of its memory (height, width, channels for channels-last filters), since
    orthogonalising does not depend on the order of columns. Settings and momenta belong to this
    optimizer, by parameter, and are handed to Muon and to the other optimizer for each step.

    Args:
        model: model whose filters and matrices are Muon's.
        others: optimizer of all other parameters.
        batch_size: number of samples of a step.
        lr: learning rate for 1,024 samples.
        weight_decay: fraction of a weight that is lost over 1,024 samples.
        rescale_filters: whether each matrix's Frobenius norm is set to the root of its number of
            rows before each step.
        settings: passed to ``torch.optim.Muon``.

    Raises:
        ConfigError: the model has no filters and matrices other than its head and embeddings.
    """

    def __init__(
        self,
        model: nn.Module,
        others: torch.optim.Optimizer,
        batch_size: int,
        *,
        lr: float,
        weight_decay: float,
        ns_coefficients: Sequence[float],
        rescale_filters: bool,
        **settings: Any,
    ) -> None:
        share = batch_size / REFERENCE_SAMPLES
        groups = groups_by_kind(
            model, {"filters": lr * share}, weight_decay * share, decay_biases=False
        )
        if not groups:
            raise ConfigError(
                "optimizer: muon needs a model with matrices or filters other than its head and"
                " embeddings"
            )
        [filters] = groups
        self._views = [
            nn.Parameter(matrix_view(parameter.detach())) for parameter in filters["params"]
        ]
        self._muon = torch.optim.Muon(
            [{**filters, "params": self._views}],
            nesterov=True,
            ns_coefficients=tuple(ns_coefficients),  # type: ignore[arg-type]  # three of them
            **settings,
        )
        self._others, self._rescale = others, rescale_filters
        super().__init__([{**self._muon.defaults, **filters}, *others.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch overloads it
        """Move each matrix along its orthogonalised momentum, and all else by the other optimizer.

        Parameters without a gradient stay as they are.
        """
        filters, *others = self.param_groups
        self._muon.param_groups = [{**filters, "params": self._views}]
        changed: list[Tensor] = []
        for parameter, view in zip(filters["params"], self._views, strict=True):
            self._muon.state[view] = self.state[parameter]
            if parameter.grad is not None:
                view.grad = _in_order_of(parameter, parameter.grad).reshape(view.shape)
                changed.append(view)
        if self._rescale and changed:
            norms = torch._foreach_norm(changed)  # noqa: SLF001  # torch's only name for it
            torch._foreach_clamp_min_(norms, 1e-12)
            torch._foreach_div_(changed, norms)
            torch._foreach_mul_(changed, [math.sqrt(len(matrix)) for matrix in changed])
        self._muon.step()  # type: ignore[no-untyped-call]  # missing in torch's stubs
        self._muon.zero_grad()  # a view of a gradient would keep its memory
        self._others.param_groups, self._others.state = others, self.state
        self._others.step()


def matrix_view(tensor: Tensor) -> Tensor:
    """View a tensor ``[rows, ...]`` as a matrix ``[rows, columns]`` that shares its memory, with
    columns in memory order.

    Raises:
        ConfigError: the tensor's rows do not lie one after another in memory.
    """
    try:
        return _in_order_of(tensor, tensor).view(len(tensor), -1)
    except RuntimeError as error:
        raise ConfigError(
            f"optimizer: a parameter of strides {list(tensor.stride())} cannot be taken as a matrix"
            " by muon"
        ) from error


def _in_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of the parameter's shape, its dimensions after the first permuted to the order of
    the parameter's memory.
    """
    return tensor.permute(0, *sorted(range(1, parameter.ndim), key=parameter.stride, reverse=True))
