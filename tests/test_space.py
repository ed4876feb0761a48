"""The search space: what it refuses, what a choice opens, and that a point survives every form
it takes.
"""

import re
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import SearchSpaceError
from autotune.space import (
    Choice,
    Float,
    Int,
    Parameter,
    PowerOfTwo,
    SearchSpace,
    Suggestion,
    override_text,
)
from tests.test_values import AWKWARD

OPTIMIZERS = {
    "optimizer": {
        "type": "choice",
        "choices": {
            "sgd": {
                "optimizer.lr": {"type": "float", "low": 1e-2, "high": 10, "log": True},
                "nesterov": {
                    "type": "choice",
                    "choices": {True: {"optimizer.momentum": [0.8, 0.9]}, False: None},
                },
            },
            "adamw": {"optimizer.lr": {"type": "float", "low": 1e-4, "high": 1e-2, "log": True}},
        },
    },
    "batch_size": {"type": "power_of_two", "low": 32, "high": 4096},
    "model.widths": [[8, 16], [16, 32]],
}
SPACE = SearchSpace.from_mapping(OPTIMIZERS, "cnn.yaml")


@pytest.fixture(autouse=True, scope="module")
def quiet_optuna() -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(verbosity)


def ask(space: SearchSpace, seed: int = 0) -> tuple[optuna.Study, optuna.Trial, Suggestion]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    trial = study.ask()
    return study, trial, space.suggest(trial)


# What is refused, and how it is said.


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"lr": {"type": "float", "low": 1, "high": 2, "lgo": True}},
            "lr: unknown field 'lgo'; known are type, low, high, log, step",
        ),
        (
            {"lr": {"type": "float", "low": 3, "high": 2}},
            "lr: `low <= high` must hold, but got (low=3.0, high=2.0).",
        ),
        ({"o": [[1, 2], [1, 2]]}, "o: choice [1,2] is repeated; list each value once"),
        ({"o": {"type": "choice", "choices": {}}}, "o: no choices; list at least one value"),
        (
            {"lr": {"low": 1, "high": 2}},
            "lr: type: found None, not float, int, power_of_two or choice",
        ),
        (
            {"lr": 3},
            (
                "lr: found 3, not a list of values or a mapping with type: float, int, power_of_two"
                " or choice"
            ),
        ),
        ({"lr": {"type": "float", "low": 1}}, "lr: high is missing; float needs low and high"),
        (
            {"lr": {"type": "float", "low": "a", "high": 2}},
            "lr: low: found 'a', not a finite number",
        ),
        (
            {"n": {"type": "int", "low": 0.5, "high": 2}},
            "n: low: found 0.5, not a whole number from -2**53 to 2**53",
        ),
        (
            {"lr": {"type": "float", "low": 1, "high": 2, "log": 1}},
            "lr: log: found 1, not true or false",
        ),
        (
            {"bs": {"type": "power_of_two", "low": 24, "high": 64}},
            "bs: 24 is not a power of two, such as 1, 2, 4, 8",
        ),
        ({"a b": [1]}, "a b: is not a config key, such as optimizer.lr"),
        ([1], "the file is no mapping from config key to domain"),
        (
            {"o": {"type": "choice", "choices": {"a": {"lr": [1]}}}, "lr": [2]},
            "lr: stands twice (beneath o, lr); use a key once among what can be open together",
        ),
    ],
)
def test_a_mistake_is_refused_with_file_key_what_was_found_and_what_is_accepted(
    mapping: Any, message: str
) -> None:
    with pytest.raises(SearchSpaceError) as refused:
        SearchSpace.from_mapping(mapping, "cnn.yaml")
    assert str(refused.value) == f"cnn.yaml: {message}"


# What a sampler is asked.


def test_choice_opens_only_the_chosen_branch() -> None:
    trial = optuna.trial.FixedTrial(
        {
            "optimizer": "adamw",
            "optimizer=adamw/optimizer.lr": 1e-3,
            "log2(batch_size)": 5,
            "model.widths": "[8,16]",
        }
    )
    assert SPACE.suggest(trial).values == {
        "optimizer": "adamw",
        "optimizer.lr": 1e-3,
        "batch_size": 32,
        "model.widths": [8, 16],
    }


