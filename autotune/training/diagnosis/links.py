"""Links between devices and between machines, parsed from the output of nvidia-smi and from the kernel's files.

NVML has the same facts but needs a package of its own (nvidia-ml-py); nvidia-smi comes with every driver, and parsing its output can be
tested where there is no GPU.
"""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from autotune.machine import InfiniBandPort, Link, NetworkInterface

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
