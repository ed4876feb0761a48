"""A value of a search space arrives as it was given, with its type, wherever a study takes it
and whatever it is written to.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import optuna
import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

import autotune
from autotune import api
from autotune.config.build import build
from autotune.config.compose import Composed, Composer
from autotune.config.overrides import read_value
from autotune.config.space_files import read_search_space
from autotune.errors import ConfigError, SearchSpaceError
from autotune.execution.exported import (
    arguments_yaml,
    compose_exported,
    exported_experiment,
)
from autotune.measurement import Target, TrialResult
from autotune.outcome import Outcome
from autotune.recording import read_recording, write_recording
from autotune.redaction import without_secrets_in
from autotune.reporting.study_files import write_trials
from autotune.search.points import UnitCube
from autotune.search.study import create_trial_at
from autotune.space import SearchSpace, Suggestion
from autotune.yaml_files import load_yaml
from tests.support.fuzz import examples
from tests.support.records import make_result

AWKWARD: list[Any] = [
    "1e-3",
    "1.0",
    "017",
    "1_000",
    "0x1F",
    "1:30",
    "nan",
    ".nan",
    "inf",
    ".5",
    "5.",
    "on",
    "no",
    "y",
    "yes",
    "it's",
    'say "hi"',
    "a\\b",
    "end\\",
    "two\nlines",
    "\ttab",
    "",
    " ",
    " x ",
    "null",
    "~",
    "None",
    "none",
    "true",
    "True",
    "1",
    "-1",
    "???",
    "${x}",
    "\\${x}",
    "\\\\${x}",
    "${",
    "$${x}",
    "${oc.env:HOME}",
    "${a:${b}}",
    "a,b",
    "{a: 1}",
    "[1, 2]",
    "a: b",
    "a=b",
    "a #b",
    "@a",
    "&a",
    "*a",
    "!a",
    "=",
    "<<",
    "|",
    "%a",
    "`a",
    "2026-01-01",
    "naïve",
    "日本",
    "\u2028",
    "🙂",
    "choice(a,b)",
    "a b",
    "/tmp/x.y",
    None,
    True,
    False,
    1,
    1.0,
    0,
    0.0,
    -0.0,
    -1,
    1e-05,
    1e16,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    2**63,
    10**98,
    [],
    [[]],
    [1, 1.0, True, "1", None, "None", math.nan],
    ["${x}", "???", "it's"],
    [{"a": "1e-3", "b": [None, "no"]}],
]
"""Values that one YAML dialect, Hydra, OmegaConf, Optuna, CSV or pandas takes for another, and
sets of them that Python calls equal."""
MAPPINGS = [{}, {"a b": "1e-3", "1": "no", "": None, "true": "???", "x": {"${y}": "${z}"}}]
"""Mappings, which are arguments of a function, but no options."""
TARGET = autotune.target("accuracy", at_least=0.9, max_seconds=1)
METRIC = Target(metric="accuracy", mode="max", value=0.9, max_train_seconds=1.0)


def exactly(value: Any) -> Any:
    """A value with its types, so that 1, 1.0 and True differ, and NaN is itself."""
    if isinstance(value, list):
        return [exactly(item) for item in value]
    if isinstance(value, dict):
        return {key: exactly(item) for key, item in value.items()}
    return (type(value), repr(value))


def fit(x: Any, constant: Any = None) -> None:
    """A training function that is never called here."""


def written(
    folder: Path, options: Any, baseline: dict[str, Any]
) -> tuple[Composer, Composed, SearchSpace]:
    """What a process that tunes ``fit`` reads again of what ``tune`` wrote: the baseline and the
    space.
    """
    arguments = api._write_function(folder, fit, {"x": options}, TARGET, baseline)
    config_dir = str(folder / api.CONFIG_FOLDER)
    overrides = [argument for argument in arguments if argument not in ("--config-dir", config_dir)]
    composer = Composer(overrides, [config_dir])
    composed = composer.compose()
    return composer, composed, read_search_space(composed.config.search_space, composer)


def result_of(trial: int, suggestion: Suggestion) -> TrialResult:
    """A result of a trial after a pass through a study's storage."""
    result = make_result(
        trial,
        Outcome.ERRORED,
        values=suggestion.values,
        overrides=tuple(suggestion.as_overrides()),
        seed=trial,
        stopped_at=float(trial),
    )
    return TrialResult.from_dict(json.loads(json.dumps(result.as_dict())))


def check_everywhere(folder: Path, options: list[Any], constant: Any) -> None:
    """Check each of the options, from ``tune`` to all that a study tells of it."""
    composer, composed, space = written(folder, options, {"x": options[0], "constant": constant})
    assert exactly(composed.trial.training["x"]) == exactly(options[0])
    assert exactly(composed.trial.training["constant"]) == exactly(constant)
    assert exactly(composed.config.training) == exactly(composed.plain["training"])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    points = [Suggestion({"training.x": option}) for option in options]
    results = []
    for number, point in enumerate(points):
        assert space.point_of(point.values.get) == point
        trial, suggestion = create_trial_at(study, space, point)
        assert exactly(suggestion.values["training.x"]) == exactly(options[number])
        again = space.suggest(optuna.trial.FixedTrial(json.loads(json.dumps(trial.params))))
        assert exactly(again.values["training.x"]) == exactly(options[number])
        composed_trial = composer.compose_suggestion(suggestion, seed=number).trial
        called = build(
            {**composed_trial.training, "_target_": "builtins.dict"}, ("builtins",), "training"
        )
        assert exactly(called) == exactly({"x": options[number], "constant": constant})
        text = arguments_yaml("fit", called, study="a")
        assert exactly(load_yaml(text, "")) == exactly(yaml.safe_load(text)) == exactly(called)
        (override,) = suggestion.as_overrides()
        assert exactly(read_value(override.partition("=")[2])) == exactly(options[number])
        results.append(result_of(number, suggestion))
    assert len({tuple(row) for row in UnitCube(space).encode(points)}) == len(points)
    check_files(folder, space, results, options)
    exported_experiment(composer, point, number, comments=[])  # which composes it again


