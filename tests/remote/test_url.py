"""URLs are told from paths, shown without what is secret, and refused where only a path will do."""

from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.remote.url import is_url, refuse_url, shown


@pytest.mark.parametrize(
    ("location", "found"),
    [("data", False), ("/data", False), ("~/data:/x", False), ("a:b", False), ("s3://b/x", True), ("s3:/b/x", True), ("zip::s3://b", True)],
)
def test_a_url_is_told_from_a_path(location: str, found: bool) -> None:
    assert is_url(location) is found
    assert is_url(Path(location)) is found


def test_where_only_a_path_will_do_a_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"study\.folder: found the URL s3://bucket/x, accepted is a folder of this machine"):
        refuse_url("s3://bucket/x", "study.folder")
    refuse_url("outputs", "study.folder")


def test_what_may_be_secret_is_not_shown() -> None:
    assert shown("https://me:word@host/x.csv?signature=1") == "https://host/x.csv"
    assert shown("s3://bucket/a?b") == "s3://bucket/a?b"
