"""What is measured of a machine: each rate is there, of the right thing; none is compared with a
number.
"""

import pytest
import torch
import yaml

from autotune.training.diagnosis import measured_rates, this_machine


def test_the_machine_is_plain_data() -> None:
    machine = this_machine()
    assert yaml.safe_load(yaml.safe_dump(machine)) == machine
    assert machine["processor"]["num_cpus"] >= 1
    assert machine["versions"]["torch"] == torch.__version__
    assert len(machine["gpus"]) == torch.cuda.device_count()


def rates_of(device: str) -> list[str]:
    return [line.partition(":")[0] for line in measured_rates() if f" {device}:" in line]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_products_and_copies_have_rates(device: str) -> None:
    formats = ("float32", "bfloat16", "float16")
    products = [f"torch.{name} product on {device}" for name in formats]
    assert rates_of(device) == [*products, f"copy from the host to {device}"]
