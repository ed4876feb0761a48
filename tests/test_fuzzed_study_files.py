"""A study's files with anything changed in them: each reader takes them, or refuses them in one
line.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import AutotuneError
from autotune.files import make_folder
from autotune.recording import read_recording
from autotune.reporting.concluded_study import read_concluded_study, readable
from autotune.reporting.study_files import StudyTables, read_summary
from autotune.space import SearchSpace
from tests.support.fuzz import changed_bytes, examples

FIRST_VERSION = Path(__file__).parent / "recorded" / "first_version"
WEIRD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["../../etc/passwd", "a\nb", "REACHED", "9" * 400, 1e400, -0.0]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Plain data of any kind."""


@st.composite
def changed_data(draw: st.DrawFn, content: Any) -> Any:
    """Plain data in which up to three values are others, are gone or stand under another key."""
    content = json.loads(json.dumps(content))
    for _ in range(draw(st.integers(1, 3))):
        parent, key = draw(st.sampled_from(list(_places(content)) or [([content], 0)]))
        how = draw(st.integers(0, 3))
        if how == 0:
            del parent[key]
        elif how == 1 and isinstance(parent, dict):
            parent[draw(st.text(max_size=8))] = parent.pop(key)
        else:
            parent[key] = draw(WEIRD)
    return content


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    for key in (
        list(content)
        if isinstance(content, dict)
        else range(len(content))
        if isinstance(content, list)
        else ()
    ):
        yield content, key
        yield from _places(content[key])


def accepted_or_one_line(read: Callable[[], object]) -> None:
    try:
        read()
    except AutotuneError as error:
        text = str(error)
        assert text.strip(), "it says something"
        assert "\n" not in text, text
        assert len(text) < 1500, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder, whose files the tests change and put back."""
    return Path(shutil.copytree(FIRST_VERSION, tmp_path_factory.mktemp("fuzzed") / "small"))


def read_with(folder: Path, name: str, content: bytes, read: Callable[[], object]) -> None:
    path = folder / name
    kept = path.read_bytes()
    path.write_bytes(content)
    try:
        accepted_or_one_line(read)
    finally:
        path.write_bytes(kept)


@pytest.mark.parametrize("name", ["study.yaml", "space.yaml"])
@examples(30)
@given(st.data())
def test_a_recording_with_changed_values_is_read_or_refused_in_one_line(
    folder: Path, name: str, data: st.DataObject
) -> None:
    path = folder / "recording" / name
    content = data.draw(changed_data(yaml.safe_load(path.read_text())))
    read_with(
        path.parent,
        name,
        yaml.safe_dump(content).encode("utf-8", "replace"),
        lambda: read_recording(path.parent),
    )


@pytest.mark.parametrize("name", ["summary.json", "trials.csv", "trace.csv", "machine.yaml"])
@examples(15)
@given(st.data())
def test_result_files_with_changed_bytes_are_read_or_refused_in_one_line(
    folder: Path, name: str, data: st.DataObject
) -> None:
    def read() -> None:
        with readable(folder):
            read_concluded_study(folder)
        resumed = make_folder(folder.parent / "resumed")
        shutil.copy(folder / "trace.csv", resumed)
        StudyTables(resumed, SearchSpace(), [], {})

    read_with(folder, name, data.draw(changed_bytes((folder / name).read_bytes())), read)


@examples(20)
@given(st.data())
def test_a_summary_with_changed_values_is_read_or_refused_in_one_line(
    folder: Path, data: st.DataObject
) -> None:
    content = json.dumps(
        data.draw(changed_data(json.loads((folder / "summary.json").read_text())))
    ).encode("utf-8", "replace")

    def read() -> None:
        read_summary(folder / "summary.json")
        with readable(folder):
            study = read_concluded_study(folder)
            _ = study.arms, study.speed_up

    read_with(folder, "summary.json", content, read)
