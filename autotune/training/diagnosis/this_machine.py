"""The facts that ``autotune diagnose`` reports and a study keeps as ``machine.yaml``: processor, GPUs, links, networks and software.

Links are parsed from the output of nvidia-smi and from the kernel's files: NVML has them as numbers for each pair, nvidia-smi as one matrix
with network adapters, and parsing its output can be tested where there is no GPU.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed

from autotune.machine import Gpu, InfiniBandPort, Link, Machine, NetworkInterface, Processor
from autotune.training.capabilities import cpu_name, driver_version, versions
from autotune.training.device import local_capabilities, no_gpu_reason

NOT_INSTALLED = "nvidia-smi is not installed"

_TIMEOUT_SECONDS = 10.0
"""Time limit of one nvidia-smi call: it takes a second where the driver must be loaded first, and a broken driver may never answer."""
_QUERY = "index,uuid,pcie.link.gen.max,pcie.link.width.max"
_LOOPBACK = "772"
"""Interface type of the loopback in the kernel's files (ARPHRD_LOOPBACK)."""


class GpuSlot(NamedTuple):
    """A GPU's index in nvidia-smi and its PCIe slot; a field is None where nvidia-smi does not know it."""

    nvidia_smi_index: int | None
    pcie_generation: int | None
    pcie_lanes: int | None


def this_machine() -> Machine:
    """The record of this machine as this process sees it; unknown facts are None or missing, failures of nvidia-smi are complaints."""
    num_gpus = torch.cuda.device_count()
    slots, no_slots = read_gpu_slots()
    links, no_links = read_links() if slots else ((), no_slots)
    return Machine(
        host=platform.node(),
        processor=Processor(
            name=cpu_name(),
            num_cores=num_cores(),
            num_cpus=local_capabilities().num_cpus,
            instructions=torch.backends.cpu.get_cpu_capability(),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        ),
        gpus=tuple(_gpu(index, slots) for index in range(num_gpus)),
        links=links,
        infiniband=tuple(infiniband_ports()),
        networks=tuple(network_interfaces()),
        versions=_versions(),
        complaints=tuple(_complaints(num_gpus, len(slots), (no_slots, no_links))),
    )


def num_cores(folder: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Number of physical cores, from the kernel's lists of hardware threads that share one; None if the kernel does not tell."""
    try:
        shared = {path.read_text(encoding="utf-8") for path in folder.glob("cpu[0-9]*/topology/thread_siblings_list")}
    except OSError:
        return None
    return len(shared) or None


def _complaints(num_gpus: int, num_slots: int, failures: tuple[str | None, ...]) -> Iterator[str]:
    """Failures of nvidia-smi, and GPUs that torch does not see; a missing nvidia-smi is no failure on a machine without GPUs."""
    if num_slots and not num_gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
        hidden = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}"
        yield f"nvidia-smi lists {num_slots} GPUs, and torch sees none (torch {torch.__version__} for {built}{hidden})"
    elif not num_gpus and (reason := no_gpu_reason()) is not None:
        yield f"torch sees no GPU: {reason}"
    for failure in dict.fromkeys(failures):
        if failure is not None and (num_gpus or failure != NOT_INSTALLED):
            yield failure


def _gpu(index: int, slots: dict[str, GpuSlot]) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    uuid = f"{'MIG' if ' MIG ' in properties.name else 'GPU'}-{properties.uuid}"  # as nvidia-smi writes it
    slot = slots.get(uuid, GpuSlot(None, None, None))
    return Gpu(
        index=index,
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        num_multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        uuid=uuid,
        nvidia_smi_index=slot.nvidia_smi_index,
        pcie_generation=slot.pcie_generation,
        pcie_lanes=slot.pcie_lanes,
    )


