"""Muon for filters and matrices, with another optimizer for all else, as one optimizer.

Muon replaces a matrix's momentum by a nearly orthogonal matrix of the same directions, so that all directions are learned at once
and an update has a known size: its rate needs neither warm-up nor another value for every layer. It is torch's own; what is added
is that convolution filters are matrices too, and that everything that is no matrix between layers learns otherwise.

Rates and decays are stated for 1,024 samples, as in ``autotune.training.optimizers.decoupled``.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), kellerjordan.github.io/posts/muon, as
torch.optim.Muon; for convolutions, the rescaled filters and the groups beside them github.com/KellerJordan/cifar10-airbench,
airbench94_muon.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.training.optimizers.groups import BIAS_KINDS, SAMPLES, param_group, parameters_by_kind, scaled_groups


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
        model: what is trained.
        batch_size: samples a step.
        lr: of Muon, for 1,024 samples: a step of B samples goes lr B / 1024 times a matrix whose singular values are near 1, and
            the root of rows over columns times that where it has more rows.
        momentum: of Muon.
        weight_decay: the fraction of a weight that is lost in 1,024 samples, with Muon and AdamW alike.
        ns_steps: Newton-Schulz iterations towards orthogonality.
        ns_coefficients: the three of their polynomial.
        rescale_filters: set the Frobenius norm of each matrix to the root of its number of rows before each step.
        adamw_lr: of AdamW, for 1,024 samples, of embeddings.
        beta1: of AdamW.
        beta2: of AdamW.
        bias_lr_scale: the rate of biases and norms as a multiple of ``adamw_lr``.
        head_lr_scale: the rate of the head, likewise.
        decay_biases: whether biases and norms decay too.
        fused: of AdamW.
        foreach: of AdamW.
    """
    step_share = batch_size / SAMPLES
    groups = scaled_groups(
        model,
        lr=adamw_lr * step_share,
        lost_fraction=weight_decay * step_share,
        bias_lr_scale=bias_lr_scale,
        head_lr_scale=head_lr_scale,
        decay_biases=decay_biases,
    )
    rest = [group for group in groups if group["name"] != "filters"]
    return _join(
        _filters(model, lr=lr * step_share, lost_fraction=weight_decay * step_share),
        rest,
        lambda groups: torch.optim.AdamW(groups, betas=(beta1, beta2), fused=fused, foreach=foreach),
        momentum=momentum,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
        rescale_filters=rescale_filters,
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
    """Muon for filters and matrices, SGD with Nesterov's momentum for all else: the optimizer of the CIFAR-10 speed records.

    The records' losses are summed over the batch and their rates are a step's. With a rate r of theirs, W loses r times the sum of
    the samples' gradients, that is r B times their mean, B being the batch size: r B is the rate for a mean. Here that is
    lr (B / 1024) (1 - m), hence ``lr`` = 1024 r / (1 - m): 0.053 and momentum 0.85 are 362 here. They hold rate times decay at
    c B a step, hence ``sgd_weight_decay`` = 1024 c / (1 - m). Muon's updates do not depend on the loss's size: its rate r is
    ``lr`` = 1024 r / B here.

    Args:
        model: what is trained.
        batch_size: samples a step.
        lr: of Muon, as for ``muon_adamw``. With ``rescale_filters`` it is nearly the relative change of a filter bank in 1,024 samples.
        momentum: of Muon.
        weight_decay: with Muon, the fraction of a weight that is lost in 1,024 samples.
        ns_steps: Newton-Schulz iterations towards orthogonality.
        ns_coefficients: the three of their polynomial.
        rescale_filters: set the Frobenius norm of each matrix to the root of its number of rows before each step.
        bias_lr: of biases and norms, as ``lr`` of ``autotune.training.optimizers.decoupled.sgd``.
        head_lr: of head and embeddings, likewise.
        whitening_bias_lr: of a whitening layer's bias, likewise.
        whitening_bias_fraction: of the steps, in which that bias is trained by a schedule of its own.
        sgd_momentum: of SGD.
        sgd_weight_decay: with SGD, the fraction of a weight that is lost in 1,024 samples.
        decay_biases: whether biases and norms decay too.
        fused: of SGD.
        foreach: of SGD.
    """
    sgd_share = batch_size / SAMPLES * (1 - sgd_momentum)
    rates = {"head": head_lr, "embeddings": head_lr, "biases": bias_lr, "whitening_bias": whitening_bias_lr}
    rest = []
    for kind, parameters in parameters_by_kind(model).items():
        if kind in rates:
            decay = sgd_weight_decay if decay_biases or kind not in BIAS_KINDS else 0.0
            own = {"schedule_fraction": whitening_bias_fraction} if kind == "whitening_bias" else {}
            rest.append(param_group(kind, parameters, lr=rates[kind] * sgd_share, lost_fraction=decay * sgd_share, **own))
    step_share = batch_size / SAMPLES
    return _join(
        _filters(model, lr=lr * step_share, lost_fraction=weight_decay * step_share),
        rest,
        lambda groups: torch.optim.SGD(groups, momentum=sgd_momentum, nesterov=sgd_momentum > 0, fused=fused, foreach=foreach),
        momentum=momentum,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
        rescale_filters=rescale_filters,
    )


def _filters(model: nn.Module, *, lr: float, lost_fraction: float) -> dict[str, Any]:
    filters = parameters_by_kind(model).get("filters")
    if not filters:
        raise ConfigError("optimizer: the model has no matrices or filters but its head's and embeddings; accepted with muon is one with")
    return param_group("filters", filters, lr=lr, lost_fraction=lost_fraction)


def _join(
    filters: dict[str, Any],
    rest: list[dict[str, Any]],
    make_rest: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    *,
    momentum: float,
    ns_steps: int,
    ns_coefficients: Sequence[float],
    rescale_filters: bool,
) -> "JoinedOptimizer":
    if len(ns_coefficients) != 3:
        raise ConfigError(f"optimizer.ns_coefficients: found {list(ns_coefficients)}, accepted are three numbers")
    muon = FilterMuon(
        [filters], rescale=rescale_filters, momentum=momentum, ns_steps=ns_steps, ns_coefficients=tuple(ns_coefficients), nesterov=True
    )
    return JoinedOptimizer([muon, *([make_rest(rest)] if rest else [])])


class FilterMuon(torch.optim.Optimizer):
    """torch's Muon for parameters ``[rows, ...]`` of two and more dimensions, each taken as a matrix of so many rows.

    Muon works on views that share the parameters' memory. In a view a parameter's further dimensions are in the order of its memory
    (with channels-last filters: height, width, channels): orthogonalising does not depend on the order of columns. Settings and
    momenta are this optimizer's own, by parameter, and handed to Muon for each step.

    Args:
        groups: param groups with ``lr`` and ``weight_decay``.
        rescale: set each matrix's Frobenius norm to the root of its number of rows before it is changed.
        settings: of ``torch.optim.Muon``.
    """

    def __init__(self, groups: list[dict[str, Any]], *, rescale: bool, **settings: Any) -> None:
        views = {each: nn.Parameter(matrix_view(each.detach())) for group in groups for each in group["params"]}
        self._muon = torch.optim.Muon([{**group, "params": [views[each] for each in group["params"]]} for group in groups], **settings)
        self._rescale = rescale
        super().__init__(groups, self._muon.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """Orthogonalise the momenta and go along them; parameters without a gradient stay as they are."""
        loss = _evaluate(closure)
        changed: list[torch.Tensor] = []
        for group, inner in zip(self.param_groups, self._muon.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
            for parameter, view in zip(group["params"], inner["params"], strict=True):
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
    """Several optimizers as one: their param groups one after another, one state, one step.

    Whatever changes the groups or the state (a schedule, ``load_state_dict``) changes them for the optimizers that it is made of.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """One step of each."""
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
    """A tensor ``[rows, ...]`` as a matrix ``[rows, columns]`` that shares its memory, columns in the order of that memory.

    Raises:
        ConfigError: its rows do not lie one after another.
    """
    try:
        return _in_order_of(tensor, tensor).view(len(tensor), -1)
    except RuntimeError as error:
        raise ConfigError(f"optimizer: a parameter of strides {list(tensor.stride())} cannot be taken as a matrix by muon") from error


def _in_order_of(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dimensions after the first in the order in which a parameter of that shape lies in memory."""
    return tensor.permute(0, *sorted(range(1, parameter.ndim), key=parameter.stride, reverse=True))


def rescale_to_unit_rows(matrices: list[torch.Tensor]) -> None:
    """Give each matrix ``[rows, columns]`` the Frobenius norm of one with rows of norm 1, in place: the root of their number."""
    norms = torch._foreach_norm(matrices)  # noqa: SLF001  # torch's only name for it
    torch._foreach_clamp_min_(norms, 1e-12)
    torch._foreach_div_(matrices, norms)
    torch._foreach_mul_(matrices, [math.sqrt(len(each)) for each in matrices])
