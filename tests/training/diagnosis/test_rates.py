"""What is measured of a machine: each rate is there, of the right thing, and what fails is a reason; none is compared with a number."""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autotune.machine import AllReduceRate, CopyRate, MatrixRate, NotMeasured
from autotune.training.diagnosis import rates
from autotune.training.diagnosis.rates import all_reduce_rates, bus_bandwidth, copy_rates, make_product, matrix_rates, median_run_seconds

CPU = torch.device("cpu")


def test_a_round_has_as_many_runs_as_it_is_told() -> None:
    events: list[str] = []
    seconds = median_run_seconds(lambda: events.append("run"), lambda: events.append("wait"), limit_seconds=0, at_once=3)
    assert events == ["run", "wait", "run", "run", "run", "wait"]
    assert seconds > 0


def test_rounds_go_on_until_the_limit_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    lasts: Iterator[float] = iter([7.0, 1.0, 5.0, 2.0, 1.0])  # the first warms up

    def run() -> None:
        nonlocal now
        now += next(lasts)

    monkeypatch.setattr("autotune.training.diagnosis.rates.time.perf_counter", lambda: now)
    assert median_run_seconds(run, lambda: None, limit_seconds=15.5, at_once=1) == 1.5
    assert next(lasts, None) is None


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp8"])
def test_a_product_is_one_of_two_matrices_in_its_format(precision: str) -> None:
    torch.manual_seed(0)
    product = make_product(precision, 64, CPU)()
    assert product.shape == (64, 64)
    assert product.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(precision, torch.float32)
    assert product.float().std().item() == pytest.approx(64**0.5, rel=0.1)  # each element is a sum of 64 products


def test_every_precision_has_a_rate_or_a_reason() -> None:
    before = torch.get_float32_matmul_precision()
    found = list(matrix_rates(CPU, limit_seconds=0))
    measured = {each.precision: each for each in found if isinstance(each, MatrixRate)}
    missing = {each.what: each.reason for each in found if isinstance(each, NotMeasured)}
    assert set(measured) == {"fp32", "bf16", "fp16"}
    assert missing == {"tf32 products on cpu": "for GPUs", "fp8 products on cpu": "for GPUs"}
    assert all(each.flops_per_second > 0 and each.device == "cpu" for each in measured.values())
    assert torch.get_float32_matmul_precision() == before


def test_a_product_that_fails_without_a_message_is_told_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_numbers(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError

    monkeypatch.setattr(torch, "randn", no_numbers)
    assert {missing.reason for missing in matrix_rates(CPU, limit_seconds=0)} == {"RuntimeError", "for GPUs"}  # type: ignore[union-attr]


def test_memory_is_copied_within_the_host() -> None:
    (rate,) = copy_rates(CPU, limit_seconds=0, num_bytes=2**20)
    assert isinstance(rate, CopyRate)
    assert (rate.source, rate.destination, rate.host_memory, rate.num_bytes) == ("host", "host", "pageable", 2**20)
    assert rate.bytes_per_second > 0


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_bandwidth(10**9, 0.5, 2) == 2e9
    assert bus_bandwidth(10**9, 0.5, 8) == 3.5e9


@pytest.mark.slow
def test_processes_add_up_and_one_that_fails_is_told_after_what_was_measured() -> None:
    before = set(multiprocessing.active_children())
    rate, failure = all_reduce_rates("cpu", num_ranks=2, limit_seconds=0, sizes=(2**12, -8))
    assert isinstance(rate, AllReduceRate)
    assert (rate.backend, rate.num_ranks, rate.num_bytes) == ("gloo", 2, 2**12)
    assert rate.bus_bytes_per_second == pytest.approx(2**12 / rate.seconds)
    assert isinstance(failure, NotMeasured)
    assert failure.what == "all-reduce of 2 processes over gloo"
    assert "negative" in failure.reason
    assert failure.reason.endswith(", at -8 bytes")
    assert set(multiprocessing.active_children()) == before


@pytest.mark.slow
def test_a_process_that_crashes_is_told_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(multiprocessing.active_children())
    monkeypatch.setenv("PYTHONHOME", "/no/such/folder")  # new processes end before they run anything
    (failure,) = all_reduce_rates("cpu", num_ranks=2, limit_seconds=0)
    assert failure == NotMeasured(what="all-reduce of 2 processes over gloo", reason="a process ended with exit code 1, at 65536 bytes")
    assert set(multiprocessing.active_children()) == before


def test_processes_that_do_not_answer_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(multiprocessing.active_children())
    monkeypatch.setattr(rates, "_START_SECONDS", 0.0)
    (failure,) = all_reduce_rates("cpu", num_ranks=2, limit_seconds=0)
    assert failure == NotMeasured(what="all-reduce of 2 processes over gloo", reason="no answer in time, at 65536 bytes")
    assert set(multiprocessing.active_children()) == before


@pytest.mark.gpu
def test_a_gpu_has_every_rate() -> None:
    device = torch.device("cuda", 0)
    products = {each.precision for each in matrix_rates(device, limit_seconds=0.01) if isinstance(each, MatrixRate)}
    assert products >= {"fp32", "fp16"}
    assert ("bf16" in products) == (torch.cuda.get_device_capability() >= (8, 0))
    copies: list[Any] = list(copy_rates(device, limit_seconds=0.01))
    assert [(each.source, each.destination, each.host_memory) for each in copies] == [
        (*way, memory) for memory in ("pageable", "pinned") for way in (("host", "cuda:0"), ("cuda:0", "host"))
    ]


@pytest.mark.gpu
@pytest.mark.slow
def test_gpus_add_up_over_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (rate,) = all_reduce_rates("cuda", num_ranks=torch.cuda.device_count(), limit_seconds=0.01, sizes=(2**20,))
    assert isinstance(rate, AllReduceRate), rate
    assert rate.backend == "nccl"
