"""YAML from anyone: plain data within limits, or one line with the file and the line."""

from pathlib import Path

import pytest
import yaml
from omegaconf._utils import get_yaml_loader

from autotune.errors import ConfigError
from autotune.yaml_files import MAX_VALUES_VARIABLE, load_yaml, read_yaml

ROOT = Path(__file__).parent.parent
SHIPPED = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "search_spaces").rglob("*.yaml")]


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_yaml(text, "mine.yaml")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_files_mean_what_they_mean_to_hydra() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SHIPPED]
    texts += ["a: [1, 1e-3, 1e3, .5, 1_000, 0x1F, 1:30, -.inf, yes, off, ~, 2020-01-01, '1', 1.e3, +1e+2]"]
    assert len(texts) > 70
    for text in texts:
        assert load_yaml(text, "mine.yaml") == yaml.load(text, Loader=get_yaml_loader())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "mine.yaml line 1: found an alias inside of what it stands for; accepted are values that end"),
        ("a: 1\nb: &b {c: {d: *b}}", "mine.yaml line 2: found an alias inside of what it stands for; accepted are values that end"),
        ("a: 1\na: 2", "mine.yaml line 2: a: stands twice; accepted is each key once"),
        ("a: 1\nb: !!int x", "mine.yaml line 2: found no int, which its tag says it is"),
        ("a: !!bool maybe", "mine.yaml line 1: found no bool, which its tag says it is"),
        ("a: " + "9" * 101, "mine.yaml line 1: found a number of more than 100 characters; accepted is a shorter one, or a text in quotes"),
        ("a: b: c", "mine.yaml line 1: mapping values are not allowed here"),
        ("a: 'b", "mine.yaml line 1: found unexpected end of stream"),
        ("[" * 33, "mine.yaml line 1: found more than 32 levels; accepted is a flatter file"),
        ("? [a]\n: b", "mine.yaml line 1: found unhashable key"),
    ],
)
def test_what_is_refused_is_one_line_with_file_and_line(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!!set", "!!omap", "!!binary", "!!timestamp"]
)
def test_only_plain_data_is_made(tag: str) -> None:
    assert refusal(f"a: {tag} x").startswith("mine.yaml line 1: could not determine a constructor for the tag ")


def test_values_are_counted_with_all_that_aliases_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: &a [1, 2]\nb: [*a, *a]\n"  # two keys, a list of two, and a list of two such lists; and the mapping itself
    monkeypatch.setenv(MAX_VALUES_VARIABLE, "13")
    assert load_yaml(text, "mine.yaml") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    monkeypatch.setenv(MAX_VALUES_VARIABLE, "12")
    assert refusal(text).startswith(
        "mine.yaml line 1: found more than 12 values, each alias counted as all that it stands for; AUTOTUNE_YAML_"
    )


def test_a_file_is_read_up_to_the_limit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large.yaml").write_text(f"a: {'x' * 1_000_000}\n")
    with pytest.raises(ConfigError, match=r"large\.yaml: found more than 1,000,000 bytes; AUTOTUNE_YAML_MAX_VALUES=NUMBER in the env"):
        read_yaml(tmp_path / "large.yaml")
    monkeypatch.setenv(MAX_VALUES_VARIABLE, "20000")
    assert len(read_yaml(tmp_path / "large.yaml")["a"]) == 1_000_000
    with pytest.raises(ConfigError, match="more than 2,000,000 bytes"):
        read_yaml(Path("/dev/zero"))


def test_a_limit_that_is_no_number_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_VALUES_VARIABLE, "many")
    assert refusal("a: 1") == "AUTOTUNE_YAML_MAX_VALUES: found 'many', accepted is a whole number from 1"


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for path, part in ((tmp_path, "cannot be read: Is a directory"), (tmp_path / "nope", "cannot be read: No such file or directory")):
        with pytest.raises(ConfigError, match=part):
            read_yaml(path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^bytes: is not text; accepted is YAML in UTF-8$"):
        read_yaml(tmp_path / "bytes.yaml", "bytes")
