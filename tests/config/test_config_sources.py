"""Sources: the checkpoint that a technique means when it names an experiment."""

from pathlib import Path

import pytest

from autotune.config.compose import Composer
from autotune.errors import ConfigError, InvalidTrialError
from autotune.space import Suggestion

HEADER = "# @package _global_\n"
TRANSFER = ["experiment=cnn", "technique=transfer", "technique.source=base"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with the experiment ``base``."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "base.yaml").write_text(HEADER + "epochs: 3\n")
    return str(tmp_path)


def checkpoint(*overrides: str, config_dirs: tuple[str, ...]) -> str:
    return str(Composer(overrides, config_dirs).compose().trial.technique["checkpoint"])


def test_a_source_is_a_file_in_the_folder_of_all_studies(folder: str, tmp_path: Path) -> None:
    composer = Composer([*TRANSFER, f"study.folder={tmp_path}/all", "optimizer.lr=0.5"], [folder])
    path = composer.compose().trial.technique["checkpoint"]
    assert Path(path).parent == tmp_path / "all" / "checkpoints"
    assert Path(path).name.startswith("base-")
    source = composer.sources["base"]
    assert str(source.path) == path
    assert source.arguments == (
        "experiment=base",
        f"study.folder={tmp_path}/all",
        "--config-dir",
        folder,
    )


@pytest.mark.slow
def test_the_file_is_another_one_where_the_source_trains_something_else(folder: str) -> None:
    first = checkpoint(*TRANSFER, config_dirs=(folder,))
    assert checkpoint(*TRANSFER, "optimizer.lr=0.3", config_dirs=(folder,)) == first
    (Path(folder) / "experiment" / "base.yaml").write_text(HEADER + "epochs: 4\n")
    assert checkpoint(*TRANSFER, config_dirs=(folder,)) != first


@pytest.mark.slow
def test_a_source_is_trained_where_the_command_line_says_and_with_its_code(folder: str) -> None:
    (Path(folder) / "experiment" / "base.yaml").write_text(
        HEADER + "defaults: [override /data: cifar10]\n"
    )
    composer = Composer(
        [
            *TRANSFER,
            "data=fashion_mnist",
            "data.root=/d",
            "device=cpu",
            "batch_size=3",
            "allowed_targets=[mine]",
        ],
        [folder],
    )
    composer.compose()
    assert composer.sources["base"].arguments[:-2] == (
        "experiment=base",
        "data.root=/d",
        "device=cpu",
        "allowed_targets=[mine]",
    )
    (Path(folder) / "experiment" / "base.yaml").write_text(HEADER)  # whose data has no root
    composer = Composer([*TRANSFER, "data=fashion_mnist", "data.root=/d"], [folder])
    composer.compose()
    assert composer.sources["base"].arguments == ("experiment=base", "--config-dir", folder)


def test_a_suggestion_may_name_a_source(folder: str) -> None:
    composer = Composer(["experiment=cnn"], [folder])
    with_source = composer.compose_suggestion(
        Suggestion({"technique": "transfer", "technique.source": "base"}), seed=0
    )
    assert with_source.trial.technique["checkpoint"] == str(composer.sources["base"].path)
    with pytest.raises(
        InvalidTrialError, match=r"technique\.source: experiment=nope: accepted are "
    ):
        composer.compose_suggestion(
            Suggestion({"technique": "transfer", "technique.source": "nope"}), seed=0
        )


def test_both_a_source_and_a_checkpoint_are_refused(folder: str) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"technique: found source base and checkpoint a\.safetensors, accepted is one of them"
        ),
    ):
        Composer([*TRANSFER, "technique.checkpoint=a.safetensors"], [folder]).compose()


@pytest.mark.slow
def test_a_source_may_have_a_source_but_not_itself(folder: str) -> None:
    starting = HEADER + "defaults: [override /technique: transfer]\ntechnique: {{source: {}}}\n"
    base = Path(folder) / "experiment" / "base.yaml"
    base.with_name("middle.yaml").write_text(starting.format("base"))
    middle = ["experiment=cnn", "technique=transfer", "technique.source=middle"]
    first = checkpoint(*middle, config_dirs=(folder,))
    base.write_text(HEADER + "epochs: 4\n")
    assert checkpoint(*middle, config_dirs=(folder,)) != first, (
        "what a source starts from is a part of it"
    )
    base.write_text(starting.format("middle"))
    with pytest.raises(
        ConfigError, match=r"middle from base from middle: an experiment cannot start from itself"
    ):
        Composer(middle, [folder]).compose()
