"""How many examples the fuzzed tests try: their own number, times AUTOTUNE_FUZZ_EXAMPLES."""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings


def examples(number: int) -> Callable[[Any], Any]:
    """Settings of a fuzzed test that tries ``number`` examples, or as many times more as the
    environment says.
    """
    times = float(os.environ.get("AUTOTUNE_FUZZ_EXAMPLES", "1"))
    return settings(
        max_examples=max(1, round(number * times)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
