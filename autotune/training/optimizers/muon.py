"""Muon for filters and matrices joined with another optimizer for all other parameters, as one
optimizer.

Muon replaces a matrix's momentum by a nearly orthogonal matrix of the same directions, so that all
directions are learned at once and an update has a known size: its learning rate needs neither
warm-up nor another value for every layer. It is ``torch.optim.Muon``; this module also takes
convolution filters as matrices, and trains all other parameters with AdamW or SGD.

Learning rates and weight decays are stated for 1,024 samples, as in
``autotune.training.optimizers.decoupled``.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
kellerjordan.github.io/posts/muon, as torch.optim.Muon. Convolutions, rescaled filters and the param
groups of the other optimizer follow github.com/KellerJordan/cifar10-airbench, airbench94_muon.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.training.optimizers.groups import (
    BIAS_KINDS,
    REFERENCE_SAMPLES,
    param_group,
    parameters_by_kind,
    scaled_groups,
)


def muon_adamw(
    model: nn.Module,
    *,
    batch_size: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    ns_steps: int,
    ns_coefficients: Sequence[float],
    rescale_filters: bool,
    adamw_lr: float,
    beta1: float,
    beta2: float,
    bias_lr_scale: float,
    head_lr_scale: float,
    decay_biases: bool,
    fused: bool | None = None,
    foreach: bool | None = None,
) -> "JoinedOptimizer":
    """Muon for filters and matrices, AdamW for head, embeddings, biases and norms.

    Args:
        model: the model that is trained.
        batch_size: samples in a step.
        lr: Muon's learning rate for 1,024 samples: a step of B samples moves a matrix by lr B /
            1024 times a matrix whose singular values are near 1, and by the root of rows / columns
            times as much if it has more rows than columns.
        momentum: Muon's momentum.
        weight_decay: fraction of a weight that is lost in 1,024 samples, under Muon and AdamW
            alike.
        ns_steps: number of Newton-Schulz iterations towards an orthogonal matrix.
        ns_coefficients: the three coefficients of the Newton-Schulz polynomial.
        rescale_filters: whether each matrix's Frobenius norm is set to the root of its number of
            rows before each step.
        adamw_lr: AdamW's learning rate of embeddings for 1,024 samples.
        beta1: AdamW's decay rate of the mean of gradients.
        beta2: AdamW's decay rate of the mean of squared gradients.
        bias_lr_scale: learning rate of biases and norms as a multiple of ``adamw_lr``.
        head_lr_scale: learning rate of the head as a multiple of ``adamw_lr``.
        decay_biases: whether biases and norms decay too.
        fused: passed to ``torch.optim.AdamW``.
        foreach: passed to ``torch.optim.AdamW``.
    """
    step_share = batch_size / REFERENCE_SAMPLES
    groups = scaled_groups(
        model,
        step_share,
        adamw_lr,
        weight_decay,
        bias_lr_scale=bias_lr_scale,
        head_lr_scale=head_lr_scale,
        decay_biases=decay_biases,
    )
    other_groups = [group for group in groups if group["name"] != "filters"]
    muon = _filter_muon(
        model,
        step_share,
        lr=lr,
        weight_decay=weight_decay,
        rescale=rescale_filters,
        momentum=momentum,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
    )
    if not other_groups:
        return JoinedOptimizer([muon])
    return JoinedOptimizer(
        [muon, torch.optim.AdamW(other_groups, betas=(beta1, beta2), fused=fused, foreach=foreach)]
    )


def muon_sgd(
    model: nn.Module,
    *,
    batch_size: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    ns_steps: int,
    ns_coefficients: Sequence[float],
    rescale_filters: bool,
    bias_lr: float,
    head_lr: float,
    whitening_bias_lr: float,
    whitening_bias_fraction: float,
    sgd_momentum: float,
    sgd_weight_decay: float,
    decay_biases: bool,
    fused: bool | None = None,
    foreach: bool | None = None,
) -> "JoinedOptimizer":
    """Muon for filters and matrices, SGD with Nesterov momentum for all other parameters: the
    optimizer of the CIFAR-10 speed records.

    To convert settings of those records: their losses are summed over the batch and their learning
    rates are those of one step. With their rate r, a weight moves by r times the sum of the
    samples' gradients, that is by r B times their mean for batch size B, so a mean loss needs the
    rate r B. With momentum m, SGD's rate is ``bias_lr`` (B / 1024) (1 - m) here, hence ``bias_lr``
    = 1024 r / (1 - m): 0.053 with momentum 0.85 becomes 362. Their product of rate and weight decay
    is c B in a step, hence ``sgd_weight_decay`` = 1024 c / (1 - m). Muon's updates do not depend on
    the size of the loss: its rate r becomes ``lr`` = 1024 r / B.

    Args:
        model: the model that is trained.
        batch_size: samples in a step.
        lr: Muon's learning rate, as for ``muon_adamw``; with ``rescale_filters``, nearly a filter
            bank's relative change in 1,024 samples.
        momentum: Muon's momentum.
        weight_decay: fraction of a weight that is lost in 1,024 samples under Muon.
        ns_steps: number of Newton-Schulz iterations towards an orthogonal matrix.
        ns_coefficients: the three coefficients of the Newton-Schulz polynomial.
        rescale_filters: whether each matrix's Frobenius norm is set to the root of its number of
            rows before each step.
        bias_lr: learning rate of biases and norms, as ``lr`` of
            ``autotune.training.optimizers.decoupled.sgd``.
        head_lr: learning rate of head and embeddings, as ``bias_lr``.
        whitening_bias_lr: learning rate of a whitening layer's bias, as ``bias_lr``.
        whitening_bias_fraction: fraction of the steps in which the whitening layer's bias is
            trained, by a schedule of its own.
        sgd_momentum: SGD's momentum.
        sgd_weight_decay: fraction of a weight that is lost in 1,024 samples under SGD.
        decay_biases: whether biases and norms decay too.
        fused: passed to ``torch.optim.SGD``.
        foreach: passed to ``torch.optim.SGD``.
    """
    sgd_share = batch_size / REFERENCE_SAMPLES * (1 - sgd_momentum)
    rates = {
        "head": head_lr,
        "embeddings": head_lr,
        "biases": bias_lr,
        "whitening_bias": whitening_bias_lr,
    }
    other_groups = []
    for kind, parameters in parameters_by_kind(model).items():
        if kind in rates:
            decay = sgd_weight_decay if decay_biases or kind not in BIAS_KINDS else 0.0
            schedule = (
                {"schedule_fraction": whitening_bias_fraction} if kind == "whitening_bias" else {}
            )
            other_groups.append(
                param_group(
                    kind,
                    parameters,
                    lr=rates[kind] * sgd_share,
                    decay_fraction=decay * sgd_share,
                    **schedule,
                )
            )
    muon = _filter_muon(
        model,
        batch_size / REFERENCE_SAMPLES,
        lr=lr,
        weight_decay=weight_decay,
        rescale=rescale_filters,
        momentum=momentum,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
    )
    if not other_groups:
        return JoinedOptimizer([muon])
    sgd = torch.optim.SGD(
        other_groups, momentum=sgd_momentum, nesterov=sgd_momentum > 0, fused=fused, foreach=foreach
    )
    return JoinedOptimizer([muon, sgd])


def _filter_muon(
    model: nn.Module,
    step_share: float,
    *,
    lr: float,
    weight_decay: float,
    rescale: bool,
    momentum: float,
    ns_steps: int,
    ns_coefficients: Sequence[float],
) -> "FilterMuon":
    filters = parameters_by_kind(model).get("filters")
    if not filters:
        raise ConfigError(
            "optimizer: muon needs a model with matrices or filters other than its head and"
            " embeddings"
        )
    if len(ns_coefficients) != 3:
        raise ConfigError(
            f"optimizer.ns_coefficients: found {list(ns_coefficients)}, accepted are three numbers"
        )
    group = param_group(
        "filters", filters, lr=lr * step_share, decay_fraction=weight_decay * step_share
    )
    return FilterMuon(
        [group],
        rescale=rescale,
        momentum=momentum,
        ns_steps=ns_steps,
        ns_coefficients=tuple(ns_coefficients),
        nesterov=True,
    )


class FilterMuon(torch.optim.Optimizer):
    """torch's Muon for parameters ``[rows, ...]`` of two or more dimensions, each taken as a matrix
    ``[rows, columns]``.

    Muon works on views that share the parameters' memory. A view has a parameter's further
    dimensions in the order of its memory (height, width, channels for channels-last filters), since
    orthogonalising does not depend on the order of columns. Settings and momenta belong to this
    optimizer, by parameter, and are handed to Muon for each step.

    Args:
        groups: param groups with ``lr`` and ``weight_decay``.
        rescale: whether each matrix's Frobenius norm is set to the root of its number of rows
            before each step.
        settings: passed to ``torch.optim.Muon``.
    """

    def __init__(self, groups: list[dict[str, Any]], *, rescale: bool, **settings: Any) -> None:
        views = {
            parameter: nn.Parameter(matrix_view(parameter.detach()))
            for group in groups
            for parameter in group["params"]
        }
        muon_groups = [
            {**group, "params": [views[parameter] for parameter in group["params"]]}
            for group in groups
        ]
        self._muon = torch.optim.Muon(muon_groups, **settings)
        self._rescale = rescale
        super().__init__(groups, self._muon.defaults)

    @torch.no_grad()
    # torch overloads it
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Move each parameter along its orthogonalised momentum.

        Parameters without a gradient stay as they are.
        """
        loss = _evaluate(closure)
        changed: list[torch.Tensor] = []
        for group, muon_group in zip(self.param_groups, self._muon.param_groups, strict=True):
            muon_group.update({key: value for key, value in group.items() if key != "params"})
            for parameter, view in zip(group["params"], muon_group["params"], strict=True):
                self._muon.state[view] = self.state[parameter]
                if parameter.grad is not None:
                    view.grad = _in_order_of(parameter, parameter.grad).reshape(view.shape)
                    changed.append(view)
        if self._rescale and changed:
            rescale_to_unit_rows(changed)
        self._muon.step()  # type: ignore[no-untyped-call]  # missing in torch's stubs
        self._muon.zero_grad()  # a view of a gradient would keep its memory
        return loss


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with the param groups of all in order, a common state and a common
    step.

    Whatever changes the groups or the state (a schedule, ``load_state_dict``) changes them for the
    joined optimizers.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    # torch overloads it
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Take one step with each of the joined optimizers."""
        loss = _evaluate(closure)
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:last], self.state
            part.step()
            first = last
        return loss


def _evaluate(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def matrix_view(tensor: torch.Tensor) -> torch.Tensor:
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


def _in_order_of(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, its dimensions after the first permuted to the order of
    the parameter's memory.
    """
    return tensor.permute(0, *sorted(range(1, parameter.ndim), key=parameter.stride, reverse=True))


def rescale_to_unit_rows(matrices: list[torch.Tensor]) -> None:
    """Scale each matrix ``[rows, columns]`` in place to the Frobenius norm of a matrix with rows
    of norm 1: the root of ``rows``.
    """
    norms = torch._foreach_norm(matrices)  # noqa: SLF001  # torch's only name for it
    torch._foreach_clamp_min_(norms, 1e-12)
    torch._foreach_div_(matrices, norms)
    torch._foreach_mul_(matrices, [math.sqrt(len(matrix)) for matrix in matrices])
