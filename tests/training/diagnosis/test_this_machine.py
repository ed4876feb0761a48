"""What this machine is and what does not go together; its links, read from texts of nvidia-smi's form and made-up folders."""

import os
import platform
from pathlib import Path

import pytest
import torch
import yaml

from autotune.machine import InfiniBandPort, Link, NetworkInterface
from autotune.training.diagnosis.this_machine import (
    NOT_INSTALLED,
    GpuSlot,
    infiniband_ports,
    network_interfaces,
    num_cores,
    parse_gpu_slots,
    parse_topology,
    read_gpu_slots,
    read_links,
    this_machine,
)

_LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  NV#  = Connection traversing a bonded set of # NVLinks
"""
_NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tPIX\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tPIX\tSYS\t X \t\t\t\t\n" + _LEGEND + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_bond_0\n\n"
)
"""As drivers of 2024 print it."""
_OLD = (
    "        GPU0    GPU1    GPU2    mlx5_0  CPU Affinity\n"
    "GPU0     X      NV6     NODE    PIX     0-23,48-71\n"
    "GPU1    NV6      X      SYS     NODE    0-23,48-71\n"
    "GPU2    NODE    SYS      X      SYS     24-47\n"
    "mlx5_0  PIX     NODE    SYS      X\n" + _LEGEND
)
"""As those of 2020 did, with the adapters' own names; here with spaces in place of tabs."""
_ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n" + _LEGEND


def test_this_machine_is_plain_data() -> None:
    machine = this_machine()
    plain = machine.as_dict()
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain
    assert plain["host"] == platform.node()
    assert plain["processor"]["num_cpus"] == len(os.sched_getaffinity(0))
    kilobytes = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert plain["processor"]["memory_bytes"] == pytest.approx(1024 * kilobytes, rel=0.01)
    assert plain["versions"]["python"] == platform.python_version()
    assert len(plain["gpus"]) == torch.cuda.device_count()


def test_cores_are_counted_by_the_threads_that_share_one(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    (tmp_path / "cpufreq").mkdir()
    assert num_cores(tmp_path) == 2
    assert num_cores(tmp_path / "nowhere") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_gpus_that_torch_does_not_see_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nif [ "$1" = topo ]; then echo broken; exit 3; fi\nprintf "0, GPU-7c, 5, 16\\n1, GPU-8c, 5, 16\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = this_machine()
    assert machine.gpus == ()
    unseen, failure = machine.complaints
    assert unseen.startswith("nvidia-smi lists 2 GPUs, and torch sees none (torch 2.")
    assert unseen.endswith(", CUDA_VISIBLE_DEVICES=)")
    assert failure == "nvidia-smi topo -m: broken"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_a_machine_without_gpus_misses_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine().complaints == ()


@pytest.mark.gpu
def test_the_gpus_are_those_that_nvidia_smi_lists() -> None:
    machine = this_machine()
    assert [each.index for each in machine.gpus] == list(range(torch.cuda.device_count()))
    assert all(each.nvidia_smi_index is not None and each.pcie_lanes for each in machine.gpus)
    assert machine.versions["driver"] is not None
    assert machine.complaints == ()


def test_a_topology_is_read_with_the_adapters_own_names() -> None:
    assert [(each.first, each.second, each.kind) for each in parse_topology(_NVLINK)] == [
        ("GPU0", "GPU1", "NV18"),
        ("GPU0", "mlx5_0", "PXB"),
        ("GPU0", "mlx5_bond_0", "SYS"),
        ("GPU1", "mlx5_0", "SYS"),
        ("GPU1", "mlx5_bond_0", "PIX"),
        ("mlx5_0", "mlx5_bond_0", "SYS"),
    ]


def test_a_topology_of_an_old_driver_is_read() -> None:
    found = parse_topology(_OLD)
    assert found[:2] == (Link(first="GPU0", second="GPU1", kind="NV6"), Link(first="GPU0", second="GPU2", kind="NODE"))
    assert found[-1] == Link(first="GPU2", second="mlx5_0", kind="SYS")
    assert len(found) == 6


@pytest.mark.parametrize("text", [_ONE, "", "No devices were found\n", "\tGPU0\tGPU1\tCPU Affinity\nGPU0\n"])
def test_where_there_is_no_pair_there_is_no_link(text: str) -> None:
    assert parse_topology(text) == ()


def test_slots_of_gpus_are_read_by_their_uuid() -> None:
    text = "0, GPU-7c1f-00, 5, 16\n1, GPU-7c1f-01, [N/A], [N/A]\nFailed to read field\n"
    assert parse_gpu_slots(text) == {"GPU-7c1f-00": GpuSlot(0, 5, 16), "GPU-7c1f-01": GpuSlot(1, None, None)}


def _install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "topology").write_text(_NVLINK)
    script = f'if [ "$1" = topo ]; then cat {tmp_path}/topology; else echo "0, GPU-7c1f-00, 4, 8"; fi'
    _install_nvidia_smi(tmp_path, monkeypatch, script)
    assert read_links() == (parse_topology(_NVLINK), None)
    assert read_gpu_slots() == ({"GPU-7c1f-00": GpuSlot(0, 4, 8)}, None)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'NVIDIA-SMI has failed because it could not talk to the driver.'; exit 9", "has failed because it could not talk"),
        ("exit 12", "exit code 12"),
        ("exec sleep 30", "no answer within 0.2 s"),
    ],
)
def test_an_nvidia_smi_that_fails_is_a_reason(script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.training.diagnosis.this_machine._TIMEOUT_SECONDS", 0.2)
    _install_nvidia_smi(tmp_path, monkeypatch, script)
    found, failure = read_links()
    assert found == ()
    assert failure is not None
    assert failure.startswith("nvidia-smi topo -m: ")
    assert reason in failure


def test_where_there_is_no_nvidia_smi_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpu_slots() == ({}, NOT_INSTALLED)


def _write(folder: Path, **contents: str) -> None:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_text(content + "\n")


def test_infiniband_ports_are_read(tmp_path: Path) -> None:
    _write(tmp_path / "mlx5_0/ports/1", state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand")
    _write(tmp_path / "mlx5_1/ports/1", state="1: DOWN", rate="100 Gb/sec (4X EDR)", link_layer="Ethernet")
    assert list(infiniband_ports(tmp_path)) == [
        InfiniBandPort(device="mlx5_0", port="1", link_layer="InfiniBand", state="ACTIVE", rate="400 Gb/sec (4X NDR)"),
        InfiniBandPort(device="mlx5_1", port="1", link_layer="Ethernet", state="DOWN", rate="100 Gb/sec (4X EDR)"),
    ]


def test_network_interfaces_that_are_up_are_read(tmp_path: Path) -> None:
    _write(tmp_path / "ens1", operstate="up", type="1", speed="25000")
    _write(tmp_path / "eth0", operstate="up", type="1", speed="-1")
    _write(tmp_path / "ib0", operstate="up", type="32")  # the kernel refuses to tell its speed
    _write(tmp_path / "ens2", operstate="down", type="1", speed="1000")
    _write(tmp_path / "lo", operstate="up", type="772", speed="10")
    assert list(network_interfaces(tmp_path)) == [
        NetworkInterface(name="ens1", bits_per_second=25e9),
        NetworkInterface(name="eth0", bits_per_second=None),
        NetworkInterface(name="ib0", bits_per_second=None),
    ]


def test_where_the_kernel_has_no_such_folder_there_is_nothing(tmp_path: Path) -> None:
    assert list(infiniband_ports(tmp_path / "infiniband")) == []
    assert list(network_interfaces(tmp_path / "net")) == []
