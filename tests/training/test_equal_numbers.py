"""Every option of precision, runtime, data path and memory trains the same function as a plain loop: benchmarks/equal_numbers.py."""

import pytest

from benchmarks.equal_numbers import BFLOAT16, GPU_OPTIONS, OPTIONS, ROUNDING, SLOW_OPTIONS, own_loss, plain_loss

OF_TORCH = "ignore:.torch.jit.script:DeprecationWarning"
"""What torch itself says as it imports its compiler."""


@pytest.mark.parametrize(("option", "tolerance"), OPTIONS.items())
def test_an_option_trains_what_the_plain_loop_trains(option: str, tolerance: float) -> None:
    assert own_loss(option, "none", "cpu") == pytest.approx(plain_loss("none", "cpu"), rel=tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings(OF_TORCH)
@pytest.mark.parametrize(("option", "tolerance"), SLOW_OPTIONS.items())
def test_a_slow_option_trains_what_the_plain_loop_trains(option: str, tolerance: float) -> None:
    assert own_loss(option, "none", "cpu") == pytest.approx(plain_loss("none", "cpu"), rel=tolerance)


@pytest.mark.parametrize("option", ["", "runtime.activation_checkpointing=true", "data_path.on_device=false"])
def test_batch_norm_too_moves_its_statistics_as_in_the_plain_loop(option: str) -> None:
    assert own_loss(option, "batch", "cpu") == pytest.approx(plain_loss("batch", "cpu"), rel=ROUNDING)


def test_the_comparison_can_fail() -> None:
    assert abs(own_loss("", "none", "cpu") - plain_loss("batch", "cpu")) / plain_loss("batch", "cpu") > BFLOAT16
    assert plain_loss("none", "cpu") < 2.0, "twenty steps learn something, or agreeing means little"


@pytest.mark.gpu
@pytest.mark.filterwarnings(OF_TORCH)
@pytest.mark.parametrize(("option", "tolerance"), GPU_OPTIONS.items())
def test_an_option_trains_on_a_gpu_what_the_plain_loop_trains(option: str, tolerance: float) -> None:
    assert own_loss(option, "none", "cuda") == pytest.approx(plain_loss("none", "cuda"), rel=tolerance)
