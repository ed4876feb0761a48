"""How devices and machines are connected: what nvidia-smi and the kernel tell, read from their texts and files.

NVML would tell the same through a package of its own (nvidia-ml-py); nvidia-smi comes with every driver, and a text can be tested where
there is no GPU.
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
"""Of one call of nvidia-smi, which takes a second where the driver has to be loaded first; a broken driver may not answer at all."""
_QUERY = "index,uuid,pcie.link.gen.max,pcie.link.width.max"
_LOOPBACK = "772"
"""The kernel's ARPHRD_LOOPBACK."""


class GpuSlot(NamedTuple):
    """Where a GPU sits, as nvidia-smi tells it; None for what it does not know."""

    nvidia_smi_index: int | None
    pcie_generation: int | None
    pcie_lanes: int | None


def read_links() -> tuple[tuple[Link, ...], str | None]:
    """The links of this machine's GPUs; and why there are none to tell, where nvidia-smi gave no answer."""
    text, failure = _nvidia_smi("topo", "-m")
    return parse_topology(text), failure


def read_gpu_slots() -> tuple[dict[str, GpuSlot], str | None]:
    """Where each GPU sits, by its UUID; and why there are none to tell, where nvidia-smi gave no answer."""
    text, failure = _nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    return parse_gpu_slots(text), failure


def _nvidia_smi(*arguments: str) -> tuple[str, str | None]:
    """What nvidia-smi prints, and None; where it fails, nothing and the reason."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", NOT_INSTALLED
    what = f"nvidia-smi {' '.join(arguments)}"
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return "", f"{what}: no answer within {_TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return "", f"{what}: {error.strerror}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return "", f"{what}: {said[0] if said else f'exit code {done.returncode}'}"
    return done.stdout, None


def parse_topology(text: str) -> tuple[Link, ...]:
    """The links in what ``nvidia-smi topo -m`` prints: a matrix with a row and a column for each GPU and network adapter.

    Adapters are called by the names of its legend (``NIC0: mlx5_0``) where it has one; each pair is told once.
    """
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), [])
    devices = header[: header.index("CPU")] if "CPU" in header else header
    names = {row[0].removesuffix(":"): row[1] for row in rows if len(row) == 2 and re.fullmatch(r"NIC\d+:", row[0])}
    places = {device: place for place, device in enumerate(devices)}
    links = []
    for row in rows:
        place = places.get(row[0]) if row else None
        if place is None or row is header or len(row) <= len(devices):
            continue
        for other in range(place + 1, len(devices)):
            first, second = (names.get(each, each) for each in (devices[place], devices[other]))
            links.append(Link(first=first, second=second, kind=row[1 + other]))
    return tuple(links)


def parse_gpu_slots(text: str) -> dict[str, GpuSlot]:
    """Where each GPU sits, by its UUID, in what ``nvidia-smi --query-gpu`` prints as CSV; ``[N/A]`` is not known."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return {row[1]: GpuSlot(_number(row[0]), _number(row[2]), _number(row[3])) for row in rows if len(row) == _QUERY.count(",") + 1}


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def infiniband_ports(folder: Path = Path("/sys/class/infiniband")) -> Iterator[InfiniBandPort]:
    """Every port of every host channel adapter, as the kernel's folder has them; none where there is no such folder."""
    for path in sorted(folder.glob("*/ports/*")):
        yield InfiniBandPort(
            device=path.parent.parent.name,
            port=path.name,
            link_layer=_content(path / "link_layer"),
            state=_content(path / "state").rpartition(":")[2].strip(),
            rate=_content(path / "rate"),
        )


def network_interfaces(folder: Path = Path("/sys/class/net")) -> Iterator[NetworkInterface]:
    """Every interface that is up, the loopback apart, as the kernel's folder has them."""
    for path in sorted(folder.glob("*")):
        if _content(path / "operstate") == "up" and _content(path / "type") != _LOOPBACK:
            megabits = _number(_content(path / "speed"))  # -1, or an error, where it is not known
            yield NetworkInterface(name=path.name, bits_per_second=1e6 * megabits if megabits else None)


def _content(path: Path) -> str:
    """A file's text; empty where it cannot be read, as many of the kernel's cannot at times."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""
