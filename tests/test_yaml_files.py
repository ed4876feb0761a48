"""YAML from anyone: plain data, or one line with the file and the line."""

from pathlib import Path

import pytest
import yaml
from omegaconf._utils import get_yaml_loader

from autotune.errors import ConfigError
from autotune.yaml_files import load_yaml, read_yaml

ROOT = Path(__file__).parent.parent
SHIPPED = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "search_spaces").rglob("*.yaml")]


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_yaml(text, "mine.yaml")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_files_mean_what_they_mean_to_hydra() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SHIPPED]
    texts += [
        "a: [1, 1e-3, 1e3, .5, 1_000, 0x1F, 1:30, -.inf, yes, off, ~, 2020-01-01, '1', 1.e3, +1e+2]"
    ]
    assert len(texts) > 70
    for text in texts:
        assert load_yaml(text, "mine.yaml") == yaml.load(text, Loader=get_yaml_loader())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "mine.yaml line 1: found aliases that stand for too many values"),
        ("a: 1\na: 2", "mine.yaml line 2: a: stands twice"),
        ("a: 1\nb: !!int x", "mine.yaml: invalid literal for int() with base 10: 'x'"),
        ("a: b: c", "mine.yaml line 1: mapping values are not allowed here"),
        ("a: " + "[" * 3000, "mine.yaml: is nested too deeply"),
    ],
)
def test_what_is_refused_is_one_line_with_file_and_line(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system",
        "!!python/name:os.system",
        "!!set",
        "!!omap",
        "!!binary",
        "!!timestamp",
    ],
)
def test_only_plain_data_is_made(tag: str) -> None:
    assert refusal(f"a: {tag} x").startswith(
        "mine.yaml line 1: could not determine a constructor for the tag "
    )


def test_aliases_of_aliases_are_refused_at_once() -> None:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 20)
    )
    assert refusal(laughs).endswith("found aliases that stand for too many values")
    assert load_yaml("a: &a [1, 2]\nb: [*a, *a]\n", "mine.yaml") == {
        "a": [1, 2],
        "b": [[1, 2], [1, 2]],
    }


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for path, part in (
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "nope", "cannot be read: No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=part):
            read_yaml(path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^bytes: cannot be read: it is not UTF-8$"):
        read_yaml(tmp_path / "bytes.yaml", "bytes")
