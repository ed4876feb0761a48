"""Every option of precision, runtime, data path and memory trains the same function as a plain
loop: benchmarks/equal_numbers.py.
"""

import pytest

from benchmarks.equal_numbers import OPTIONS, SLOW_OPTIONS, own_loss, plain_loss

OF_TORCH = "ignore:.torch.jit.script:DeprecationWarning"
"""What torch itself says as it imports its compiler."""


@pytest.mark.parametrize(("option", "tolerance"), OPTIONS.items())
def test_an_option_trains_what_the_plain_loop_trains(option: str, tolerance: float) -> None:
    assert own_loss(option, "none", "cpu") == pytest.approx(
        plain_loss("none", "cpu"), rel=tolerance
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(OF_TORCH)
@pytest.mark.parametrize(("option", "tolerance"), SLOW_OPTIONS.items())
def test_a_slow_option_trains_what_the_plain_loop_trains(option: str, tolerance: float) -> None:
    assert own_loss(option, "none", "cpu") == pytest.approx(
        plain_loss("none", "cpu"), rel=tolerance
    )
