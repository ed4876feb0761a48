"""A diagnosis on a terminal, of a machine that is made up."""

import io
from dataclasses import replace

from rich.console import Console

from autotune.machine import (
    AllReduceRate,
    CopyRate,
    Diagnosis,
    Gpu,
    InfiniBandPort,
    Link,
    Machine,
    MatrixRate,
    NetworkInterface,
    NotMeasured,
    Processor,
)
from autotune.reporting.machine_text import print_diagnosis

GPU = Gpu(
    index=0,
    name="NVIDIA H200",
    compute_capability="9.0",
    num_multiprocessors=132,
    memory_bytes=139 * 2**30,
    uuid="GPU-7c",
    nvidia_smi_index=3,
    pcie_generation=5,
    pcie_lanes=16,
)
MACHINE = Machine(
    host="node[7]",
    processor=Processor(name="A CPU", num_cores=48, num_cpus=96, instructions="AVX512", memory_bytes=2**40),
    gpus=(GPU, replace(GPU, index=1, uuid="GPU-8c", nvidia_smi_index=1, pcie_lanes=None)),
    links=(
        Link(first="GPU0", second="GPU1", kind="NV18"),
        Link(first="GPU0", second="mlx5_0", kind="PXB"),
        Link(first="GPU1", second="mlx5_0", kind="SYS"),
    ),
    infiniband=(InfiniBandPort(device="mlx5_0", port="1", link_layer="InfiniBand", state="ACTIVE", rate="400 Gb/sec (4X NDR)"),),
    networks=(NetworkInterface(name="ens1", bits_per_second=25e9),),
    versions={"torch": "2.13.0", "nccl": None},
    complaints=("nvidia-smi topo -m: broken",),
)
BARE = replace(MACHINE, gpus=(), links=(), infiniband=(), networks=(), complaints=())
RATES = (
    MatrixRate(device="cpu", precision="fp32", size=1024, flops_per_second=1.6e11),
    MatrixRate(device="cuda:0", precision="bf16", size=8192, flops_per_second=7.12e14),
    NotMeasured(what="tf32 products on cpu", reason="for GPUs"),
    CopyRate(source="host", destination="cuda:0", host_memory="pinned", num_bytes=2**28, bytes_per_second=5.54e10),
    CopyRate(source="host", destination="host", host_memory="pageable", num_bytes=2**28, bytes_per_second=9.994e9),
    AllReduceRate(backend="nccl", num_ranks=2, num_bytes=2**16, seconds=3.2e-05, bus_bytes_per_second=2.048e9),
)
DIAGNOSIS = Diagnosis(machine=MACHINE, rates=RATES, load=3.0, space="the search space of cnn", left_out=("precision=fp8: no torchao",))


def printed(diagnosis: Diagnosis) -> list[str]:
    file = io.StringIO()
    print_diagnosis(Console(file=file, width=120), diagnosis)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_machine_with_gpus_is_told_whole() -> None:
    assert printed(DIAGNOSIS) == [
        "node[7]",
        "  processor  A CPU, 48 cores, 96 CPUs for this process, AVX512",
        "  memory     1024.0 GiB",
        "  GPU 0      NVIDIA H200, 139.0 GiB, compute capability 9.0, 132 multiprocessors, PCIe 5 x16, GPU3 of the links, GPU-7c",
        "  GPU 1      NVIDIA H200, 139.0 GiB, compute capability 9.0, 132 multiprocessors, GPU-8c",
        "  links      NV18 (over 18 NVLinks): GPU0-GPU1",
        "  links      PXB (over several PCIe bridges): GPU0-mlx5_0 (GPU and network adapter)",
        "  links      SYS (over PCIe and between NUMA nodes): GPU1-mlx5_0 (GPU and network adapter)",
        "  InfiniBand mlx5_0 port 1: 400 Gb/sec (4X NDR), ACTIVE, InfiniBand",
        "  network    ens1: 25 Gbit/s",
        "  versions   torch 2.13.0",
        "  not there  nccl",
        "  but        nvidia-smi topo -m: broken",
        "",
        "matrix product                       rate         of",
        "fp32 on cpu                   160 GFLOP/s  1024 rows",
        "bf16 on cuda:0                712 TFLOP/s  8192 rows",
        "",
        "copy                          GB/s       of",
        "host to cuda:0, pinned        55.4  256 MiB",
        "host to host                  9.99  256 MiB",
        "",
        "all-reduce                    bus GB/s      of     ms",
        "2 processes, nccl                 2.05  64 KiB  0.032",
        "",
        "not measured  tf32 products on cpu: for GPUs",
        "left out      precision=fp8: no torchao",
        "Left out is what a study would take out of the search space of cnn here.",
    ]


def test_what_is_not_there_is_said() -> None:
    said = printed(Diagnosis(machine=BARE, rates=(), load=99.0, space="it", left_out=()))
    assert said[3:6] == ["  GPUs       none found", "  InfiniBand none found", "  network    none found"]
    assert "left out      nothing" in said
    assert "copy" not in " ".join(said)
    assert "busy" not in " ".join(said)


def test_a_busy_machine_is_warned_of() -> None:
    told = "  but        busy: 51.0 processes wanted these 96 CPUs in the last minute; rates are of what they left"
    assert told in printed(replace(DIAGNOSIS, load=51.0))
    assert not any("busy" in line for line in printed(replace(DIAGNOSIS, load=47.0)))


def test_many_links_of_a_kind_are_counted() -> None:
    links = [Link(first=f"GPU{first}", second=f"GPU{second}", kind="NV18") for first in range(8) for second in range(first + 1, 8)]
    odd = replace(links[0], kind="SYS")
    said = printed(replace(DIAGNOSIS, machine=replace(MACHINE, links=(odd, *links[1:]))))
    told = [line.strip() for line in said if line.startswith("  links")]
    assert told == [
        "links      SYS (over PCIe and between NUMA nodes): GPU0-GPU1",
        "links      NV18 (over 18 NVLinks): 27 of 28 pairs",
    ]


def test_gpus_whose_links_nobody_tells_are_not_passed_over() -> None:
    told = "  links      none told between GPUs"
    assert told in printed(replace(DIAGNOSIS, machine=replace(MACHINE, links=())))
    assert told not in printed(replace(DIAGNOSIS, machine=replace(MACHINE, links=(), gpus=(GPU,))))


def test_a_diagnosis_is_plain_data_sorted_by_kind() -> None:
    plain = DIAGNOSIS.as_dict()
    assert [len(plain[name]) for name in ("matrix_rates", "copy_rates", "all_reduce_rates", "not_measured")] == [2, 2, 1, 1]
    assert plain["copy_rates"][0] == {
        "source": "host",
        "destination": "cuda:0",
        "host_memory": "pinned",
        "num_bytes": 2**28,
        "bytes_per_second": 5.54e10,
    }
    assert plain["capability_filter"] == {"space": "the search space of cnn", "left_out": ["precision=fp8: no torchao"]}
    assert plain["machine"]["gpus"][1]["pcie_lanes"] is None
    assert isinstance(plain["machine"]["links"], list)