def _versions() -> dict[str, str | None]:
    """Versions of the software that times and numbers depend on, and of the software that drives devices and links."""
    has_cuda = torch.cuda.is_available()
    has_nccl = has_cuda and distributed.is_nccl_available()
    try:
        torchao = version("torchao")
    except PackageNotFoundError:
        torchao = None
    return {
        **versions(),
        "torchao": torchao,
        "cudnn": str(torch.backends.cudnn.version()) if has_cuda else None,  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,  # type: ignore[no-untyped-call]
        "driver": driver_version(),
    }


def read_links() -> tuple[tuple[Link, ...], str | None]:
    """The links of this machine's GPUs, and the reason if nvidia-smi could not list them (else None)."""
    text, failure = _nvidia_smi("topo", "-m")
    return parse_topology(text), failure


def read_gpu_slots() -> tuple[dict[str, GpuSlot], str | None]:
    """This machine's GPU slots by GPU UUID, and the reason if nvidia-smi could not list them (else None)."""
    text, failure = _nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    return parse_gpu_slots(text), failure


def _nvidia_smi(*arguments: str) -> tuple[str, str | None]:
    """The output of nvidia-smi and None; if it fails, an empty text and the reason."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", NOT_INSTALLED
    command = f"nvidia-smi {' '.join(arguments)}"
    try:
        completed = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return "", f"{command}: no answer within {_TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return "", f"{command}: {error.strerror}"
    if completed.returncode:
        lines = (completed.stdout + completed.stderr).strip().splitlines()
        return "", f"{command}: {lines[0] if lines else f'exit code {completed.returncode}'}"
    return completed.stdout, None


def parse_topology(text: str) -> tuple[Link, ...]:
    """Parse the links that ``nvidia-smi topo -m`` prints as a matrix, with a row and a column for each GPU and network adapter.

    Network adapters get their names from the legend (``NIC0: mlx5_0``) where there is one; each pair of devices is returned once.
    """
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), [])
    devices = header[: header.index("CPU")] if "CPU" in header else header
    names = {row[0].removesuffix(":"): row[1] for row in rows if len(row) == 2 and re.fullmatch(r"NIC\d+:", row[0])}
    indices = {device: index for index, device in enumerate(devices)}
    links = []
    for row in rows:
        index = indices.get(row[0]) if row else None
        if index is None or row is header or len(row) <= len(devices):
            continue
        for other in range(index + 1, len(devices)):
            first, second = (names.get(device, device) for device in (devices[index], devices[other]))
            links.append(Link(first=first, second=second, kind=row[1 + other]))
    return tuple(links)


def parse_gpu_slots(text: str) -> dict[str, GpuSlot]:
    """Parse the GPU slots, by GPU UUID, that ``nvidia-smi --query-gpu`` prints as CSV; a ``[N/A]`` becomes None."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return {row[1]: GpuSlot(_number(row[0]), _number(row[2]), _number(row[3])) for row in rows if len(row) == _QUERY.count(",") + 1}


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def infiniband_ports(folder: Path = Path("/sys/class/infiniband")) -> Iterator[InfiniBandPort]:
    """Every port of every InfiniBand host channel adapter in the kernel's folder; none if there is no such folder."""
    for path in sorted(folder.glob("*/ports/*")):
        yield InfiniBandPort(
            device=path.parent.parent.name,
            port=path.name,
            link_layer=_content(path / "link_layer"),
            state=_content(path / "state").rpartition(":")[2].strip(),
            rate=_content(path / "rate"),
        )


def network_interfaces(folder: Path = Path("/sys/class/net")) -> Iterator[NetworkInterface]:
    """Every network interface in the kernel's folder that is up, except the loopback."""
    for path in sorted(folder.glob("*")):
        if _content(path / "operstate") == "up" and _content(path / "type") != _LOOPBACK:
            megabits = _number(_content(path / "speed"))  # the file holds -1 or cannot be read where the speed is not known
            yield NetworkInterface(name=path.name, bits_per_second=1e6 * megabits if megabits else None)


def _content(path: Path) -> str:
    """A file's text; empty if it cannot be read, which happens at times with many of the kernel's files."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""
