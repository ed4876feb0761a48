"""What this machine is, and what does not go together."""

import os
import platform
from pathlib import Path

import pytest
import torch
import yaml

from autotune.training.diagnosis.this_machine import num_cores, this_machine


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
