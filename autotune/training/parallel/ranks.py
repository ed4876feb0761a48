"""The ranks that train one model together, as one of these processes sees them.

Terms are those of ``torch.distributed``: a process is a rank, all of them are the world. The first
rank speaks for all: it yields each evaluation, its clock counts, and the other ranks are told what
its caller wants (another evaluation, or an end).
"""

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store, _abort_process_group
from torch.distributed.tensor import DTensor

from autotune.measurement import Phase, PhaseClock
from autotune.training.main_thread import in_thread

_log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""Time limit of one exchange between ranks; a hung training is ended long before, by the trial's
own deadline."""
_ASK_EVERY_SECONDS = 5.0
"""Most seconds of training between two questions to the first rank."""
_LEAVE_SECONDS = 5.0
"""Seconds that leaving the process group may take before it is aborted: NCCL waits for exchanges
that a failed rank never joins."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One process among the ranks that train together; by default it is the only one."""

    rank: int = 0
    size: int = 1
    is_joined: bool = False
    """Whether this process is in a process group, which may have one rank only."""
    _meshes: dict[tuple[int, ...], DeviceMesh] = field(
        default_factory=dict, repr=False, compare=False
    )

    def mesh(self, device: torch.device, num_parts: int, tensor_size: int) -> DeviceMesh:
        """The device mesh of all ranks with these sizes, made when first asked for.

        Ranks along ``shard`` divide each batch and every weight, those along ``tensor`` every
        layer. All meshes have both dimensions, since torch keeps what it found out for a mesh by
        the names of its process groups, which count the groups made before. A mesh is kept as long
        as the process group: a new one has new process groups, and on GPUs each connects its ranks
        anew.
        """
        sizes = num_parts, tensor_size
        if sizes not in self._meshes:
            self._meshes[sizes] = init_device_mesh(
                device.type, sizes, mesh_dim_names=("shard", "tensor")
            )
        return self._meshes[sizes]

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    def broadcast_from_first(self, value: Any) -> Any:
        """Broadcast the first rank's value, which must be plain data.

        The values that other ranks pass are ignored.
        """
        if self.size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, which must be plain data, in the order of the ranks."""
        values = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Context for the ``yield`` of the first rank: at its end the other ranks are told
        whether the caller asked for more.
        """
        goes_on = False
        try:
            yield
            goes_on = True
        finally:
            # others may be gone
            with contextlib.nullcontext() if goes_on else contextlib.suppress(RuntimeError):
                self.broadcast_from_first(goes_on)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Replace ``values`` by the sum of all ranks' tensors, in place."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    @torch.no_grad()
    def share_buffers(self, model: torch.nn.Module) -> None:
        """Give all ranks the first one's buffers, such as norm statistics."""
        for buffer in model.buffers() if self.size > 1 else ():
            local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
            distributed.broadcast(local, src=0)


ALONE = Ranks()
"""The ranks of a training in a single process."""


def open_store(host: str = "127.0.0.1") -> TCPStore:
    """Open the store at which ranks meet, on a free port of the first rank's machine.

    It exists as long as the returned object.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # torch itself would listen at all addresses of the machine
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )


@contextmanager
def joined(
    store: Store, *, rank: int, size: int, device: torch.device, backend: str | None = None
) -> Iterator[Ranks]:
    """Join the process group as one of ``size`` ranks that meet at a store, until the context ends.

    Raises:
        RuntimeError: the process group does not end, although it was aborted.

    A GPU without an index is this process's current one. The group isn't bound to it
    (``device_id``): meshes would then be split from NCCL's group alone, and could not exchange what
    ``cpu_offload`` keeps in host memory.

    ``backend`` is the torch.distributed backend for tensors on GPUs; None means nccl. Tensors on
    the CPU always use gloo.
    """
    if device.type == "cuda":
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
    backends = f"cpu:gloo,cuda:{backend or 'nccl'}" if device.type == "cuda" else "gloo"
    excepthook = sys.excepthook
    distributed.init_process_group(
        backends, store=store, rank=rank, world_size=size, timeout=TIMEOUT
    )
    # torch puts [rank0]: before each line of it, once more for each group that a process joins
    sys.excepthook = excepthook
    try:
        yield Ranks(rank=rank, size=size, is_joined=True)
    finally:
        has_left = _leave()
    if not has_left:
        raise RuntimeError("the process group does not end")


def _leave() -> bool:
    """Leave the process group, and abort it if that takes too long.

    Return whether it has ended: else this process can join no other.
    """

    def destroy() -> None:
        try:
            distributed.destroy_process_group()
        # the group is gone in any case: a rank failed, or it was aborted
        except Exception as error:  # noqa: BLE001
            _log.warning("leaving the process group: %s", error)

    leaving = threading.Thread(target=destroy, name="leave-ranks", daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)
    if leaving.is_alive():
        abort()
        leaving.join(_LEAVE_SECONDS)
    return not leaving.is_alive()


def abort() -> None:
    """Abort this process's exchanges with other ranks, in a thread: what waits for one on a GPU
    then goes on or fails.
    """
    in_thread("abort-ranks", _abort_process_group)  # whose error says that the group is gone


class TimeLimit:
    """A limit on the train seconds of the first rank's clock, and the notice by which the training
    is to be saved at once.

    Asking the first rank in every step would cost as much as a small step. It is asked when half of
    the steps are done that fitted into the time left when it was last asked: more often near the
    limit, and at least every few seconds, for the notice.

    Args:
        ranks: the ranks that train together; several begin at the first step.
        clock: this rank's clock.
        seconds: the limit.
        sees_notice: whether this rank sees the notice.
    """

    def __init__(
        self,
        ranks: Ranks,
        clock: PhaseClock,
        seconds: float,
        sees_notice: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks, self._clock, self._seconds = ranks, clock, seconds
        self._sees_notice = sees_notice
        self._next_step = 1
        self.has_notice = False
        """Whether the notice was there when it was last looked for; the same on all ranks."""

    def is_past(self, step: int) -> bool:
        """Whether the limit has passed after ``step`` steps; every rank gets the same answer."""
        if self._ranks.size > 1 and step < self._next_step:
            return False
        spent, self.has_notice = self._clock.seconds(Phase.TRAIN), self._sees_notice()
        if self._ranks.size == 1:
            return spent > self._seconds
        steps_a_second = step / max(1e-6, spent)
        seconds_left = min(_ASK_EVERY_SECONDS, max(0.0, self._seconds - spent) / 2)
        next_step = step + max(1, min(1000, int(seconds_left * steps_a_second)))
        is_past, self.has_notice, self._next_step = self._ranks.broadcast_from_first(
            (spent > self._seconds, self.has_notice, next_step)
        )
        return bool(is_past)
