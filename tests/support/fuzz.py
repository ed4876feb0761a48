"""What the fuzzed tests share: how many examples they try, times AUTOTUNE_FUZZ_EXAMPLES, and edits
of a file's bytes.
"""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


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


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with a part cut out, written over, doubled or put in, up to four times; most changes
    lie near the beginning.
    """
    for _ in range(draw(st.integers(1, 4))):
        near = st.integers(0, min(len(content), 200))
        begin = draw(near | st.integers(0, len(content)))
        end = min(len(content), begin + draw(st.integers(0, 64)))
        put = draw(
            st.binary(max_size=24)
            | st.just(content[begin:end] * 2)
            | st.sampled_from([b"\xff" * 8, b"\0" * 40, b"[" * 3000, b"&a [*a]", b"'", b"{"])
        )
        content = content[:begin] + put + content[end:]
        if draw(st.integers(0, 9)) == 0:
            content = content[: draw(st.integers(0, len(content)))]
    return content
