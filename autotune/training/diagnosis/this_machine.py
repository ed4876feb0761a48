"""The record of this machine: devices, links and versions, found out quickly and without measuring anything."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import distributed

from autotune.machine import Gpu, Machine, Processor
from autotune.training.device import cpu_name, local_capabilities
from autotune.training.diagnosis.links import NOT_INSTALLED, GpuSlot, infiniband_ports, network_interfaces, read_gpu_slots, read_links
from autotune.training.versions import driver_version, versions


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
    for failure in dict.fromkeys(failures):
        if failure is not None and (num_gpus or failure != NOT_INSTALLED):
            yield failure


def _gpu(index: int, slots: dict[str, GpuSlot]) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    uuid = f"GPU-{properties.uuid}"  # as nvidia-smi writes it
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
