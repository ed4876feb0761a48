"""Records of a diagnosis: the parts of a machine, and the measured rates of its devices and links.

The description of a machine is cheap, so every study stores it; rates take time to measure, so only a diagnosis has them. All records hold
plain data: ``dataclasses.asdict`` of any of them can be written as JSON or YAML.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The CPUs of a machine and their memory."""

    name: str
    num_cores: int | None
    """Number of physical cores; None if the kernel does not tell them from hardware threads."""
    num_cpus: int
    """Number of hardware threads that this process may run on."""
    instructions: str
    """The widest vector instructions that torch uses, such as ``AVX512``."""
    memory_bytes: int
    """Memory of the whole machine; a container may be limited to less."""


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
    """Number of the GPU in nvidia-smi and in ``Link``; differs from ``index`` if CUDA_VISIBLE_DEVICES is set."""
    pcie_generation: int | None
    """Highest PCIe generation of GPU and slot together; an idle GPU switches to a lower one. None if nvidia-smi does not tell."""
    pcie_lanes: int | None


@dataclass(frozen=True, kw_only=True)
class Link:
    """Connection of two devices, in nvidia-smi's terms and numbering."""

    first: str
    second: str
    kind: str
    """``NV#`` for # NVLinks; PIX, PXB, PHB, NODE or SYS for a path over PCIe, from the shortest to the longest."""


@dataclass(frozen=True, kw_only=True)
class InfiniBandPort:
    """A port of an InfiniBand host channel adapter, in the kernel's terms."""

    device: str
    port: str
    link_layer: str
    """``InfiniBand``, or ``Ethernet`` for RoCE."""
    state: str
    rate: str


@dataclass(frozen=True, kw_only=True)
class NetworkInterface:
    """A network interface that is up."""

    name: str
    bits_per_second: float | None
    """Speed of the interface; None if its driver does not tell, as is common for virtual interfaces."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Description of a machine, without any measurement."""

    host: str
    processor: Processor
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    """Link of every pair of GPUs and network adapters, once; empty if nvidia-smi is missing or lists none."""
    infiniband: tuple[InfiniBandPort, ...]
    networks: tuple[NetworkInterface, ...]
    versions: Mapping[str, str | None]
    """Versions of software by name; None for what is not installed."""
    complaints: tuple[str, ...]
    """Queries that failed and answers that contradict each other, one line each."""

    def as_dict(self) -> dict[str, Any]:
        """The machine as plain data: mappings, lists, texts and numbers."""
        return dict(_plain(asdict(self)))


@dataclass(frozen=True, kw_only=True)
class MatrixRate:
    """Measured speed at which a device multiplies two square matrices."""

    device: str
    precision: str
    """Name of an option of the config group ``precision``."""
    size: int
    """Number of rows, and of columns, of each matrix."""
    flops_per_second: float
    """Floating-point operations per second, counting 2 size^3 for a product."""


@dataclass(frozen=True, kw_only=True)
class CopyRate:
    """Measured speed of copying bytes between two places."""

    source: str
    destination: str
    host_memory: str
    """``pageable``, or ``pinned`` if the GPU itself reads and writes the host's memory."""
    num_bytes: int
    """Size of one copy in bytes."""
    bytes_per_second: float
    """Bytes copied per second; each byte counts once, although a copy within the host both reads and writes it."""


@dataclass(frozen=True, kw_only=True)
class AllReduceRate:
    """Measured speed of an all-reduce: processes on this machine sum a tensor that each of them has."""

    backend: str
    """``gloo`` or ``nccl``."""
    num_ranks: int
    num_bytes: int
    """Size of each rank's tensor in bytes."""
    seconds: float
    bus_bytes_per_second: float
    """Bus bandwidth as nccl-tests defines it, num_bytes / seconds * 2 (n - 1) / n for n ranks: comparable with a link's bandwidth."""


@dataclass(frozen=True, kw_only=True)
class NotMeasured:
    """A rate that could not be measured on this machine."""

    what: str
    reason: str


Rate = MatrixRate | CopyRate | AllReduceRate | NotMeasured


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A machine with its measured rates, and the options of a search space that it cannot run."""

    machine: Machine
    rates: tuple[Rate, ...]
    """Measured rates, in the order of measurement; empty if nothing was measured."""
    load: float
    """Load average of the minute before: the mean number of processes that wanted a CPU. They lower the rates."""
    space: str
    """Name of the search space whose options were checked against the machine."""
    left_out: tuple[str, ...]
    """Options that a study on this machine would leave out of the search space, with the reason, one line each."""

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data, with the rates grouped by kind."""
        kinds = {"matrix_rates": MatrixRate, "copy_rates": CopyRate, "all_reduce_rates": AllReduceRate, "not_measured": NotMeasured}
        return {
            "machine": self.machine.as_dict(),
            "load": self.load,
            **{name: [asdict(rate) for rate in self.rates if isinstance(rate, kind)] for name, kind in kinds.items()},
            "capability_filter": {"space": self.space, "left_out": list(self.left_out)},
        }


def _plain(value: Any) -> Any:
    """Copy of a value with tuples turned into lists, since YAML would write tuples with a Python tag."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
