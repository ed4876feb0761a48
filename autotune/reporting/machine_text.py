"""Terminal output of a machine's diagnosis; it is readable in a log file, too."""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.machine import AllReduceRate, CopyRate, Diagnosis, Gpu, Link, Machine, MatrixRate, NotMeasured, Rate

_LINK_KINDS = {
    "PIX": "over one PCIe bridge at most",
    "PXB": "over several PCIe bridges",
    "PHB": "over a PCIe host bridge",
    "NODE": "over PCIe host bridges of a NUMA node",
    "SYS": "over PCIe and between NUMA nodes",
}
_MAX_PAIRS = 8
"""Largest number of device pairs that are listed one by one; of more pairs, only their number is shown."""

_BUSY = 0.5
"""Load per CPU (processes that wanted to run) in the minute before measuring, above which a warning is printed."""


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Print what the machine is, its measured rates, and the options of a search space that it cannot run."""
    _say(console, Text(diagnosis.machine.host, style="bold"))
    for name, value in _facts(diagnosis.machine):
        _say(console, Text.assemble((f"  {name:<11}", "dim"), value))
    num_cpus = diagnosis.machine.processor.num_cpus
    if diagnosis.rates and diagnosis.load > _BUSY * num_cpus:
        busy = f"busy: {diagnosis.load:.1f} processes wanted these {num_cpus} CPUs in the last minute; rates are of what they left"
        _say(console, Text.assemble((f"  {'but':<11}", "dim"), busy))
    for table in _tables(diagnosis.rates):
        console.print()
        console.print(table)
    console.print()
    for rate in diagnosis.rates:
        if isinstance(rate, NotMeasured):
            _say(console, Text.assemble(("not measured  ", "dim"), f"{rate.what}: {rate.reason}"))
    for line in diagnosis.left_out:
        _say(console, Text.assemble(("left out      ", "dim"), line))
    if not diagnosis.left_out:
        _say(console, Text.assemble(("left out      ", "dim"), "nothing"))
    _say(console, Text(f"Left out is what a study would take out of {diagnosis.space} here.", style="dim"))


def _facts(machine: Machine) -> Iterator[tuple[str, str]]:
    processor = machine.processor
    cores = "" if processor.num_cores is None else f"{processor.num_cores} cores, "
    yield "processor", f"{processor.name}, {cores}{processor.num_cpus} CPUs for this process, {processor.instructions}"
    yield "memory", _gibibytes(processor.memory_bytes)
    for gpu in machine.gpus:
        yield f"GPU {gpu.index}", _gpu(gpu)
    if not machine.gpus:
        yield "GPUs", "none found"
    yield from (("links", line) for line in _links(machine.links))
    if len(machine.gpus) > 1 and not any(_is_gpu(link.first) and _is_gpu(link.second) for link in machine.links):
        yield "links", "none told between GPUs"
    for port in machine.infiniband:
        yield "InfiniBand", f"{port.device} port {port.port}: {port.rate}, {port.state}, {port.link_layer}"
    if not machine.infiniband:
        yield "InfiniBand", "none found"
    for network in machine.networks:
        speed = "speed not told" if network.bits_per_second is None else f"{network.bits_per_second / 1e9:g} Gbit/s"
        yield "network", f"{network.name}: {speed}"
    if not machine.networks:
        yield "network", "none found"
    yield "versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version is not None)
    missing = [name for name, version in machine.versions.items() if version is None]
    if missing:
        yield "not there", ", ".join(missing)
    yield from (("but", line) for line in machine.complaints)


def _gpu(gpu: Gpu) -> str:
    facts = [gpu.name, _gibibytes(gpu.memory_bytes), f"compute capability {gpu.compute_capability}"]
    facts.append(f"{gpu.num_multiprocessors} multiprocessors")
    if gpu.pcie_generation is not None and gpu.pcie_lanes is not None:
        facts.append(f"PCIe {gpu.pcie_generation} x{gpu.pcie_lanes}")
    if gpu.nvidia_smi_index not in (None, gpu.index):
        facts.append(f"GPU{gpu.nvidia_smi_index} of the links")
    return ", ".join([*facts, gpu.uuid])


def _links(links: Sequence[Link]) -> Iterator[str]:
    """A line for each kind of link between two GPUs, and for each kind between a GPU and a network adapter."""
    between_gpus = [link for link in links if _is_gpu(link.first) and _is_gpu(link.second)]
    to_adapters = [link for link in links if _is_gpu(link.first) != _is_gpu(link.second)]
    for pairs in (between_gpus, to_adapters):
        for kind in dict.fromkeys(link.kind for link in pairs):
            names = [f"{link.first}-{link.second}" for link in pairs if link.kind == kind]
            shown = ", ".join(names) if len(names) <= _MAX_PAIRS else f"{len(names)} of {len(pairs)} pairs"
            yield f"{kind} ({_describe_kind(kind)}): {shown}{' (GPU and network adapter)' if pairs is to_adapters else ''}"


def _is_gpu(device: str) -> bool:
    return re.fullmatch(r"GPU\d+", device) is not None


def _describe_kind(kind: str) -> str:
    match = re.fullmatch(r"NV(\d+)", kind)
    return f"over {match[1]} NVLinks" if match else _LINK_KINDS.get(kind, "in nvidia-smi's words")


def _tables(rates: Iterable[Rate]) -> Iterator[Table]:
    rates = list(rates)
    products = [rate for rate in rates if isinstance(rate, MatrixRate)]
    copies = [rate for rate in rates if isinstance(rate, CopyRate)]
    sums = [rate for rate in rates if isinstance(rate, AllReduceRate)]
    if products:
        rows = [(f"{rate.precision} on {rate.device}", _flops(rate.flops_per_second), f"{rate.size} rows") for rate in products]
        yield _table(("matrix product", "rate", "of"), rows)
    if copies:
        rows = [(_copy(rate), _digits(rate.bytes_per_second / 1e9), _binary(rate.num_bytes)) for rate in copies]
        yield _table(("copy", "GB/s", "of"), rows)
    if sums:
        yield _table(("all-reduce", "bus GB/s", "of", "ms"), [_sum_row(rate) for rate in sums])


def _flops(per_second: float) -> str:
    unit, size = ("TFLOP/s", 1e12) if per_second >= 1e12 else ("GFLOP/s", 1e9)
    return f"{_digits(per_second / size)} {unit}"


def _copy(rate: CopyRate) -> str:
    memory = "" if rate.source == rate.destination else f", {rate.host_memory}"
    return f"{rate.source} to {rate.destination}{memory}"


def _sum_row(rate: AllReduceRate) -> tuple[str, ...]:
    bus = _digits(rate.bus_bytes_per_second / 1e9)
    return f"{rate.num_ranks} processes, {rate.backend}", bus, _binary(rate.num_bytes), _digits(1e3 * rate.seconds)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=True, justify="right" if index else "left", min_width=0 if index else 28)
    for row in rows:
        table.add_row(*row)
    return table


def _digits(number: float) -> str:
    """A number with about three significant digits, without an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}" if number >= 1 else f"{number:.3f}"


def _binary(num_bytes: int) -> str:
    return f"{num_bytes // 2**20} MiB" if num_bytes >= 2**20 else f"{num_bytes // 2**10} KiB"


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _say(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True)
