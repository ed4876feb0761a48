"""Which components a ``_target_`` may name: what conf/ names, and libraries' components of the key's kind; no other importable name."""

import importlib
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import optuna
import pytest
import torch

from autotune.config.accepted_targets import FAMILIES, KEYS, accepts_name, component_key, is_component, shipped_components
from autotune.config.build import resolve_target
from autotune.errors import ConfigError

LARGEST_NUMBERS = {"model": 200, "loss": 60, "metric": 60, "optimizer": 40, "lr_schedule": 30, "search.sampler": 30}
"""More than a key's components are now, and far fewer than a package's names."""


def kind_of(key: str) -> Any:
    """What a library's component of a key must be, said once more and in other words than the table says it."""
    return {
        "model": lambda found: issubclass(found, torch.nn.Module),
        "loss": lambda found: "loss" in str(found).lower() or "cross_entropy" in str(found) or "kl_div" in str(found),
        "metric": lambda found: "loss" in str(found).lower() or "cross_entropy" in str(found) or "kl_div" in str(found),
        "optimizer": lambda found: issubclass(found, torch.optim.Optimizer),
        "lr_schedule": lambda found: issubclass(found, torch.optim.lr_scheduler.LRScheduler),
        "search.sampler": lambda found: issubclass(found, optuna.samplers.BaseSampler | optuna.samplers.nsgaii.BaseCrossover),
    }.get(key, lambda _: False)


def modules(package: str) -> Iterator[ModuleType]:
    """Every module of a package: of autotune and optuna all that can be imported, of torch those that are."""
    root = importlib.import_module(package)
    if package != "torch":
        for found in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda _: None):
            if found.name.rpartition(".")[2] != "__main__":
                try:
                    importlib.import_module(found.name)
                except ImportError:  # an optional library is not installed
                    continue
    yield from (module for name, module in sorted(sys.modules.items()) if name == package or name.startswith(f"{package}."))


def names(package: str) -> Iterator[tuple[str, Any]]:
    """Every importable dotted name of a package's modules with its object, attributes of its classes included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that libraries call deprecated when they are read
        for module in modules(package):
            for name, found in sorted(vars(module).items()):
                yield f"{module.__name__}.{name}", found
                if inspect.isclass(found):
                    yield from ((f"{module.__name__}.{name}.{attribute}", None) for attribute in dir(found))


@pytest.mark.parametrize(
    "package",
    ["optuna", *(pytest.param(package, marks=pytest.mark.slow) for package in ("autotune", "torch"))],  # 25 s each
)
def test_of_all_names_that_can_be_imported_only_components_are_accepted(package: str) -> None:
    accepted: dict[str, set[str]] = {key: set() for key in KEYS}
    num_names = 0
    for name, found in names(package):
        num_names += 1
        for key in KEYS:
            if not accepts_name(name, key):
                continue
            assert "._" not in name
            try:
                resolve_target(name, (), f"{key}._target_")
            except ConfigError:
                continue
            accepted[key].add(name)
            if name not in shipped_components()[key]:
                assert kind_of(key)(found), (key, name)
    assert num_names > 3_000
    for key, accepted_here in accepted.items():
        assert {name for name in shipped_components()[key] if name.startswith(f"{package}.")} <= accepted_here
        assert len(accepted_here) < LARGEST_NUMBERS.get(key, 12)
        if package == "autotune":
            assert accepted_here == {name for name in shipped_components()[key] if name.startswith("autotune.")}


def test_no_other_key_accepts_anything() -> None:
    assert [key for key in FAMILIES if key not in KEYS] == []
    for where in (
        "training._target_",
        "target._target_",
        "search._target_",
        "cluster.x._target_",
        "models._target_",
        "study.model._target_",
    ):
        assert component_key(where) is None
    assert not accepts_name("torch.nn.Linear", None)
    assert not is_component(torch.nn.Linear, None)


def test_a_node_inside_a_component_accepts_what_that_does() -> None:
    assert component_key("search.sampler.base_sampler._target_") == "search.sampler"
    assert component_key("objective.objectives.time._target_") == "objective"


def test_a_component_is_known_by_any_name_that_a_module_of_the_users_own_has_for_it() -> None:
    assert is_component(torch.nn.modules.linear.Linear, "model")
    assert is_component(shipped_class(), "model")
    assert not is_component(torch.nn.modules.linear.Linear, "optimizer")
    assert not is_component(importlib.import_module, "model")


def shipped_class() -> Any:
    return importlib.import_module("autotune.workloads.mlp").MLP
