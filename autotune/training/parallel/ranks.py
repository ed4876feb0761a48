"""The processes that train one model together, as each of them sees them.

Terms are those of ``torch.distributed``: a process is a rank, all of them the world. The first rank speaks for all: it makes each
evaluation, its clock counts, and what its caller wants (another evaluation, or an end) the others are told.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs
from torch.distributed.distributed_c10d import Store

TIMEOUT = timedelta(minutes=30)
"""Of an exchange between ranks; what ends a hung training is the trial's own deadline, long before."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One process among those that train together; by default it is alone."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    def agreed(self, value: Any) -> Any:
        """The first rank's value, whatever this one's is; plain data."""
        if self.size == 1:
            return value
        held = [value]
        distributed.broadcast_object_list(held, src=0, device=torch.device("cpu"))
        return held[0]

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Around what the first rank's caller decides; afterwards the others hear whether it came back."""
        goes_on = False
        try:
            yield
            goes_on = True
        finally:
            with contextlib.nullcontext() if goes_on else contextlib.suppress(RuntimeError):  # others may be gone
                self.agreed(goes_on)

    def goes_on(self) -> bool:
        """On another rank than the first: whether that one's caller came back."""
        return bool(self.agreed(None))

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's tensor."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values


ALONE = Ranks()
"""One process that trains by itself."""


def open_store(host: str = "127.0.0.1") -> TCPStore:
    """Where ranks meet, on a free port of the first one's machine; it is there as long as this object."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


@contextmanager
def joined(store: Store, *, rank: int, size: int, device: torch.device, backend: str | None = None) -> Iterator[Ranks]:
    """This process as one of ``size`` ranks that meet at a store, until the context ends.

    ``backend`` is what tensors on GPUs are exchanged by; None for nccl.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backends = f"cpu:gloo,cuda:{backend or 'nccl'}" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield Ranks(rank=rank, size=size)
    finally:
        distributed.destroy_process_group()