@pytest.mark.parametrize(
    ("kind", "low", "high", "step", "highest"),
    [
        ("float", 0.0, 1.0, 0.3, 0.9),
        ("float", 0.0, 1.0, 0.1, 1.0),
        ("int", 1, 10, 4, 9),
    ],
)
def test_the_highest_value_is_one_that_the_steps_meet(
    kind: str, low: float, high: float, step: float, highest: float
) -> None:
    space = SearchSpace.from_mapping(
        {"x": {"type": kind, "low": low, "high": high, "step": step}}, "cnn.yaml"
    )
    assert space.parameters["x"].high == highest  # type: ignore[union-attr]  # it is a range
    assert space.parameters["x"].as_param(highest) is not None


# The tree as a whole.


def test_without_takes_one_option_out_and_leaves_the_rest() -> None:
    less = SPACE.without("optimizer=sgd/nesterov", True)
    assert ("optimizer=sgd/nesterov", "true") not in {
        (name, override_text(value)) for name, value, _ in less.probes()
    }
    assert {name for name, *_ in SPACE.walk()} - {name for name, *_ in less.walk()} == {
        "optimizer=sgd/nesterov=true/optimizer.momentum"
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adam"},
        {"optimizer.lr": 1.0},
        {"batch_size": 33},
        {"batch_size": True},
        {"model.widths": [8, 17]},
    ],
)
def test_a_configuration_that_the_space_lacks_is_no_point_of_it(changes: dict[str, Any]) -> None:
    inside = {
        "optimizer": "adamw",
        "optimizer.lr": 1e-3,
        "batch_size": 32,
        "model.widths": [8, 16],
        "epochs": 3,
    }
    assert SPACE.point_of(inside.get) == Suggestion(
        {key: value for key, value in inside.items() if key != "epochs"}
    )
    assert SPACE.point_of({**inside, **changes}.get) is None


# Laws.

TEXTS = st.text(max_size=8) | st.text(alphabet="ab'\"\\ ,$()[]{}=:\t\n1e5.-+~@/%?|*", max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda each: st.lists(each, max_size=3), max_leaves=4)


def exactly(value: Any) -> Any:
    """A value with its types, so that 1, 1.0 and True differ, and 0.0 and -0.0."""
    return (
        [exactly(each) for each in value] if isinstance(value, list) else (type(value), repr(value))
    )


@given(value=st.sampled_from(AWKWARD) | VALUES)
@settings(max_examples=150, deadline=None)
def test_an_override_parses_back_to_the_same_value_and_type(value: Any) -> None:
    (text,) = Suggestion({"some.key": value}).as_overrides()
    override = OverridesParser.create().parse_override(text)
    assert not override.is_sweep_override()
    assert override.key_or_group == "some.key"
    assert exactly(override.value()) == exactly(value)


@st.composite
def floats(draw: st.DrawFn) -> Float:
    log = draw(st.booleans())
    bound = st.floats(1e-12, 1e12) if log else st.floats(-1e12, 1e12)
    low, high = sorted((draw(bound), draw(bound)))
    return Float(low=low, high=high, log=log)


@st.composite
def stepped_floats(draw: st.DrawFn) -> Float:
    low, step, count = (
        draw(st.integers(-50, 50)),
        draw(st.integers(1, 30)),
        draw(st.integers(1, 30)),
    )
    return Float(low=low / 10, high=(low + step * count) / 10, step=step / 10)


@st.composite
def ints(draw: st.DrawFn) -> Int:
    log = draw(st.booleans())
    low, high = sorted(
        (draw(st.integers(1 if log else -1000, 1000)), draw(st.integers(1 if log else -1000, 1000)))
    )
    step = 1 if log or low == high else draw(st.integers(1, high - low))
    return Int(low=low, high=high - (high - low) % step, log=log, step=step)


