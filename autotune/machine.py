"""The records of a diagnosis: what a machine is, and what its devices and links give.

What a machine is can be asked for in passing and goes with every study; what it gives has to be measured and is not. All of it is plain
data: ``dataclasses.asdict`` of any record can be written as JSON or YAML.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The CPUs of a machine and their memory."""

    name: str
    num_cores: int | None
    """Physical cores; None where the kernel does not tell them from hardware threads."""
    num_cpus: int
    """Hardware threads that this process may run on."""
    instructions: str
    """The widest vector instructions that torch uses, such as ``AVX512``."""
    memory_bytes: int
    """Of the whole machine; a container may be allowed less."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, as CUDA numbers it in this process."""

    index: int
    name: str
    compute_capability: str
    num_multiprocessors: int
    memory_bytes: int
    uuid: str
    nvidia_smi_index: int | None
    """How nvidia-smi numbers it, and the links; another number than ``index`` where CUDA_VISIBLE_DEVICES is set."""
    pcie_generation: int | None
    """The highest that the GPU and its slot can; at rest a GPU goes down to a lower one. None where nvidia-smi does not tell."""
    pcie_lanes: int | None


@dataclass(frozen=True, kw_only=True)
class Link:
    """How two devices are connected, in nvidia-smi's words and numbering."""

    first: str
    second: str
    kind: str
    """``NV#`` for # NVLinks; PIX, PXB, PHB, NODE, SYS for a way over PCIe, nearest first."""


@dataclass(frozen=True, kw_only=True)
class InfiniBandPort:
    """A port of a host channel adapter, in the kernel's words."""

    device: str
    port: str
    link_layer: str
    """``InfiniBand``, or ``Ethernet`` where it speaks RoCE."""
    state: str
    rate: str


@dataclass(frozen=True, kw_only=True)
class NetworkInterface:
    """A network interface that is up."""

    name: str
    bits_per_second: float | None
    """None where the driver does not tell, as virtual ones often do not."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine is, without measuring anything."""

    host: str
    processor: Processor
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    """Every pair of GPUs and network adapters once; empty where nvidia-smi is not there or tells none."""
    infiniband: tuple[InfiniBandPort, ...]
    networks: tuple[NetworkInterface, ...]
    versions: Mapping[str, str | None]
    """None for what is not there."""
    complaints: tuple[str, ...]
    """What was asked and gave no answer, or answers that do not go together; a line each."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data: mappings, lists, texts and numbers."""
        return dict(_plain(asdict(self)))


@dataclass(frozen=True, kw_only=True)
class MatrixRate:
    """How fast a device multiplies two square matrices."""

    device: str
    precision: str
    """An option of ``precision=``."""
    size: int
    """Rows and columns."""
    flops_per_second: float
    """Floating-point operations: 2 size^3 a product."""


@dataclass(frozen=True, kw_only=True)
class CopyRate:
    """How fast bytes are copied."""

    source: str
    destination: str
    host_memory: str
    """``pageable``, or ``pinned`` where the GPU reads and writes it by itself."""
    num_bytes: int
    """Copied at once."""
    bytes_per_second: float
    """Bytes copied, each counted once, though a copy within the host both reads and writes it."""


@dataclass(frozen=True, kw_only=True)
class AllReduceRate:
    """How fast processes on this machine add up a tensor that each of them has."""

    backend: str
    """``gloo`` or ``nccl``."""
    num_ranks: int
    num_bytes: int
    """Of each rank's tensor."""
    seconds: float
    bus_bytes_per_second: float
    """As nccl-tests defines bus bandwidth: num_bytes / seconds * 2 (n - 1) / n for n ranks, which compares with what a link can."""


@dataclass(frozen=True, kw_only=True)
class NotMeasured:
    """A rate that was asked for and could not be measured here."""

    what: str
    reason: str


Rate = MatrixRate | CopyRate | AllReduceRate | NotMeasured


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a machine is and gives, and what of a search space it cannot run."""

    machine: Machine
    rates: tuple[Rate, ...]
    """In the order that they were measured; empty where nothing was."""
    load: float
    """Processes that wanted a CPU, a mean of the minute before; what they took, the rates lack."""
    space: str
    """Whose options were held against the machine."""
    left_out: tuple[str, ...]
    """Those that a study would leave out of it here, and why, a line each."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the rates sorted by kind."""
        kinds = {"matrix_rates": MatrixRate, "copy_rates": CopyRate, "all_reduce_rates": AllReduceRate, "not_measured": NotMeasured}
        return {
            "machine": self.machine.as_dict(),
            "load": self.load,
            **{name: [asdict(each) for each in self.rates if isinstance(each, kind)] for name, kind in kinds.items()},
            "capability_filter": {"space": self.space, "left_out": list(self.left_out)},
        }


def _plain(value: Any) -> Any:
    """The value with lists for tuples, which YAML would write with a tag of Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
