"""What a configuration may build: the allow-list, by name and by where a target is defined, and
the call of a target.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.config.build import (
    build,
    build_partial,
    call,
    check_target_names,
    resolve_target,
    shipped_components,
)
from autotune.errors import ConfigError, TargetNotAllowedError
from autotune.objective import AmortisedTime


@pytest.fixture
def user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of the user's own: a class, an alias of something defined elsewhere, a constant,
    a broken module.
    """
    folder = tmp_path / "my_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "net.py").write_text(
        "import os\nfrom collections import OrderedDict as Ordered\nDEPTH = 3\n"
        "class Net:\n    def __init__(self, width):\n        self.width = width\n"
    )
    (folder / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_package"
    for name in [each for each in sys.modules if each.split(".")[0] == "my_package"]:
        del sys.modules[name]


def test_a_name_outside_the_list_is_refused_with_what_is_accepted_and_how_to_add_it() -> None:
    with pytest.raises(TargetNotAllowedError) as refused:
        check_target_names({"stopping": {"_target_": "os.system"}}, ())
    said = str(refused.value)
    assert said.startswith(
        "stopping._target_: found 'os.system'; accepted here: autotune.search.stopping."
    )
    assert said.endswith(
        "and what allowed_targets=[os] on the command line adds, if you trust that code"
    )


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"model": {"b": {"_target_": "os.system"}}}, "model.b._target_"),
        ({"model": [{"_target_": "torch.nn.ReLU"}, {"_target_": "os.system"}]}, "model.1._target_"),
        (
            {"model": {"_target_": "torch.nn.ReLU", "inner": {"_target_": "os.system"}}},
            "model.inner._target_",
        ),
        (
            {"model": {"_target_": "torch.nn.ReLU", "_args_": [[{"_target_": "os.system"}]]}},
            "model._args_.0.0._target_",
        ),
        (
            {"target": {"constraints": {"loss": {"_target_": "os.system"}}}},
            "target.constraints.loss._target_",
        ),
    ],
)
def test_a_nested_name_is_held_against_the_list_too(config: dict[str, object], where: str) -> None:
    with pytest.raises(TargetNotAllowedError, match=f"^{where}: found 'os.system'"):
        check_target_names(config, ())


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model", "torch.nnx.Linear"),
        ("model", "torch.load"),
        ("model", "autotune.training.checkpoint.save_weights"),
        ("stopping", "autotune.search.study._drop_torn_line"),
        ("search.sampler", "autotune.search.storage.open_storage"),
        ("search", "optuna.samplers.TPESampler"),
        ("training", "torch.nn.Linear"),
        ("model", 3),
        ("model", None),
        ("model", "."),
    ],
)
def test_a_name_that_is_no_component_of_its_key_is_refused(key: str, name: object) -> None:
    config: dict[str, object] = {"_target_": name}
    for part in reversed(key.split(".")):
        config = {part: config}
    with pytest.raises(TargetNotAllowedError):
        check_target_names(config, ())


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "torch.nn.CrossEntropyLoss"),
        ("loss", "torch.nn.functional.cross_entropy"),
        ("model", "torch.nn.Sequential"),
        ("optimizer", "torch.optim.RMSprop"),
        ("search.sampler", "optuna.samplers.TPESampler"),
        ("objective", "autotune.objective.AmortisedTime"),
        ("model", "autotune.workloads.cnn.SimpleCNN"),
        ("stopping", "autotune.search.stopping.CapAtIncumbent"),
        ("tracking", "autotune.tracking.tracker.NoTracker"),
    ],
)
def test_components_of_a_key_are_found(key: str, name: str) -> None:
    assert resolve_target(name, (), f"{key}._target_").__name__ == name.rpartition(".")[2]


