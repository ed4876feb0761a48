"""Every rate that a diagnosis measures on this machine, one after the other."""

from collections.abc import Callable, Iterator

import torch

from autotune.machine import Machine, NotMeasured, Rate
from autotune.training.diagnosis.all_reduce_rates import all_reduce_rates
from autotune.training.diagnosis.copy_rates import copy_rates
from autotune.training.diagnosis.matrix_rates import matrix_rates

_NUM_CPU_RANKS = 2


def measured_rates(machine: Machine, *, limit_seconds: float, say: Callable[[str], None]) -> Iterator[Rate]:
    """Measure matrix products, memory copies and all-reduce on the CPU and on every GPU.

    Args:
        machine: the record of this machine.
        limit_seconds: time limit for each rate, beside its set-up.
        say: called with a line on what is measured next.
    """
    devices = [torch.device("cpu"), *(torch.device("cuda", gpu.index) for gpu in machine.gpus)]
    for device in devices:
        say(f"measuring matrix products on {device}")
        yield from matrix_rates(device, limit_seconds=limit_seconds)
    for device in devices:
        say(f"measuring copies {'within the host' if device.type == 'cpu' else f'between the host and {device}'}")
        yield from copy_rates(device, limit_seconds=limit_seconds)
    say(f"measuring all-reduce between {_NUM_CPU_RANKS} processes on the CPU")
    yield from all_reduce_rates("cpu", num_ranks=_NUM_CPU_RANKS, limit_seconds=limit_seconds)
    if len(machine.gpus) > 1:
        say(f"measuring all-reduce between {len(machine.gpus)} GPUs")
        yield from all_reduce_rates("cuda", num_ranks=len(machine.gpus), limit_seconds=limit_seconds)
    else:
        found = "there is one" if machine.gpus else "there is none"
        yield NotMeasured(what="all-reduce between GPUs over nccl", reason=f"takes two GPUs, and {found}")