def check_files(
    folder: Path, space: SearchSpace, results: list[TrialResult], options: list[Any]
) -> None:
    """Check what trials.csv and the recording give of results, one for each option."""
    write_trials(folder / "trials.csv", space, results, {})
    column = api.TuneResult("a", folder).trials_dataframe()["training.x"]
    assert exactly(column.tolist()) == exactly(options)
    write_recording(
        folder / "recording", results=results, target=METRIC, space=space.as_mapping(), source=""
    )
    recorded = read_recording(folder / "recording")
    assert exactly([trial.suggestion.values["training.x"] for trial in recorded.trials]) == exactly(
        options
    )


TEXTS = st.text(max_size=12) | st.text(
    alphabet="ab'\"\\ ,$()[]{}=:\t\n1e5.-+~@/%?|*#&!<>_", max_size=12
)
SCALARS = (
    st.sampled_from(AWKWARD[:-5])
    | st.none()
    | st.booleans()
    | st.integers(-(10**98), 10**98)
    | st.floats()
    | TEXTS
)
MAPPED = st.dictionaries(st.sampled_from(["a", "lr", "weight_decay"]), SCALARS, max_size=2)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner | MAPPED, max_size=3), max_leaves=4)
ARGUMENTS = VALUES | st.dictionaries(TEXTS, VALUES, max_size=3)


def composed_from_defaults() -> Callable[..., DictConfig]:
    """Hydra's ``compose``, which takes half a second, for many contents of one experiment: merged
    into defaults that it composes once.
    """
    known: dict[str, DictConfig] = {}

    def compose(config_name: str, overrides: list[str], **settings: Any) -> DictConfig:
        line = " ".join(overrides)
        if line not in known:
            known[line] = hydra.compose(config_name, overrides, **settings)
            OmegaConf.set_struct(known[line], False)
            if "experiment=" in line:
                known[line].pop("training")
        config = known[line].copy()
        if "experiment=" in line:
            name = line.partition("experiment=")[2].partition(" ")[0]
            content = ConfigStore.instance().load(f"experiment/{name}.yaml").node
            config.merge_with(
                OmegaConf.masked_copy(content, [key for key in content if key != "defaults"])
            )
        return config

    return compose


@pytest.mark.parametrize("num_examples", [8, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_value_arrives_everywhere_as_it_was_given(
    num_examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_examples == 2000:
        monkeypatch.setattr("autotune.config.config_files.compose", composed_from_defaults())

    @examples(num_examples)
    @example(options=AWKWARD, constant=MAPPINGS)
    @example(options=["it's " * 5_000, "x"], constant=None)
    @given(options=st.lists(VALUES, min_size=1, max_size=6, unique_by=repr), constant=ARGUMENTS)
    def run(options: list[Any], constant: Any) -> None:
        assume(exactly(without_secrets_in(options)) == exactly(options))
        assume(
            not any("${" in key or key[:1] == key[-1:] == "_" for key in constant)
            if isinstance(constant, dict)
            else True
        )
        check_everywhere(tmp_path, options, constant)

    run()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (autotune.integer(1, 10**60), "not a whole number from -2**53 to 2**53"),
        (
            (0.01, 0.3),
            "tune(fit): space: x: found (0.01, 0.3); a range is autotune.uniform(0.01, 0.3)",
        ),
        ([{1: "a"}], "tune(fit): space: x: found dict, not numbers"),
        ([Outcome.ERRORED], "tune(fit): space: x: found Outcome, not numbers"),
        ([np.float32], "tune(fit): space: x: found type, not numbers"),
        ([[{"a b": 1}]], """training.x: "[{'a b':1}]": not a value, which is a number, """),
        ([{"a": 1}], "training.x: a choice is a mapping; give scalars or lists"),
        (["postgresql://me:secret1@host/db"], "has a secret in it"),
        ([math.nan, math.nan], "training.x: choice nan is repeated"),
    ],
)
def test_what_cannot_arrive_is_one_line(tmp_path: Path, options: Any, said: str) -> None:
    with pytest.raises((ConfigError, SearchSpaceError)) as refused:
        written(tmp_path, options, {"x": 1})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_cannot_read_the_environment_as_plain_text(tmp_path: Path) -> None:
    for value in (
        "${oc.env:HOME}",
        "\\\\${oc.env:HOME}",
        "\\${x}${oc.env:HOME}",
        "${a\\${oc.env:HOME}}",
        "$\\{oc.env:HOME}${oc.env:HOME}",
    ):
        text = f"defaults: [cnn, _self_]\ntraining: {{_target_: a.b, x: {json.dumps(value)}}}"
        with pytest.raises(ConfigError, match=r"training\.x: found \$\{ with more than a key"):
            compose_exported(text, [], ["a"])
    with pytest.raises(ConfigError, match=r"model\.x: found \$\{ with more than a key"):
        compose_exported('defaults: [cnn, _self_]\nmodel: {x: "\\\\${oc.env:HOME}"}', [], ["a"])
