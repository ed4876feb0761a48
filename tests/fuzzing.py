"""Fuzzing with hypothesis: few examples in the fast tier, a minute's in the slow one, as many as are asked for in a long run.

``AUTOTUNE_FUZZ_EXAMPLES=20000 python -m pytest -m slow -n 0 tests/config/test_fuzz_configuration.py`` is a long run, in which each test
takes so many examples, other ones each time.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MAX_CPU_SECONDS = 10.0
"""Processor time that no input may take longer than to read or to refuse."""


def tiers(fast: int, slow: int) -> Any:
    """Parametrisation of a test by ``num_examples``, one value for each tier."""
    return pytest.mark.parametrize("num_examples", [fast, pytest.param(slow, marks=pytest.mark.slow)])


def fuzz(inputs: st.SearchStrategy[Any], check: Callable[[Any], None], num_examples: int) -> None:
    """Call ``check`` with so many examples of ``inputs``; one that takes too much processor time fails."""
    asked = os.environ.get("AUTOTUNE_FUZZ_EXAMPLES")

    @settings(
        max_examples=int(asked or num_examples),
        derandomize=asked is None,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(inputs)
    def run(example: Any) -> None:
        before = time.process_time()
        check(example)
        spent = time.process_time() - before
        assert spent < MAX_CPU_SECONDS, f"{spent:.1f} s of CPU"

    run()