@st.composite
def powers_of_two(draw: st.DrawFn) -> PowerOfTwo:
    low, high = sorted((draw(st.integers(0, 16)), draw(st.integers(0, 16))))
    return PowerOfTwo(low=2**low, high=2**high)


NUMBERS: st.SearchStrategy[Parameter] = floats() | stepped_floats() | ints() | powers_of_two()
CHOSEN = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(0.5, 5)
    | TEXTS
    | st.lists(st.integers(0, 3), max_size=2)
)


@st.composite
def spaces(draw: st.DrawFn, keys: tuple[str, ...] = ("a", "b", "c"), depth: int = 2) -> SearchSpace:
    parameters: dict[str, Parameter] = {}
    for key in draw(st.lists(st.sampled_from(keys), unique=True, max_size=3)):
        if depth and draw(st.booleans()):
            values = draw(
                st.lists(CHOSEN, min_size=1, max_size=3, unique_by=lambda each: str(each).lower())
            )
            beneath = (
                draw(spaces(keys=tuple(f"{key}.{each}" for each in "abc"), depth=depth - 1))
                for _ in values
            )
            parameters[key] = Choice(
                options=tuple(
                    (each, SearchSpace(opened.parameters))
                    for each, opened in zip(values, beneath, strict=True)
                )
            )
        else:
            parameters[key] = draw(NUMBERS)
    return SearchSpace(parameters)


@given(space=spaces(), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_suggestion_lies_in_its_space_and_can_be_enqueued(space: SearchSpace, seed: int) -> None:
    study, trial, suggestion = ask(space, seed)
    assert space.point_of(suggestion.values.get) == suggestion
    params = space.params_of(suggestion)
    assert params == trial.params
    study.enqueue_trial(params)
    assert space.suggest(study.ask()) == suggestion


@given(space=spaces())
@settings(max_examples=30, deadline=None)
def test_every_probe_lies_in_its_space(space: SearchSpace) -> None:
    for _, _, point in space.probes():
        assert space.point_of(point.values.get) == point


def test_a_space_written_as_plain_data_reads_back_the_same() -> None:
    mapping = {
        **OPTIMIZERS,
        "from_zero": {"type": "float", "low": 0, "high": 1, "step": 0.25},
        "whole": {"type": "int", "low": 0, "high": 8, "step": 2},
        "log": {"type": "int", "low": 1, "high": 8, "log": True},
    }
    space = SearchSpace.from_mapping(mapping, "cnn.yaml")
    assert SearchSpace.from_mapping(space.as_mapping(), "copy.yaml") == space


def test_keys_for_gpus_are_no_part_of_a_space_for_cpus() -> None:
    mapping = {
        "epochs": [1, 2],
        "_gpu_": {"precision": ["default", "bf16"], "runtime.cuda_graph": [False, True]},
    }
    space = SearchSpace.from_mapping(mapping, "a.yaml")
    assert list(space.parameters) == ["epochs", "precision", "runtime.cuda_graph"]
    assert space.gpu_only == {"precision", "runtime.cuda_graph"}
    assert space.for_cpus() == SearchSpace.from_mapping({"epochs": [1, 2]}, "a.yaml")
    merged = SearchSpace.from_mapping({"batch_size": [8]}, "b.yaml").merged_with(space)
    assert list(merged.for_cpus().parameters) == ["batch_size", "epochs"]
    for wrong, message in (
        ({"_gpu_": {"epochs": [1]}, "epochs": [2]}, "a.yaml: epochs: is also in a.yaml"),
        ({"_gpu_": [1]}, "a.yaml: _gpu_: found [1], not a mapping from config key to domain"),
        ({"_gpu_": {"epochs": 3}}, "a.yaml: _gpu_/epochs: found 3"),
    ):
        with pytest.raises(SearchSpaceError, match=f"^{re.escape(message)}"):
            SearchSpace.from_mapping(wrong, "a.yaml")
