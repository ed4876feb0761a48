"""What is measured of a machine: each rate is there, of the right thing, and what fails is a
reason; none is compared with a number.
"""

import pytest
import torch
import yaml

from autotune.training.diagnosis import copy_rate, measured_rates, product_rate, this_machine

CPU = torch.device("cpu")


def test_the_machine_is_plain_data() -> None:
    machine = this_machine()
    assert yaml.safe_load(yaml.safe_dump(machine)) == machine
    assert machine["processor"]["num_cpus"] >= 1
    assert machine["versions"]["torch"] == torch.__version__
    assert len(machine["gpus"]) == torch.cuda.device_count()


def test_products_and_copies_have_rates_and_what_fails_a_reason() -> None:
    before = torch.get_float32_matmul_precision()
    product = product_rate(CPU, "tf32", 16, 0.001)
    copy = copy_rate(CPU, CPU, 2**10, 0.001, pinned=False)
    assert (copy.kind, copy.what) == ("copy", "cpu to cpu")
    assert all(rate.per_second and rate.seconds and not rate.reason for rate in (product, copy))
    assert torch.get_float32_matmul_precision() == before
    failed = product_rate(CPU, "fp32", -1, 0.001)
    assert failed.per_second is None
    assert failed.reason


@pytest.mark.gpu
def test_a_gpu_has_every_rate() -> None:
    rates = [rate for rate in measured_rates("cuda:0", 0.01) if rate.per_second]
    assert {rate.what.split()[0] for rate in rates} >= {"fp32", "tf32", "fp16"}
    ways = ("cpu to cuda:0", "cuda:0 to cpu")
    assert [rate.what for rate in rates if rate.kind == "copy"] == [
        f"{way}{memory}" for way in ways for memory in ("", ", pinned")
    ]
