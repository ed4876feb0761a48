"""Memory copy rates: within the host, and between the host and each GPU."""

from collections.abc import Iterator

import torch

from autotune.machine import CopyRate, NotMeasured
from autotune.training.device import synchronizer
from autotune.training.diagnosis.rounds import median_run_seconds

NUM_BYTES = 256 * 2**20
"""Bytes of one copy: more than the caches of all but the largest processors hold."""
_HOST = torch.device("cpu")


def copy_rates(device: torch.device, *, limit_seconds: float, num_bytes: int = NUM_BYTES) -> Iterator[CopyRate | NotMeasured]:
    """Measure copies within the host for the CPU; for a GPU, copies to and from it, each with pageable and with pinned host memory.

    The option ``data_path`` prefetches through pinned memory; pageable memory is first copied into pinned memory by the driver.
    ``limit_seconds`` is the time limit for each rate, ``num_bytes`` the size of one copy.
    """
    if device.type == "cpu":
        yield _rate(_HOST, _HOST, "pageable", num_bytes, limit_seconds)
        return
    for memory in ("pageable", "pinned"):
        for source, destination in ((_HOST, device), (device, _HOST)):
            try:
                yield _rate(source, destination, memory, num_bytes, limit_seconds)
            except RuntimeError as error:  # memory that cannot be allocated or pinned
                yield NotMeasured(what=f"copy of {memory} memory, {source} to {destination}", reason=str(error).splitlines()[0])


def _rate(source: torch.device, destination: torch.device, memory: str, num_bytes: int, limit_seconds: float) -> CopyRate:
    origin, copy = (
        torch.ones(num_bytes, dtype=torch.uint8, device=device, pin_memory=memory == "pinned" and device.type == "cpu")
        for device in (source, destination)
    )
    gpu = source if source.type == "cuda" else destination
    seconds = median_run_seconds(lambda: copy.copy_(origin, non_blocking=True), synchronizer(gpu), limit_seconds=limit_seconds)
    return CopyRate(
        source=_name(source),
        destination=_name(destination),
        host_memory=memory,
        num_bytes=num_bytes,
        bytes_per_second=num_bytes / seconds,
    )


def _name(device: torch.device) -> str:
    return "host" if device.type == "cpu" else str(device)
