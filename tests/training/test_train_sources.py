"""Sources are trained once, by a command of their own, and reused."""

from pathlib import Path

import pytest

from autotune.config.compose import Composer
from autotune.errors import ConfigError
from autotune.training.checkpoint import read_weights
from autotune.training.run import check_training
from autotune.training.sources import train_missing_sources

BASE = """# @package _global_
data: {classes: [0, 1], num_train: 64}
epochs: 4
target: {value: 0.6, max_train_seconds: 20}
"""


def composed(folder: Path, source: str) -> Composer:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "base.yaml").write_text(source)
    overrides = [
        "experiment=cnn",
        "technique=transfer",
        "technique.source=base",
        "device=cpu",
        f"study.folder={folder}/all",
    ]
    composer = Composer(overrides, [str(folder)])
    composer.compose()
    return composer


@pytest.mark.command
def test_a_missing_source_is_trained_once_and_reused(tmp_path: Path) -> None:
    composer, said = composed(tmp_path, BASE), list[str]()
    train_missing_sources(composer, said.append)
    path = composer.sources["base"].path
    weights, metadata = read_weights(path)
    assert weights["classifier.weight"].shape[0] == metadata["num_classes"] == 2
    assert metadata["evaluation"]["metric"] >= 0.6
    assert said[0] == "technique.source: training base first, once"
    assert said[1].startswith("technique.source: trained base in ")
    assert said[1].endswith(f" s, in no trial's time: {path}")
    check_training(composer.compose().trial)

    made = path.stat().st_mtime_ns
    train_missing_sources(composed(tmp_path, BASE), said.append)
    assert path.stat().st_mtime_ns == made
    assert len(said) == 2
    assert sorted(each.name for each in path.parent.iterdir()) == [f".{path.stem}.lock", path.name]


@pytest.mark.command
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            BASE.replace("0.6", "1.1"),
            (
                "technique.source: experiment base is no source, since it does not reach its own"
                " target: outcome MISSED: accuracy >= 1.1"
            ),
        ),
        (
            BASE.replace("64", "9999"),
            "technique.source: experiment base: data.num_train: found 9999, use 1 to ",
        ),
    ],
)
def test_a_source_that_cannot_be_trained_is_one_line(
    tmp_path: Path, source: str, said: str
) -> None:
    composer = composed(tmp_path, source)
    with pytest.raises(ConfigError) as refused:
        train_missing_sources(composer, lambda line: None)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)
    assert not composer.sources["base"].path.exists()
