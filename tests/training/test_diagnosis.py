"""What is measured of a machine: each rate is there, of the right thing, and what fails is a
reason; none is compared with a number.
"""

import multiprocessing

import pytest
import torch
import yaml

from autotune.training import diagnosis
from autotune.training.diagnosis import all_reduce_rates, copy_rates, product_rates, this_machine

CPU = torch.device("cpu")


def test_the_machine_is_plain_data() -> None:
    machine = this_machine()
    assert yaml.safe_load(yaml.safe_dump(machine)) == machine
    assert machine["processor"]["num_cpus"] >= 1
    assert machine["versions"]["torch"] == torch.__version__
    assert len(machine["gpus"]) == torch.cuda.device_count()


def test_products_and_copies_have_rates_and_what_fails_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_float32_matmul_precision()
    products = list(product_rates(CPU, 0.001))
    assert [rate.what.split()[0] for rate in products] == ["fp32", "bf16", "fp16"]
    (copy,) = copy_rates(CPU, 0.001, num_bytes=2**20)
    assert (copy.kind, copy.what) == ("copy", "cpu to cpu")
    assert all(rate.per_second and rate.seconds and not rate.reason for rate in (*products, copy))
    assert torch.get_float32_matmul_precision() == before

    def no_numbers(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError

    monkeypatch.setattr(torch, "randn", no_numbers)
    assert {(rate.reason, rate.per_second) for rate in product_rates(CPU, 0)} == {
        ("RuntimeError", None)
    }


@pytest.mark.slow
def test_processes_add_up() -> None:
    rates = list(all_reduce_rates("cpu", 2, 0))
    assert [rate.what for rate in rates] == [
        f"2 processes, gloo, {size} MiB" for size in ("0.0625", "1", "16")
    ]
    first = rates[0]
    assert first.seconds
    # 2 (n - 1) / n of two processes is one
    assert first.per_second == pytest.approx(2**16 / first.seconds)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["crash", "hang"])
def test_processes_that_crash_or_hang_are_told_and_ended(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    if fails == "crash":
        # new processes end before they run anything
        monkeypatch.setenv("PYTHONHOME", "/no/such/folder")
    else:
        monkeypatch.setattr(diagnosis, "START_SECONDS", 0.0)
    (failure,) = all_reduce_rates("cpu", 2, 0)
    assert failure.per_second is None
    assert ("exit code 1" if fails == "crash" else "no answer in time") in failure.reason
    assert multiprocessing.active_children() == []


@pytest.mark.gpu
def test_a_gpu_has_every_rate() -> None:
    device = torch.device("cuda", 0)
    products = {rate.what.split()[0] for rate in product_rates(device, 0.01) if rate.per_second}
    assert products >= {"fp32", "tf32", "fp16"}
    ways = ("cpu to cuda:0", "cuda:0 to cpu")
    assert [rate.what for rate in copy_rates(device, 0.01) if rate.per_second] == [
        f"{way}{memory}" for way in ways for memory in ("", ", pinned")
    ]


@pytest.mark.gpu
@pytest.mark.slow
def test_gpus_add_up_over_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rates = list(all_reduce_rates("cuda", torch.cuda.device_count(), 0.01))
    assert all(rate.per_second and "nccl" in rate.what for rate in rates), rates
