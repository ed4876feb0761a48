"""Ranks for the tests of this folder, started once."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes to train on."""
    made = Ranks()
    yield made
    made.end()
