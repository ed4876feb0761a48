"""Search space files and sweeps: what is read, what is refused, and that every branch composes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.config.compose import Composer
from autotune.config.schema import FIXED_KEYS
from autotune.config.space_files import check_space, read_search_space
from autotune.errors import ConfigError
from autotune.space import Choice, Float, Int, Parameter, PowerOfTwo, SearchSpace

ROOT = Path(__file__).parent.parent.parent
EXPERIMENTS = sorted(each.stem for each in (ROOT / "conf" / "experiment").glob("*.yaml"))
SHIPPED_SPACES = sorted(
    f"search_spaces/{each.name}" for each in (ROOT / "search_spaces").glob("*.yaml")
)

COMPOSER = Composer(["experiment=cnn"])

WriteSpace = Callable[[str | bytes], str]


@pytest.fixture
def write_space(tmp_path: Path) -> WriteSpace:
    """Writes a search space file and returns its path."""

    def write(content: str | bytes) -> str:
        path = tmp_path / "space.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def plain_choice(*values: Any) -> Choice:
    return Choice(options=tuple((value, SearchSpace()) for value in values))


def refusal(*entries: Any, composer: Composer = COMPOSER, check: bool = False) -> str:
    """The one line that a search space is refused with."""
    # either of two steps may refuse
    with pytest.raises(ConfigError) as refused:  # noqa: PT012
        space = read_search_space(entries, composer)
        if check:
            check_space(space, composer)
    assert "\n" not in str(refused.value)
    return str(refused.value)


QUICK = ("cnn",)


@pytest.mark.parametrize(
    "experiment",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in EXPERIMENTS],
)
def test_every_branch_of_every_experiment_composes(experiment: str) -> None:
    composer = Composer([f"experiment={experiment}"])
    composed = composer.compose()
    space = read_search_space(composed.config.search_space, composer)
    assert check_space(space, composer) == list(space.probes())


def goes_with(file: str) -> list[str]:
    """The experiments that a file of a search space names."""
    lines = (ROOT / file).read_text().splitlines()
    named = [line.removeprefix("# Goes with:") for line in lines if line.startswith("# Goes with:")]
    return [name.strip() for line in named for name in line.split(",")]


def test_every_file_of_a_search_space_names_experiments_that_it_goes_with() -> None:
    assert {file: set(goes_with(file)) - set(EXPERIMENTS) for file in SHIPPED_SPACES} == {
        file: set() for file in SHIPPED_SPACES
    }
    assert [file for file in SHIPPED_SPACES if not goes_with(file)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "experiment"), [(file, name) for file in SHIPPED_SPACES for name in goes_with(file)]
)
def test_a_file_composes_with_every_experiment_it_names(file: str, experiment: str) -> None:
    composer = Composer([f"experiment={experiment}"])
    assert check_space(read_search_space([file], composer), composer)


# Reading.


def test_files_and_mappings_of_an_experiment_become_one_space() -> None:
    space = read_search_space(
        ["search_spaces/memory.yaml", {"epochs": {"type": "int", "low": 1, "high": 3}}], COMPOSER
    )
    assert space.parameters["runtime.micro_batch_size"] == plain_choice(None, 64, 256)
    assert space.parameters["epochs"] == Int(low=1, high=3)


@pytest.mark.parametrize("place", ["working folder", "config dir", "beside the config dir"])
def test_a_file_is_found_from_here_and_from_the_config_dir(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_dir = tmp_path / "conf"
    folder = {
        "working folder": tmp_path / "here",
        "config dir": config_dir,
        "beside the config dir": tmp_path,
    }[place]
    for each in (config_dir, folder / "spaces", tmp_path / "here"):
        each.mkdir(parents=True, exist_ok=True)
    (folder / "spaces" / "mine.yaml").write_text("epochs: [1, 2]\n")
    monkeypatch.chdir(tmp_path / "here")
    space = read_search_space(["spaces/mine.yaml"], Composer(["experiment=cnn"], [str(config_dir)]))
    assert space.parameters == {"epochs": plain_choice(1, 2)}


def test_numbers_in_the_exponent_form_are_numbers_wherever_they_stand(
    write_space: WriteSpace,
) -> None:
    path = write_space(
        "optimizer.lr: [1e-2, 1E3, 1.5e4, -2e-1]\nepochs: {type: float, low: 1e-2, high:"
        " 2e0}\nmodel.x: ['1e-2', e1]\n"
    )
    space = read_search_space([path], COMPOSER)
    assert space.parameters["optimizer.lr"] == plain_choice(0.01, 1000.0, 15000.0, -0.2)
    assert space.parameters["epochs"] == Float(low=0.01, high=2.0)
    assert space.parameters["model.x"] == plain_choice("1e-2", "e1")


def test_branches_may_share_what_opens_beneath_them(write_space: WriteSpace) -> None:
    path = write_space(
        "optimizer:\n  type: choice\n  choices:\n    sgd: &lr\n      optimizer.lr: [0.1]\n   "
        " adamw:\n      <<: *lr\n      optimizer.eps: [1.0]\n"
    )
    space = read_search_space([path], COMPOSER)
    assert [name for name, *_ in space.walk()] == [
        "optimizer",
        "optimizer=sgd/optimizer.lr",
        "optimizer=adamw/optimizer.lr",
        "optimizer=adamw/optimizer.eps",
    ]


# Refusing.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epochs: [1\nbatch_size: 2\n", "{path} line 2: expected ',' or ']', but got ':'"),
        (
            "epochs:\n\ttype: int\n",
            "{path} line 2: found character '\\t' that cannot start any token",
        ),
        ("epochs: [1]\nepochs: [2]\n", "{path} line 2: epochs: stands twice"),
        ("? [1, 2]\n: [3]\n", "{path} line 1: found unhashable key"),
        (b"\xff\xfe\x00", "{path}: cannot be read: it is not UTF-8"),
        (
            "- epochs\n",
            "{path}: the file is no mapping from config key to domain",
        ),
        (
            "optimizer:\n  type: choice\n  choices:\n    sgd:\n      seed: [1, 2]\n",
            (
                "{path}: seed: is a setting of the study, the same for all its trials; search"
                " keys of a training"
            ),
        ),
        (
            "model.x: [{a: 1}]\n",
            "{path}: model.x: a choice is a mapping; give scalars or lists",
        ),
        (
            "data.path: ['s3://a/b?token=abc123xyz', a]\n",
            (
                "{path}: data.path: the option 's3://a/b?token=***' has a secret in it; on"
                " the command line, data.path=choice('${oc.env:NAME}',...) reads it from the"
                " environment"
            ),
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_finds_it(
    content: str | bytes, message: str, write_space: WriteSpace
) -> None:
    path = write_space(content)
    assert refusal(path) == message.replace("{path}", path)


@pytest.mark.parametrize("key", sorted(FIXED_KEYS))
def test_what_all_trials_share_cannot_be_searched(key: str) -> None:
    assert f"{key}: is a setting of the study" in refusal({key: [1, 2]})


def test_a_file_that_is_not_there_is_refused_with_those_that_are() -> None:
    assert refusal("cn").startswith(
        "search_space: cn: no such file (did you mean cnn?); there are cnn, "
    )
    names = [Path(each).stem for each in SHIPPED_SPACES]
    assert refusal("search_spaces/cn.yaml").startswith(
        "search_space: search_spaces/cn.yaml: no such file (did you mean cnn?); there are"
        f" {', '.join(names)}; a file of your own has a path from "
    )


def test_a_shipped_space_is_picked_by_its_name() -> None:
    by_path = read_search_space(["search_spaces/cnn.yaml"], COMPOSER)
    assert read_search_space(["cnn"], COMPOSER) == by_path
    assert set(by_path.sources.values()) == {"search_spaces/cnn.yaml"}


def test_the_same_key_in_two_files_is_refused_with_both() -> None:
    assert (
        refusal("search_spaces/cnn.yaml", {"epochs": [1, 2]})
        == "search_space[1]: epochs: is also in search_spaces/cnn.yaml; use each key once"
        " in an experiment's search_space"
    )


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"epocs": [1, 2]}, "search_space[0]: epocs: no config has this key; there is no epocs"),
        (
            {"optimizer.momentums": [0.5]},
            (
                "search_space[0]: optimizer.momentums: no config has this key; optimizer has"
                " _target_, lr, "
            ),
        ),
        (
            {"training.width": [1]},
            "search_space[0]: training.width: no config has this key; there is no training",
        ),
        (
            {"optimizer": {"type": "choice", "choices": {"adamw": {"optimizer.momentum": [0.5]}}}},
            (
                "search_space[0]: optimizer=adamw: optimizer.momentum: no config has this key;"
                " optimizer has _target_, lr, weight_decay"
            ),
        ),
        (
            {"optimizer": ["sgd", "adam"]},
            "search_space[0]: optimizer=adam: there is no such file (did you mean adamw?)",
        ),
        (
            {"epochs": [3, "many"]},
            "search_space[0]: epochs: Value 'many' of type 'str' could not be converted to Float",
        ),
        (
            {"batch_size": {"type": "float", "low": 1, "high": 8}},
            (
                "search_space[0]: batch_size: Value '1.0' of type 'float' could not be converted to"
                " Integer"
            ),
        ),
        (
            {"batch_size": {"type": "int", "low": 0, "high": 8}},
            "search_space[0]: batch_size: found 0; give a whole number from 1",
        ),
        (
            {"model._target_": ["os.system"]},
            "search_space[0]: model._target_: found 'os.system'; accepted here: ",
        ),
    ],
)
def test_a_key_or_value_that_no_configuration_takes_is_refused_before_anything_runs(
    mapping: Any, message: str
) -> None:
    assert refusal(mapping, check=True).startswith(message)


def test_a_key_that_holds_null_can_be_searched() -> None:
    assert check_space(read_search_space([{"runtime.num_threads": [1, 2]}], COMPOSER), COMPOSER)


# Sweep words.


@pytest.mark.parametrize(
    ("word", "parameter"),
    [
        ("choice(a,b)", plain_choice("a", "b")),
        ("choice('a b',\"c\",1,1.5,true)", plain_choice("a b", "c", 1, 1.5, True)),
        ("choice([8,16],['a b',c])", plain_choice([8, 16], ["a b", "c"])),
        ("16,32", plain_choice(16, 32)),
        ("interval(1e-4,1e-1)", Float(low=1e-4, high=1e-1)),
        ("interval(1,8)", Float(low=1.0, high=8.0)),
        ("int(interval(1,8))", Int(low=1, high=8)),
        ("range(1,10)", Int(low=1, high=9)),
        ("range(1,10,4)", Int(low=1, high=9, step=4)),
        ("range(0,1.1,0.1)", Float(low=0.0, high=1.0, step=0.1)),
        ("range(0.5,3,1)", Float(low=0.5, high=2.5, step=1.0)),
        ("tag(log, interval(1e-4,1e-1))", Float(low=1e-4, high=1e-1, log=True)),
        ("tag(log, int(interval(1,64)))", Int(low=1, high=64, log=True)),
    ],
)
def test_hydras_sweep_words_are_read_in_files_and_on_the_command_line(
    word: str, parameter: Parameter
) -> None:
    assert read_search_space([{"epochs": word}], COMPOSER).parameters == {"epochs": parameter}
    assert read_search_space([], Composer([f"epochs={word}"])).parameters == {"epochs": parameter}


def test_sweep_words_are_read_beneath_a_choice_too() -> None:
    beneath = {"sgd": {"optimizer.lr": "tag(log, interval(1e-3,1))"}}
    space = read_search_space([{"optimizer": {"type": "choice", "choices": beneath}}], COMPOSER)
    assert {name: parameter for name, _, parameter, _ in space.walk()}[
        "optimizer=sgd/optimizer.lr"
    ] == Float(low=1e-3, high=1.0, log=True)


@pytest.mark.parametrize("word", ["sgd", "glob(*)", "range(3,1)", "range(1,3,-1)", "choice(", "3"])
def test_a_word_that_is_no_domain_is_refused_with_those_that_are(word: str) -> None:
    assert (
        refusal({"epochs": word})
        == f"search_space[0]: epochs: found {word!r}; give a list of values, a mapping with"
        " type: float, int, power_of_two or choice, or one of choice(a,b), interval(low,high),"
        " range(start,stop), tag(log, interval(low,high))"
    )


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("epochs=interval(8,1)", "command line: epochs: `low <= high` must hold, but got "),
        ("epochs=choice(1,1)", "command line: epochs: choice 1 is repeated; list each value once"),
        ("seed=1,2", "command line: seed: is a setting of the study, the same for all its trials"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(sweep: str, message: str) -> None:
    assert refusal(composer=Composer([sweep])).startswith(message)


def test_a_sweep_takes_the_place_of_the_files_domain() -> None:
    space = read_search_space(["search_spaces/cnn.yaml"], Composer(["batch_size=64,128"]))
    assert space.parameters["batch_size"] == plain_choice(64, 128)
    assert space.sources["batch_size"] == "command line"
    assert [*space.parameters] == [
        *read_search_space(["search_spaces/cnn.yaml"], COMPOSER).parameters
    ]


def test_a_sweep_narrows_a_key_in_every_branch_it_stands_in() -> None:
    space = read_search_space(
        ["search_spaces/cnn.yaml"], Composer(["optimizer.lr=interval(0.1,0.2)"])
    )
    found = {name: parameter for name, key, parameter, _ in space.walk() if key == "optimizer.lr"}
    assert found == dict.fromkeys(
        ["optimizer=sgd/optimizer.lr", "optimizer=adamw/optimizer.lr"], Float(low=0.1, high=0.2)
    )


def test_a_sweep_over_fewer_choices_keeps_what_they_open() -> None:
    space = read_search_space(["search_spaces/cnn.yaml"], Composer(["optimizer=choice(sgd)"]))
    assert [name for name, *_ in space.walk()][:3] == [
        "optimizer",
        "optimizer=sgd/optimizer.lr",
        "optimizer=sgd/optimizer.momentum",
    ]


def test_a_sweep_adds_a_key_that_no_file_has() -> None:
    composer = Composer(["runtime.num_threads=1,2"])
    space = read_search_space(
        [{"batch_size": {"type": "power_of_two", "low": 1, "high": 2}}], composer
    )
    assert space.parameters == {
        "batch_size": PowerOfTwo(low=1, high=2),
        "runtime.num_threads": plain_choice(1, 2),
    }
    assert check_space(space, composer)