@pytest.mark.parametrize(
    ("key", "name"),
    [(key, name) for key, names in shipped_components().items() for name in sorted(names)],
)
def test_every_component_that_conf_names_is_found(key: str, name: str) -> None:
    assert callable(resolve_target(name, (), f"{key}._target_"))


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.functional",
        "torch.nn.init.normal_",
        "torch.nn.Module._call_impl",
        "torch.nn.Module.register_module",
        "torch.nn.Embedding.from_pretrained",
        "torch.optim.swa_utils.update_bn",
    ],
)
def test_what_is_of_another_kind_is_no_component_although_its_name_could_be(name: str) -> None:
    check_target_names({"model": {"_target_": name}}, ())
    with pytest.raises(
        TargetNotAllowedError,
        match=r"^model\._target_: found '.*; accepted here: .* torch\.nn\.NAME, ",
    ):
        resolve_target(name, (), "model._target_")


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.modules.os.system",
        "torch.nn.functional.torch.load",
        "torch.optim.optimizer.torch.serialization.load",
        "torch.nn.Module.__init__.__globals__.get",
        "torch.nn.Module.__subclasses__",
        "autotune.workloads.images.os.system",
        "autotune.workloads.images.Path",
        "optuna.samplers.TPESampler.__init__.__builtins__.get",
    ],
)
def test_a_name_cannot_reach_through_a_module_to_what_that_imported(name: str) -> None:
    packages = ("torch.nn", "torch.optim", "autotune.workloads", "optuna.samplers")
    for allowed in ((), packages):
        with pytest.raises(ConfigError, match=r"^model\._target_: "):
            resolve_target(name, allowed, "model._target_")


def test_an_object_defined_elsewhere_is_refused_with_a_hint_at_where(user_package: str) -> None:
    with pytest.raises(TargetNotAllowedError) as refused:
        resolve_target("my_package.net.Ordered", [user_package], "model._target_")
    assert str(refused.value).startswith(
        "model._target_: found 'my_package.net.Ordered', which collections defines; accepted here: "
    )
    assert "allowed_targets=[collections] on the command line" in str(refused.value)


def test_a_package_of_the_users_own_is_found_once_it_is_added(user_package: str) -> None:
    node = {"_target_": "my_package.net.Net", "width": 3}
    with pytest.raises(
        TargetNotAllowedError,
        match=r"allowed_targets=\[my_package\] on the command line adds, if you trust that code$",
    ):
        build(node, (), "model")
    assert build(node, (user_package,), "model").width == 3
    assert (
        resolve_target("my_package.net.Ordered", (user_package, "collections"), "model").__name__
        == "OrderedDict"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_package.nat.Net", "No module named 'my_package.nat'; modules are looked for among"),
        ("my_package.net.Nat", "module 'my_package.net' has no attribute 'Nat'"),
        ("my_package.broken.Net", "No module named 'a_package_that_is_not_there'"),
        ("my_package_2.Net", "No module named 'my_package_2'; modules are looked for among those"),
    ],
)
def test_a_name_that_stands_for_nothing_says_what_is_missing(
    user_package: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_target(name, (user_package, "my_package_2"), "model._target_")
    assert str(refused.value).startswith(f"model._target_: {name}: {message}")
    assert not isinstance(refused.value, TargetNotAllowedError)


def test_a_constant_is_no_target(user_package: str) -> None:
    with pytest.raises(ConfigError):
        resolve_target("my_package.net.DEPTH", (user_package, "builtins"), "model._target_")


def test_building_checks_nested_targets_by_where_they_are_defined() -> None:
    node = {
        "_target_": "torch.nn.Sequential",
        "_args_": [{"_target_": "torch.nn.modules.os.system", "_args_": ["true"]}],
    }
    with pytest.raises(ConfigError, match=r"^model\._args_\.0\._target_: "):
        build_partial(node, (), "model")


def test_a_text_cannot_become_a_target_while_it_is_built() -> None:
    text = '${oc.create:"{_target_: webbrowser.get}"}'
    node = {
        "_target_": "torch.nn.CrossEntropyLoss",
        "inner": text,
        "weight": {"_target_": "torch.nn.Identity"},
    }
    assert build_partial(node, (), "loss").keywords["inner"] == text


def test_building_makes_the_object_and_its_nested_ones() -> None:
    assert build(
        {"_target_": "autotune.objective.AmortisedTime", "num_trainings": 3}, (), "objective"
    ) == AmortisedTime(num_trainings=3)
    net = build(
        {
            "_target_": "torch.nn.Sequential",
            "_args_": [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}],
        },
        (),
        "model",
    )
    assert [each.weight.shape for each in net] == [(3, 2)]


def test_a_target_that_refuses_its_values_is_one_line_with_the_values() -> None:
    made = build_partial(
        {"_target_": "autotune.objective.AmortisedTime", "num_training": 3}, (), "objective"
    )
    with pytest.raises(ConfigError) as refused:
        call(made, "objective")
    message = str(refused.value)
    assert message.startswith("objective: AmortisedTime(num_training=3) failed: ")
    assert "\n" not in message


def test_a_node_without_a_target_cannot_be_built() -> None:
    with pytest.raises(ConfigError, match=r"^loss: needs _target_, the name of what is called$"):
        build({"weight": 1}, (), "loss")
